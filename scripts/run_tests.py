"""Run the tests in several processes at a time.

    python scripts/run_tests.py [--workers N] [--without-linters] [DIRECTORY]...

A process runs one job: the tests of a group that shares a Ray, or a few modules of a directory (see
`tests/groups.py`). What a test leaves in its process thus affects no other job. A test that crashes
or hangs fails, and those after it run in a new process. A job that leaves processes behind fails.

In CI (``CI=true``), up to `FEW` tests that failed are tried once more, one at a time: a few fail on
a machine that is busy with the others. Both results are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.groups import Job, jobs_below  # noqa: E402

FEW = 15
"""Tests that are tried once more."""
RESTARTS = 5
"""Of a job whose process ended before its tests did."""
SILENCE_S = 300.0
"""Between tests: imports, collection, and fixtures of a module or of the session."""
MARGIN_S = 60.0
"""Beyond the time after which `tests/verdicts.py` ends a process that ignores its timeout."""
GRACE_S = os.environ.get("AENV_TEST_GRACE", "60")
"""Time in which what a job started must have ended; agents of a Ray that was killed take long."""
_POLL_S = 0.2
_REPORT_S = 60.0
_LAST_LINES = 60


@dataclass
class Run:
    """One process that runs a job; `tests/verdicts.py` writes its records."""

    job: Job
    process: subprocess.Popen[bytes]
    output: Path
    records: Path
    restarts: int
    started_s: float = field(default_factory=time.monotonic)
    heard_s: float = field(default_factory=time.monotonic)
    offset: int = 0
    collected: list[str] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)
    skips: Counter[str] = field(default_factory=Counter)
    current: str | None = None
    limit_s: float = 0.0

    def read(self) -> Iterator[str]:
        """Take in new records; yield a line for each failure."""
        if not self.records.exists():
            return
        with self.records.open("rb") as file:
            file.seek(self.offset)
            lines = file.read().splitlines(keepends=True)
        for line in lines:
            if not line.endswith(b"\n"):
                break
            self.offset += len(line)
            self.heard_s = time.monotonic()
            record = json.loads(line)
            self.collected += record.get("collected", [])
            if "begun" in record:
                self.current, self.limit_s = record["begun"], record["limit_s"]
            if "ended" in record:
                self.current = None
                self.outcomes[record["ended"]] = record["outcome"]
                if record["outcome"] == "skipped":
                    self.skips[record["reason"]] += 1
                if record["outcome"] == "failed":
                    yield f"{record['ended']} failed {record['reason']}"

    def is_silent(self) -> bool:
        """Return whether nothing was recorded for so long that the process hangs."""
        limit_s = SILENCE_S if self.current is None else self.limit_s + MARGIN_S
        return time.monotonic() - self.heard_s > limit_s


class Tests:
    """Runs jobs, at most `workers` at a time, and counts what their tests tell."""

    def __init__(self, directory: Path, workers: int) -> None:
        self._directory = directory
        self._workers = workers
        self._runs: list[Run] = []
        self.outcomes: dict[str, str] = {}
        self.skips: Counter[str] = Counter()
        self.broken: list[str] = []

    def failed(self) -> list[str]:
        """Return the ids of the tests that failed."""
        return [test for test, outcome in self.outcomes.items() if outcome == "failed"]

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs to their end; on an interrupt, end what runs."""
        queue = deque((job, 0) for job in jobs)
        report_s = time.monotonic() + _REPORT_S
        try:
            while queue or self._runs:
                if time.monotonic() > report_s:
                    report_s += _REPORT_S
                    say(self._standing(len(queue)))
                while queue and len(self._runs) < self._workers:
                    self._runs.append(self._start(*queue.popleft()))
                for run in list(self._runs):
                    if (rest := self._look(run)) is not None:
                        queue.appendleft((rest, run.restarts + 1))
                time.sleep(_POLL_S)
        finally:
            for run in self._runs:
                _end(run.process)

    def _standing(self, waiting: int) -> str:
        counts = Counter(self.outcomes.values())
        for run in self._runs:
            counts.update(run.outcomes.values())
        return f"{_told(counts)}; {len(self._runs)} jobs running, {waiting} waiting"

    def _start(self, job: Job, restarts: int) -> Run:
        place = Path(tempfile.mkdtemp(prefix="job-", dir=self._directory))
        arguments = place / "arguments"
        arguments.write_text("".join(f"{argument}\n" for argument in job.arguments))
        pytest = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
        supervise = [sys.executable, "-I", str(ROOT / "scripts" / "supervise.py")]
        limits = ["--deadline", str(24 * 3600), "--grace", GRACE_S]
        records, output = place / "records", place / "output"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*supervise, *limits, "--", *pytest, f"@{arguments}"],
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
                start_new_session=True,  # a Ctrl-C of the terminal reaches this process alone
                env={**os.environ, "AENV_TEST_RECORDS": str(records)},
            )  # fmt: skip
        return Run(job, process, output, records, restarts)

    def _look(self, run: Run) -> Job | None:
        """Report what happened; return the tests that a process left undone when it ended."""
        code = run.process.poll()
        for line in run.read():
            say(line)
        if code is None and not run.is_silent():
            return None
        if code is None:
            say(f"{run.job.name}: nothing happened for too long; ended")
            _end(run.process)
        self._runs.remove(run)
        return self._close(run, code)

    def _close(self, run: Run, code: int | None) -> Job | None:
        crashed = run.current is not None
        if run.current is not None:
            run.outcomes[run.current] = "failed"
            say(f"{run.current} failed: its process ended while it ran ({code=})")
        self.outcomes |= run.outcomes
        self.skips += run.skips
        counts = Counter(run.outcomes.values())
        rest = tuple(test for test in run.collected if test not in run.outcomes)
        again = bool(rest) and crashed and run.restarts < RESTARTS
        is_whole = bool(run.collected) and not rest
        if not (again or (is_whole and (crashed or code == (1 if counts["failed"] else 0)))):
            self.broken.append(f"{run.job.name}: exit code {code}, {len(rest)} tests not run")
        say(f"{run.job.name}: {_told(counts)} in {time.monotonic() - run.started_s:.0f} s")
        if code != 0:
            _show(run.output)
        return Job(run.job.name, rest) if again else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a supervisor, which kills everything below it."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    process.wait()


