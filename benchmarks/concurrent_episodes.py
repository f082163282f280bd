"""``python -m benchmarks concurrent-episodes``: thousands of episodes that run at the same time.

Sandboxes are those of the fake engine, so what is measured is the fabric: a runner, a host, the
local doors and the driver. No episode ends before all have made a call. Records are written to a
directory, as in long runs, so that the driver does not keep them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import ray

import aenv_ray
from aenv_ray.sampling import Task

PROJECT: Final = Path(__file__).parent / "episode_environment"
LIMIT_S: Final = 1800.0
_FILES: Final = 5
"""Open files of the host for each sandbox."""


class Together:
    """A policy whose episodes end once all of them run. One object for each runner."""

    def __init__(self) -> None:
        self._acting = 0
        self._all_act = asyncio.Event()

    async def __call__(self, env: Any, task: Task) -> int:
        """Make a call, wait for all other episodes, and make another call."""
        await env.call_tool("echo", {"text": "hi"})
        self._acting += 1
        if self._acting == (task.model_extra or {})["together"]:
            self._all_act.set()
        async with asyncio.timeout(LIMIT_S):
            await self._all_act.wait()
        await env.call_tool("echo", {"text": "hi"})
        return self._acting


class _Memory:
    """The highest resident memory of this process, while it samples."""

    def __init__(self) -> None:
        self.before_mib = _resident_mib()
        self.highest_mib = self.before_mib
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.25):
            self.highest_mib = max(self.highest_mib, _resident_mib())

    def growth_mib(self) -> float:
        """Stop, and return how far it rose."""
        self._stop.set()
        self._thread.join()
        return max(self.highest_mib, _resident_mib()) - self.before_mib


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(count: int) -> dict[str, float]:
    """Play `count` episodes at the same time; return what that took."""
    tasks = (
        {"id": f"t{n}", "setup": {"function": "prepare"}, "together": count} for n in range(count)
    )
    memory, started, cpu_s = _Memory(), time.perf_counter(), time.process_time()
    try:
        with tempfile.TemporaryDirectory(prefix="aenv-benchmark-") as out:
            sampling = aenv_ray.sample(
                PROJECT, Together, tasks, concurrency=count, runners="nodes", ttl="2h", out=out
            )
            summary = sampling.run()
    finally:
        growth_mib = memory.growth_mib()
    assert summary.succeeded == count, summary
    return {
        "wall_s": time.perf_counter() - started,
        "driver_cpu_ms_per_episode": 1e3 * (time.process_time() - cpu_s) / count,
        "driver_growth_mib": growth_mib,
        "driver_growth_kib_per_episode": growth_mib * 1024 / count,
        "driver_threads": threading.active_count(),
    }


def _allow_files(count: int) -> None:
    """Allow this process and its children so many open files; raising the hard limit needs root."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(hard, count), max(hard, count)))


def main(arguments: list[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks concurrent-episodes")
    parser.add_argument(
        "--count", type=int, nargs="+", default=[1_000, 4_000, 10_000],
        help="episodes at the same time; several counts are measured in order",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    most = max(options.count)
    try:
        _allow_files(_FILES * most + 4096)
    except (ValueError, OSError) as exc:
        parser.error(f"{most} sandboxes need {_FILES * most + 4096} open files: {exc}")
    os.environ["AENV_ENGINE"] = "fake"
    ray.init(
        resources={"env_slot": most + 64},
        include_dashboard=False,
        logging_level="warning",
    )
    aenv_ray.init()
    try:
        measure(16)  # the runner and the host start
        for count in options.count:
            figures = measure(count)
            print(f"{count} episodes at the same time")
            for name, value in figures.items():
                print(f"  {name:<32} {value:>10.2f}", flush=True)
    finally:
        aenv_ray.shutdown()
        ray.shutdown()
