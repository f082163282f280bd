"""Reports failures as they happen, and bounds the time that hanging tests take."""

from __future__ import annotations

import faulthandler
import json
import os
from collections import Counter
from collections.abc import Iterator

import pytest

TIMEOUTS = 3
"""After so many timeouts in a module, its other tests would wait for the same thing."""
TIMEOUTS_OF_A_PROCESS = 6
"""The same for all tests of a process: what they share, such as a Ray, may be dead."""
_PART_LIMIT = 200
_LAST_LINES = 12


class Verdicts:
    """Prints each failure at once, and gives up on tests that keep timing out.

    Without it, an interrupted run shows no failure, and a dead server costs each of its tests a
    timeout. A test that its timeout cannot end, because it is in C code or catches what the timeout
    raises, ends its process a minute later. With `AENV_TEST_RECORDS`, a path, each test is recorded
    there as it begins and ends, for `scripts/run_tests.py`.
    """

    def __init__(self, config: pytest.Config, unended_s: float = 60.0) -> None:
        self._config = config
        self._unended_s = unended_s
        self._timeouts: Counter[str] = Counter()
        self._stderr = os.fdopen(os.dup(2), "w")  # pytest captures 2
        path = os.environ.pop("AENV_TEST_RECORDS", None)  # a test that runs pytest has its own
        self._records = open(path, "a") if path else None  # noqa: SIM115
        self._outcome = self._reason = ""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._record(collected=[item.nodeid for item in session.items])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        limit_s = _timeout_s(item)
        if limit_s:
            limit_s += self._unended_s
            faulthandler.dump_traceback_later(limit_s, exit=True, file=self._stderr)
        self._outcome, self._reason = "passed", ""
        self._record(begun=item.nodeid, limit_s=limit_s)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._record(ended=item.nodeid, outcome=self._outcome, reason=self._reason)

    @pytest.hookimpl(tryfirst=True)  # before fixtures, which may be what hangs
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        module = _module(item.nodeid)
        if self._timeouts[module] >= TIMEOUTS:
            pytest.fail(f"not tried: {TIMEOUTS} tests of {module} timed out", pytrace=False)
        if self._timeouts.total() >= TIMEOUTS_OF_A_PROCESS:
            pytest.fail(f"not tried: {TIMEOUTS_OF_A_PROCESS} tests timed out before", pytrace=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and self._outcome == "passed":
            self._outcome = "xfailed" if hasattr(report, "wasxfail") else "skipped"
            self._reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
        if not report.failed:
            return
        if "from pytest-timeout" in report.longreprtext:
            self._timeouts[_module(report.nodeid)] += 1
        self._outcome, self._reason = "failed", f"({report.when}): {_reason(report)}"
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        terminal.write(f"\n{report.nodeid} failed {self._reason}\n", flush=True)

    def pytest_unconfigure(self) -> None:
        self._stderr.close()
        if self._records is not None:
            self._records.close()

    def _record(self, **fields: object) -> None:
        if self._records is not None:
            self._records.write(json.dumps(fields) + "\n")
            self._records.flush()


def _timeout_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    options = item.config.getoption("timeout"), item.config.getini("timeout")
    return float(marker.args[0] if marker else next(filter(None, options), 0.0))


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