def _show(output: Path) -> None:
    """Print the failures of a job, or its last lines."""
    lines = output.read_text(errors="replace").splitlines()
    heads = [n for n, line in enumerate(lines) if line.strip("= ") in ("FAILURES", "ERRORS")]
    print("\n".join(lines[heads[0] :] if heads else lines[-_LAST_LINES:]), flush=True)


def _told(counts: Counter[str]) -> str:
    shown = ["passed", "failed", *sorted(set(counts) - {"passed", "failed"})]
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in shown)


def say(text: str) -> None:
    """Print a line with the time."""
    print(time.strftime("%H:%M:%S"), text, flush=True)


def main() -> int:
    """Run everything; return 0 if all passed, at once or on the second try."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    workers = int(os.environ.get("AENV_TEST_WORKERS", "4"))
    parser.add_argument("--workers", type=int, default=workers)
    parser.add_argument("--without-linters", action="store_true")
    parser.add_argument("directories", nargs="*", type=Path, default=[ROOT / "tests"])
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    without = [ROOT / "tests/meta/test_linters.py"] if options.without_linters else []
    jobs = jobs_below([path.resolve() for path in options.directories], without)
    directory = Path(tempfile.mkdtemp(prefix="aenv-test-"))
    os.environ["AENV_TEST_DIRECTORY"] = str(directory)
    tests = Tests(directory, options.workers)
    broken: list[str] = []
    try:
        tests.run(jobs)
        failed, broken = tests.failed(), tests.broken
        if os.environ.get("CI") == "true" and 0 < len(failed) <= FEW:
            say(f"{_told(Counter(tests.outcomes.values()))}; the failed ones are tried once more:")
            print("\n".join(failed), flush=True)
            again = Tests(directory, 1)
            again.run([Job("once more", tuple(failed))])
            tests.outcomes |= again.outcomes
            broken += again.broken
    except KeyboardInterrupt:
        broken = [*broken, "interrupted"]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    _remember(tests.failed())
    for reason, count in tests.skips.most_common():
        print(f"{count} skipped: {reason}")
    for problem in broken:
        say(problem)
    print(_told(Counter(tests.outcomes.values())), flush=True)
    return 1 if tests.failed() or broken or not tests.outcomes else 0


def _remember(failed: Sequence[str]) -> None:
    """Let ``pytest --last-failed`` know."""
    cache = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text(json.dumps(dict.fromkeys(failed, True)))


if __name__ == "__main__":
    sys.exit(main())
