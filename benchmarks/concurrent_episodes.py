"""``python -m benchmarks concurrent-episodes``: thousands of episodes that run at the same time.

Sandboxes are those of the fake engine, so what is measured is the fabric: a runner, a host, the
local doors and the driver. No episode ends before all have made a call. Records are written to a
directory, as in long runs, so that the driver does not keep them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import ray

import aenv_ray
from aenv_ray.sampling import Task
from benchmarks.fake_cluster import fake_cluster

PROJECT: Final = Path(__file__).parent / "episode_environment"
LIMIT_S: Final = 1800.0


@ray.remote(num_cpus=0)
class Meeting:
    """Knows how many episodes act, on all runners."""

    def __init__(self) -> None:
        self._acting: dict[str, int] = {}

    def report(self, runner: str, acting: int) -> int:
        """Note how many episodes of a runner act; return how many do on all of them."""
        self._acting[runner] = acting
        return sum(self._acting.values())


class Together:
    """A policy whose episodes end once all of them run. One object for each runner."""

    def __init__(self) -> None:
        self._acting = 0
        self._all_act = asyncio.Event()
        self._reports: asyncio.Task[None] | None = None

    async def __call__(self, env: Any, task: Task) -> int:
        """Make a call, wait for all other episodes, and make another call."""
        await env.call_tool("echo", {"text": "hi"})
        self._acting += 1
        if self._reports is None:
            count = (task.model_extra or {})["together"]
            self._reports = asyncio.create_task(self._report(count))
        async with asyncio.timeout(LIMIT_S):
            await self._all_act.wait()
        await env.call_tool("echo", {"text": "hi"})
        return self._acting

    async def _report(self, count: int) -> None:
        meeting = ray.get_actor(f"meeting-{count}")
        runner = ray.get_runtime_context().get_actor_id()
        while await meeting.report.remote(runner, self._acting) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.2)  # the others are on other runners
        self._all_act.set()


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
    meeting = Meeting.options(name=f"meeting-{count}").remote()
    memory, started, cpu_s = _Memory(), time.perf_counter(), time.process_time()
    try:
        with tempfile.TemporaryDirectory(prefix="aenv-benchmark-") as out:
            sampling = aenv_ray.sample(
                PROJECT, Together, tasks, concurrency=count, runners="nodes", ttl="2h", out=out
            )
            summary = sampling.run()
    finally:
        growth_mib = memory.growth_mib()
        ray.kill(meeting)
    assert summary.succeeded == count, summary
    return {
        "wall_s": time.perf_counter() - started,
        "driver_cpu_ms_per_episode": 1e3 * (time.process_time() - cpu_s) / count,
        "driver_growth_mib": growth_mib,
        "driver_growth_kib_per_episode": growth_mib * 1024 / count,
        "driver_threads": threading.active_count(),
    }


def main(arguments: list[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks concurrent-episodes")
    parser.add_argument(
        "--count", type=int, nargs="+", default=[1_000, 4_000, 10_000],
        help="episodes at the same time; several counts are measured in order",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    with fake_cluster(max(options.count)) as nodes:
        measure(16)  # runners and hosts start
        for count in options.count:
            figures = measure(count)
            print(f"{count} episodes at the same time, {nodes} nodes")
            for name, value in figures.items():
                print(f"  {name:<32} {value:>10.2f}", flush=True)
