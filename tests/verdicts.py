"""What a run says while it runs: each failure as it happens, and no long wait for what is dead."""

from __future__ import annotations

import re
import sys
from collections import Counter

import pytest

TIMEOUTS = 3
"""As many tests of a module reach their timeout; the rest of it waits for the same thing."""
_GROUP = re.compile(r"@[^\]]*$")
"""What xdist's ``loadgroup`` appends to a test's name."""
_PART_LIMIT = 200
_LAST_LINES = 12


class Verdicts:
    """Prints each failure at once, and gives up a module in which tests only wait.

    Under xdist failures are otherwise shown at the end, so a run that is cut shows none; and a dead
    server costs each of its tests a timeout.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._timeouts: Counter[str] = Counter()
        self._broke = ""

    @pytest.hookimpl(tryfirst=True)  # before fixtures, which may be what is waited for
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        module = _module(item.nodeid)
        if self._timeouts[module] >= TIMEOUTS:
            pytest.fail(f"not tried: {TIMEOUTS} tests of {module} timed out", pytrace=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        if "from pytest-timeout" in report.longreprtext:
            self._timeouts[_module(report.nodeid)] += 1
        if hasattr(self._config, "workerinput"):
            return  # the process that started this one prints it
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        name = _GROUP.sub("", report.nodeid)
        terminal.write(f"\n{name} failed ({report.when}): {_reason(report)}\n", flush=True)

    def pytest_internalerror(self, excrepr: object) -> None:
        self._broke = self._broke or str(excrepr)  # what follows is of the first

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A worker that broke off last leaves its tests undone, and the run would pass."""
        if self._broke:
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR

    def pytest_unconfigure(self) -> None:
        """Say at the very end, where it is looked for, why a run broke off."""
        if self._broke and not hasattr(self._config, "workerinput"):
            last = self._broke.splitlines()[-_LAST_LINES:]
            sys.stderr.write(
                "\n".join(["the run broke off; its tests are not all run:", *last, ""])
            )


def _module(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _reason(report: pytest.TestReport) -> str:
    """Return where and why, in a line: of a long message its beginning and its end."""
    crash = getattr(report.longrepr, "reprcrash", None)
    place = "" if crash is None else f"{crash.path}:{crash.lineno}: "
    message = report.longreprtext if crash is None else str(crash.message)
    why = " | ".join(line.strip() for line in message.splitlines() if line.strip())
    if len(why) > 2 * _PART_LIMIT:
        why = f"{why[:_PART_LIMIT]} … {why[-_PART_LIMIT:]}"
    return f"{place}{why}"
