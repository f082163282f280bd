"""``python -m benchmarks environments``: what the environments that come with aenv-ray cost.

No episode of the first run ends before all of them have played their reference, so that all
sandboxes live at once and their memory can be read. The second run is an ordinary one. swebench and
terminal-bench run in containers and have no tasks: `--tasks` names them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import shutil
import subprocess
import time
from typing import Any, Final

import ray

import aenv_ray
from aenv_ray.engines.census import live_processes
from aenv_ray.errors import AenvError
from aenv_ray.runtime.system import linux
from aenv_ray.sampling import Task, environment_tasks, load_tasks
from aenv_ray.sampling.policies.scripted import reference
from benchmarks import soak

LIMIT_S: Final = 420.0
CONCURRENCY: Final = 16
IN_CONTAINERS: Final = frozenset({"swebench", "terminal-bench"})
CONTAINERS: Final = 4
"""Instances in containers at the same time; each of them has two."""
MOST: Final = {"mini-program": 32, "tau2": 200} | dict.fromkeys(IN_CONTAINERS, CONTAINERS)
"""Episodes of environments whose grading takes seconds of CPU time."""
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
    """A policy whose episodes end once all of them have played the reference."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._containers_before = _containers()
        self._all_played = asyncio.Event()
        self.mib = 0.0

    async def __call__(self, env: Any, task: Task) -> None:
        """Play the reference and wait for the others; the last one reads the memory."""
        try:
            await reference(env, task)
        finally:
            self._left -= 1
            if not self._left:
                self.mib = await asyncio.to_thread(_sandboxes_mib, self._containers_before)
                self._all_played.set()
        async with asyncio.timeout(LIMIT_S):
            await self._all_played.wait()


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
        every = environment_tasks(name) if place is None else load_tasks(place)
    except AenvError as exc:
        return f"| {name} | not measured: {exc} | | | | |"
    live = min(live, MOST.get(name, live))
    concurrency = CONTAINERS if name in IN_CONTAINERS else CONCURRENCY
    tasks = list(itertools.islice(itertools.cycle(every), live))
    together = Together(live)
    started = time.perf_counter()
    first = aenv_ray.sample(
        name, together, tasks, concurrency=live, runners="driver", infra_retries=0
    ).run()
    together_s = time.perf_counter() - started
    started = time.perf_counter()
    second = aenv_ray.sample(name, "reference", tasks, concurrency=concurrency).run()
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
        print("| environment | live at once | MiB each | episodes/s | void | mean reward |")
        print("|---|---|---|---|---|---|", flush=True)
        for name in options.names or DEFAULT:
            print(measure(name, options.live, places.get(name)), flush=True)
    finally:
        aenv_ray.shutdown()
        ray.shutdown()
