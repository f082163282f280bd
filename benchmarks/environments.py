"""``python -m benchmarks environments``: what the environments that come with aenv-ray cost.

No episode of the first run ends before all of them have played their reference, so that all
sandboxes live at once and their memory can be read. The second run is an ordinary one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import time
from typing import Any, Final

import ray

import aenv_ray
from aenv_ray.engines.census import live_processes
from aenv_ray.runtime.system import linux
from aenv_ray.sampling import Task, environment_tasks
from aenv_ray.sampling.policies.scripted import reference
from benchmarks import soak

LIMIT_S: Final = 420.0
CONCURRENCY: Final = 16
DEFAULT: Final = ("code", "gymnasium", "mini-terminal", "reasoning-gym")


class Together:
    """A policy whose episodes end once all of them have played the reference."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._all_played = asyncio.Event()
        self.mib = 0.0

    async def __call__(self, env: Any, task: Task) -> None:
        """Play the reference and wait for the others; the last one reads the memory."""
        try:
            await reference(env, task)
        finally:
            self._left -= 1
            if not self._left:
                self.mib = await asyncio.to_thread(_sandboxes_mib)
                self._all_played.set()
        async with asyncio.timeout(LIMIT_S):
            await self._all_played.wait()


def _sandboxes_mib() -> float:
    return sum(map(soak.memory_mib, {*live_processes()} & {*soak.below(os.getpid())}))


def measure(name: str, live: int) -> str:
    """Measure an environment; return its row of the table."""
    every = environment_tasks(name)
    tasks = list(itertools.islice(itertools.cycle(every), live))
    together = Together(live)
    started = time.perf_counter()
    first = aenv_ray.sample(
        name, together, tasks, concurrency=live, runners="driver", infra_retries=0
    ).run()
    together_s = time.perf_counter() - started
    started = time.perf_counter()
    second = aenv_ray.sample(name, "reference", tasks, concurrency=CONCURRENCY).run()
    per_s = live / (time.perf_counter() - started)
    voids = [run.infra_failed + run.policy_failed + run.reward_failed for run in (first, second)]
    means = [run.reward_mean for run in (first, second)]
    return (
        f"| {name} | {live} in {together_s:.0f} s | {together.mib / live:.1f} | {per_s:.1f} "
        f"| {voids[0]}, {voids[1]} | {means[0]}, {means[1]} |"
    )


def main(arguments: list[str]) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks environments")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--live", type=int, default=1000, help="sandboxes at the same time")
    options = parser.parse_args(arguments)
    linux.become_subreaper()
    ray.init(
        resources={"env_slot": options.live + 64}, include_dashboard=False, logging_level="warning"
    )
    aenv_ray.init()
    try:
        print("| environment | live at once | MiB each | episodes/s | void | mean reward |")
        print("|---|---|---|---|---|---|", flush=True)
        for name in options.names or DEFAULT:
            print(measure(name, options.live), flush=True)
    finally:
        aenv_ray.shutdown()
        ray.shutdown()
