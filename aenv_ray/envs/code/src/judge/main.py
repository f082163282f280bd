"""The judge: runs the tests one after another, and reports a verdict for each."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator
from typing import Any

from judge import process, program, script
from judge.link import Link, SolutionEnded
from judge.solution import MEMORY_EXIT
from judge.starter import End, Starter, read, write

JOB, REPORT = 0, 1
"""Descriptors of this process."""
_DETAIL = 300
"""Maximum number of characters of a value or message in a report."""


class TimeIsUp(BaseException):
    """A test has reached its limit of time. Not an `Exception`, so that tests do not catch it."""


def main() -> None:
    """Run the tests of a job.

    The starter and solutions are forked from this process, so all are closed to each other: none
    may trace it, read its memory or open its descriptors (`PR_SET_DUMPABLE`).
    """
    process.close_to_others()
    process.adopt_orphans()  # the starter's children, should it be killed
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pipes = Pipes()
    starter = Starter(pipes.of_solution, (JOB, REPORT, *pipes.of_judge))
    write(REPORT, Judge(read(JOB), starter, pipes).report())


class Pipes:
    """The pipes and files that connect the judge with the process of a test."""

    def __init__(self) -> None:
        requests, self.requests = os.pipe()
        self.replies, replies = os.pipe()
        self.input = os.memfd_create("input")
        self.errors = os.memfd_create("errors")
        self.of_judge = (self.requests, self.replies)
        self.of_solution = {
            "requests": requests,
            "replies": replies,
            "input": self.input,
            "errors": self.errors,
        }
        self._requests_end = requests

    def clear(self, given: str) -> None:
        """Remove what an earlier test has left, and write the input of the next one."""
        for fd in (self.replies, self._requests_end):
            while select.select([fd], [], [], 0)[0]:
                os.read(fd, 1 << 20)
        for fd in (self.input, self.errors):
            os.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)
        view = memoryview(given.encode("utf-8", "surrogatepass"))
        while view:
            view = view[os.write(self.input, view) :]

    def last_error(self) -> str:
        """Return the last line that the process wrote to standard error."""
        size = os.fstat(self.errors).st_size
        text = os.pread(self.errors, 2000, max(0, size - 2000)).decode("utf-8", "replace")
        lines = text.strip().split("\n")
        return lines[-1].strip()


class Judge:
    """Runs the tests of a job.

    Args:
        job: ``source`` of the solution, ``tests``, ``path`` for the directories of tests,
            ``cpu_s``, ``wall_s`` and ``memory_bytes`` of a test, and ``total_s`` of all tests.
        starter: Starts the process of each test.
        pipes: The pipes to these processes.
    """

    def __init__(self, job: dict[str, Any], starter: Starter, pipes: Pipes) -> None:
        self._job = job
        self._starter = starter
        self._pipes = pipes
        self._started = time.monotonic()
        self._deadline = self._started + job["total_s"]
        self._starved_s = 0.0

    def report(self) -> list[dict[str, Any]]:
        """Return ``verdict``, ``detail``, ``expected``, ``got`` and ``cpu_s`` of each test.

        After a test that has reached its limit of time, no further test runs.

        Raises:
            OSError: Other processes had the CPUs for most of the time of all tests.
        """
        found: list[dict[str, Any]] = []
        for number, test in enumerate(self._job["tests"]):
            if found and found[-1]["verdict"] in {"timeout", "skipped"}:
                found.append({"verdict": "skipped", "detail": "an earlier test took too long"})
                continue
            self._pipes.clear(test["input"])
            try:
                found.append(self._run(test, number))
            except EOFError:
                found.append({"verdict": "error", "detail": "it killed the process that starts it"})
        return found

    def _run(self, test: dict[str, Any], number: int) -> dict[str, Any]:
        is_program = test["kind"] == "program"
        job = {
            "source": self._job["source"],
            "path": f"{self._job['path']}-{number}",
            "is_program": is_program,
            "cpu_s": self._job["cpu_s"],
            "memory_bytes": self._job["memory_bytes"],
        }
        pid = self._starter.start(job)
        pidfd = os.pidfd_open(pid)
        link = Link(self._pipes.requests, self._pipes.replies, pidfd)
        try:
            with _time_limit(self._job["wall_s"], self._deadline, pid):
                found = self._program(test, pidfd) if is_program else _judged(test, link)
        except TimeIsUp:
            found = {"verdict": "timeout", "detail": "it did not end in time"}
            passed_s = time.monotonic() - self._started
            starved_s = self._starved_s + _starved_s(pid)
            if time.monotonic() >= self._deadline and starved_s > passed_s / 2:
                raise OSError(
                    f"the node is too busy: tests waited {starved_s:.0f} of {passed_s:.0f} s for it"
                ) from None
        finally:
            self._starved_s += _starved_s(pid)
            os.close(pidfd)
            end = self._starter.end()
        return self._with_end(found, end, link, is_program) | {"cpu_s": round(end.cpu_s, 3)}

    def _program(self, test: dict[str, Any], pidfd: int) -> dict[str, Any]:
        try:
            printed = program.output(self._pipes.replies, pidfd)
        except program.TooMuchOutput as exc:
            return {"verdict": "error", "detail": str(exc)}
        if program.is_same(printed, test["expected"]):
            return {"verdict": "passed"}
        return {"verdict": "failed", "expected": _cut(test["expected"]), "got": _cut(printed)}

    def _with_end(
        self, found: dict[str, Any], end: End, link: Link, is_program: bool
    ) -> dict[str, Any]:
        """Return a verdict that takes into account how the process has ended."""
        # A process that serves requests is ended by the starter: only its own end counts.
        has_failed = link.has_failed or (
            is_program and end.status != 0 and found["verdict"] != "error"
        )
        if end.status == -signal.SIGXCPU or end.cpu_s >= self._job["cpu_s"]:
            return {"verdict": "timeout", "detail": f"it used {end.cpu_s:.1f} s of CPU"}
        if found["verdict"] == "timeout":
            return found
        if (found["verdict"] != "passed" and link.ran_out_of_memory) or (
            has_failed and end.status == MEMORY_EXIT
        ):
            return {"verdict": "memory", "detail": "it reached the limit of memory"}
        if has_failed:
            status = f"exit code {end.status}" if end.status >= 0 else f"signal {-end.status}"
            reasons = (status if is_program else found.get("detail"), self._pipes.last_error())
            return {"verdict": "error", "detail": _cut(": ".join(filter(None, reasons)))}
        return found


def _judged(test: dict[str, Any], link: Link) -> dict[str, Any]:
    """Return the verdict of a test that calls the solution."""
    try:
        link.load()
        if test["kind"] == "call":
            return _called(test, link)
        script.run(test["setup"], test["source"], test["names"], link)
    except TimeIsUp:
        raise
    except script.Unequal as exc:
        got, expected = exc.args
        return {"verdict": "failed", "expected": _shown(expected), "got": _shown(got)}
    except AssertionError as exc:
        return {"verdict": "failed", "detail": _cut(str(exc))}
    except SolutionEnded as exc:
        return {"verdict": "error", "detail": _cut(str(exc))}
    except BaseException as exc:  # noqa: BLE001  # of the test or the solution
        return {"verdict": "error", "detail": _cut(f"{type(exc).__name__}: {exc}")}
    return {"verdict": "passed"}


def _called(test: dict[str, Any], link: Link) -> dict[str, Any]:
    """Call a function of the solution, or a method of its class ``Solution``."""
    name = test["function"]
    try:
        owner = link.ask("name", "Solution") if test["is_method"] else None
    except KeyError:
        owner = None  # a plain function is accepted too
    try:
        function = link.ask("name", name) if owner is None else getattr(owner(), name)
    except (KeyError, AttributeError):
        return {"verdict": "error", "detail": f"the solution does not define {name}"}
    got, expected = function(*test["arguments"]), test["expected"]
    if isinstance(got, tuple):
        got = list(got)
    if got == expected:
        return {"verdict": "passed"}
    return {"verdict": "failed", "expected": _shown(expected), "got": _shown(got)}


@contextlib.contextmanager
def _time_limit(limit_s: float, deadline: float, pid: int) -> Iterator[None]:
    """Raise `TimeIsUp` after `limit_s` in which the process did not wait for a CPU."""
    started = time.monotonic()

    def left_s() -> float:
        now = time.monotonic()
        return min(started + limit_s + _starved_s(pid), deadline) - now

    def on_alarm(number: int, frame: object) -> None:
        del number, frame
        left = left_s()
        # Again, in case that the test has caught it.
        signal.setitimer(signal.ITIMER_REAL, max(left, 0.5))
        if left <= 0.0:
            raise TimeIsUp

    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, max(left_s(), 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _starved_s(pid: int) -> float:
    """Return how long a process was ready to run, but other processes had the CPUs."""
    try:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # it has ended, or the kernel does not tell
        return 0.0


def _shown(value: Any) -> str:
    try:
        return _cut(repr(value))
    except (ValueError, RecursionError, MemoryError):  # an integer of too many digits
        return f"<{type(value).__name__}>"


def _cut(text: str) -> str:
    if len(text) <= _DETAIL:
        return text
    return f"{text[: _DETAIL // 2]}…[{len(text) - _DETAIL} characters]…{text[-_DETAIL // 2 :]}"
