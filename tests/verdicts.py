"""Reports failures as they happen, and gives up on modules whose tests keep timing out."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

TIMEOUTS = 3
"""After so many timeouts in a module, its other tests would wait for the same thing."""
_PART_LIMIT = 200
_LAST_LINES = 12


class Verdicts:
    """Prints each failure at once, and gives up on a module whose tests keep timing out.

    Without it, xdist shows failures at the end, so that an interrupted run shows none, and a dead
    server costs each of its tests a timeout.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._timeouts: Counter[str] = Counter()
        self._broke = ""

    @pytest.hookimpl(tryfirst=True)  # before fixtures, which may be what hangs
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
            return  # the controlling process prints it
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        terminal.write(f"\n{report.nodeid} failed ({report.when}): {_reason(report)}\n", flush=True)

    def pytest_internalerror(self, excrepr: object) -> None:
        self._broke = self._broke or str(excrepr)  # later errors follow from the first

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the run: a worker that crashed last leaves its tests undone."""
        if self._broke:
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR

    def pytest_unconfigure(self) -> None:
        """Print at the very end why a run was aborted."""
        if self._broke and not hasattr(self._config, "workerinput"):
            last = self._broke.splitlines()[-_LAST_LINES:]
            sys.stderr.write("\n".join(["the run was aborted; some tests did not run:", *last, ""]))


def _module(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _reason(report: pytest.TestReport) -> str:
    """Return place and reason in one line; long messages are cut in the middle."""
    crash = getattr(report.longrepr, "reprcrash", None)
    place = "" if crash is None else f"{crash.path}:{crash.lineno}: "
    message = report.longreprtext if crash is None else str(crash.message)
    why = " | ".join(line.strip() for line in message.splitlines() if line.strip())
    if len(why) > 2 * _PART_LIMIT:
        why = f"{why[:_PART_LIMIT]} … {why[-_PART_LIMIT:]}"
    return f"{place}{why}"
