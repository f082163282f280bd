"""``python -m benchmarks environments``: what the environments that come with aenv-ray cost.

No episode of the first run ends before all of them have played their reference, so that all
sandboxes live at once and their memory can be read. The second run is an ordinary one. swebench and
terminal-bench run in containers and have no tasks: `--tasks` names them.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import itertools
import os
import shutil
import subprocess
import sys
import time
from typing import Any, Final

import ray

import aenv_ray
from aenv_ray.engines.live_sandboxes import live_processes
from aenv_ray.errors import AenvError, ConfigError
from aenv_ray.runtime.system import linux
from aenv_ray.sampling import Episode, Sampling, Task, tasks_of
from aenv_ray.sampling.policies.scripted import reference
from benchmarks import soak

LIMIT_S: Final = 420.0
CONCURRENCY: Final = 16
IN_CONTAINERS: Final = frozenset({"swebench", "terminal-bench"})
CONTAINERS: Final = 4
"""Instances in containers at the same time; each of them has two."""
MOST: Final = {"gymnasium": 180, "mini-program": 21, "tau2": 200} | dict.fromkeys(
    IN_CONTAINERS, CONTAINERS
)
"""Episodes of environments of which each takes seconds of CPU time."""
DEFAULT: Final = (
    "code",
    "gymnasium",
    "mini-program",
    "mini-terminal",
    "reasoning-gym",
    "swebench",
    "tau2",
    "terminal-bench",
)


class Together:
    """A policy whose episodes end once all of them that can be played have played the reference."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._containers_before = _containers()
        self._is_read = asyncio.Event()
        self.live = 0
        """Sandboxes whose episode has played its reference."""
        self.mib = 0.0
        """Memory of each of them."""

    async def __call__(self, env: Any, task: Task) -> None:
        """Play the reference and wait for the others."""
        await reference(env, task)
        self.live += 1
        await self.count_one()
        async with asyncio.timeout(LIMIT_S):
            await self._is_read.wait()

    async def count_one(self) -> None:
        """Count an episode that waits or has failed; after the last one, read the memory."""
        self._left -= 1
        if not self._left:
            mib = await asyncio.to_thread(_sandboxes_mib, self._containers_before)
            self.mib = mib / max(1, self.live)
            self._is_read.set()

    async def play(self, name: str, tasks: list[Task]) -> Sampling:
        """Play the tasks at the same time."""
        sampling = aenv_ray.sample(
            name, self, tasks, concurrency=len(tasks), runners="driver", infra_retries=0
        )
        async for _ in sampling:
            if not self._is_read.is_set():  # it never came to wait
                await self.count_one()
        return sampling


def _sandboxes_mib(containers_before: set[int]) -> float:
    pids = {*live_processes()} & {*soak.below(os.getpid())}
    for first in _containers() - containers_before:
        pids |= {first, *soak.below(first)}
    return sum(map(soak.memory_mib, pids))


def _containers() -> set[int]:
    """Return the first processes of all running containers; empty without Docker."""

    def output(*command: str) -> list[str]:
        done = subprocess.run(
            ["docker", *command], capture_output=True, text=True, check=False, timeout=60
        )
        return done.stdout.split()

    if shutil.which("docker") is None or not (ids := output("ps", "--quiet")):
        return set()
    return {*map(int, output("inspect", "--format", "{{.State.Pid}}", *ids))} - {0}


def measure(name: str, live: int, place: str | None) -> str:
    """Measure an environment; return its row of the table.

    Args:
        name: Of the environment.
        live: Most sandboxes at the same time.
        place: File or directory of its tasks; None: its own.
    """
    try:
        every = playable(name, place, live)
    except AenvError as exc:
        return f"| {name} | not measured: {exc} | | | | |"
    live = min(live, MOST.get(name, live))
    concurrency = CONTAINERS if name in IN_CONTAINERS else CONCURRENCY
    tasks = list(itertools.islice(itertools.cycle(every), live))
    _say(f"{name}: {live} episodes at the same time")
    together = Together(live)
    started = time.perf_counter()
    first = asyncio.run(together.play(name, tasks))
    together_s = time.perf_counter() - started
    _say(f"{name}: {live} episodes, {concurrency} at a time")
    started = time.perf_counter()
    second = aenv_ray.sample(name, "reference", tasks, concurrency=concurrency)
    second.run()
    per_s = live / (time.perf_counter() - started)
    _say_failures([*first.episodes, *second.episodes])
    runs = [first.summary(), second.summary()]
    at_a_time = "" if concurrency == CONCURRENCY else f" ({concurrency} at a time)"
    voids = [run.infra_failed + run.policy_failed + run.reward_failed for run in runs]
    means = [run.reward_mean for run in runs]
    return (
        f"| {name} | {together.live:,} in {together_s:.0f} s "
        f"| {together.mib:.1f} | {per_s:.1f}{at_a_time} "
        f"| {voids[0]}, {voids[1]} | {means[0]}, {means[1]} |"
    )


def playable(name: str, place: str | None, most: int) -> list[Task]:
    """Return the first tasks that can be played here, without those that would be refused.

    Raises:
        ConfigError: There are none.
    """
    every = tasks_of(name, place, {}, {})
    found = list(itertools.islice((task for task in every if task.unsupported is None), most))
    if not found:
        raise ConfigError(
            f"all tasks of {place} need what is not here: {every[0].unsupported}",
            hint="give other tasks with --tasks",
        )
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _say_failures(episodes: list[Episode]) -> None:
    failures = collections.Counter(one.error for one in episodes if one.error is not None)
    for error, count in failures.most_common(3):
        _say(f"  {count} of {len(episodes)} failed: {error}")


def main(arguments: list[str]) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks environments")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--live", type=int, default=1000, help="sandboxes at the same time")
    parser.add_argument(
        "--tasks", action="append", default=[], metavar="NAME=PATH", help="tasks of an environment"
    )
    options = parser.parse_args(arguments)
    places = dict(one.split("=", 1) for one in options.tasks)
    linux.become_subreaper()
    ray.init(
        resources={"env_slot": options.live + 64}, include_dashboard=False, logging_level="warning"
    )
    aenv_ray.init()
    try:
        heads = (
            "environment", "live at once", "MiB each", f"episodes/s, {CONCURRENCY} at a time",
            "void", "mean reward",
        )  # fmt: skip
        print(f"| {' | '.join(heads)} |")
        print("|---|---|---|---|---|---|", flush=True)
        for name in options.names or DEFAULT:
            print(measure(name, options.live, places.get(name)), flush=True)
    finally:
        aenv_ray.shutdown()
        ray.shutdown()
