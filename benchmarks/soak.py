"""``python -m benchmarks soak``: many cycles and calls, after which nothing may have grown.

A cycle creates an instance, calls a tool once and releases it; one in ten goes through a gateway,
where it takes a lease in Redis. Calls go to instances that stay, most over the local door, one in
ten through their host. After every round everything is released, and what the fabric still uses is
measured, Ray's own processes included.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ray

import aenv_ray
from aenv_ray.client.environment import Environment
from aenv_ray.config import settings
from aenv_ray.engines.live_sandboxes import live_processes
from aenv_ray.hub.redis.server import RedisServer
from aenv_ray.runtime.system import linux
from aenv_ray.testing.contract_bench import eventually
from benchmarks import gateway

ECHO = Path(__file__).parent / "echo_environment"
ARGUMENTS = {"text": "hi"}
ROUNDS = 20
WARM_UP = 5
"""Rounds that are not judged: pools, caches and Ray's workers reach their sizes."""
CALLERS = 16
SHARE = 10
"""One in this many cycles goes through the gateway, and one in this many calls through the host."""
SETTLE_S = 60.0
MIB = 2**20
ALLOWED = {"memory": 16.0, "descriptors": 8.0, "processes": 4.0, "keys": 8.0}
"""How much a curve may grow in the judged rounds: MiB of a group, or a number."""


# --- curves --------------------------------------------------------------------------------------


def slope(values: Sequence[float]) -> float:
    """Return the growth per round: the median over all pairs, which outliers do not move."""
    pairs = itertools.combinations(enumerate(values), 2)
    return statistics.median((b - a) / (j - i) for (i, a), (j, b) in pairs)


def leaks(curves: Mapping[str, Sequence[float]], warm_up: int = WARM_UP) -> dict[str, float]:
    """Return the curves that grow by more than is allowed, each with its growth.

    Args:
        curves: Values by round; a curve's unit is the first word of its name.
        warm_up: Rounds at the beginning that do not count.
    """
    grown = {}
    for name, values in curves.items():
        judged = values[warm_up:]
        growth = slope(judged) * (len(judged) - 1)
        if growth > ALLOWED[name.split()[0]]:
            grown[name] = growth
    return grown


# --- what is measured ----------------------------------------------------------------------------


def usage() -> dict[str, float]:
    """Return memory by group of processes, descriptors and processes of this one and all below it.

    Launchers, janitors and Redis leave their parents; a subreaper has them below it nevertheless.
    """
    found: dict[str, float] = defaultdict(float)
    for pid in [os.getpid(), *below(os.getpid())]:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            found[f"memory {_group(pid, command)}"] += memory_mib(pid)
            found["descriptors"] += len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            continue  # it has ended
        found["processes"] += 1
    return found


def _group(pid: int, command: bytes) -> str:
    if pid == os.getpid():
        return "of the driver"
    if b"redis" in command:
        return "of Redis"
    if command.startswith(b"ray::") or b"default_worker" in command:
        return "of the actors"
    if b"aenv_ray" in command or b"aenv-" in command:
        return "of launcher and templates"
    return "of Ray"


def memory_mib(pid: int) -> float:
    """Return the proportional share of a process; 0.0 for a zombie."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def below(root: int) -> Iterator[int]:
    """Yield the pids of a process's descendants."""
    children = defaultdict(list)
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            # proc(5): pid (name) state parent …; a name may contain parentheses and spaces.
            state, parent, *_ = Path(f"/proc/{name}/stat").read_text().rpartition(") ")[2].split()
            if state != "Z":
                children[int(parent)].append(int(name))
    pending = children[root]
    while pending:
        pid = pending.pop()
        pending += children[pid]
        yield pid


# --- the run -------------------------------------------------------------------------------------


@dataclass
class Soak:
    """A run on the current Ray, with a gateway.

    Args:
        cycles: In each round; so is `calls`.
        token: For the gateway.
        redis: The hub's.
    """

    cycles: int
    calls: int
    token: str
    redis: RedisServer
    curves: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    async def run(self, rounds: int) -> None:
        """Make all rounds, printing a row for each."""
        for number in range(1, rounds + 1):
            started = time.monotonic()
            await self._cycles()
            await self._calls()
            took_s = time.monotonic() - started
            await self._settle()
            await self._sample()
            row = "  ".join(f"{name} {values[-1]:.0f}" for name, values in self.curves.items())
            print(f"round {number:>2}/{rounds}  {took_s:5.1f} s  {row}", flush=True)

    async def _cycles(self) -> None:
        async def cycle(number: int) -> None:
            url = f"http://{gateway.OURS}:8080" if number % SHARE == 0 else None
            name = "echo@1.0.0" if url else str(ECHO)
            async with Environment(name, aenv_url=url, api_key=self.token, actor="shared") as env:
                result = await env.call_tool("echo", ARGUMENTS)
                assert result.data == "hi"

        await _spread(self.cycles, cycle)

    async def _calls(self) -> None:
        through_host = self.calls // SHARE
        async with Environment(str(ECHO), actor="shared") as env:

            async def call(_: int) -> None:
                await env.call_tool("echo", ARGUMENTS)

            await _spread(self.calls - through_host, call)
        handle = await asyncio.to_thread(aenv_ray.create, ECHO, actor="shared")

        async def remote(_: int) -> None:
            await handle.call_tool.remote("echo", ARGUMENTS)

        await _spread(through_host, remote)
        await handle.release.remote()

    @staticmethod
    async def _settle() -> None:
        """Wait until no sandbox is left.

        Raises:
            AssertionError: Some are after `SETTLE_S`.
        """

        def is_empty() -> bool:
            return not {*live_processes()} & {*below(os.getpid())}

        await eventually(is_empty, "no sandbox is left", SETTLE_S)
        gc.collect()

    async def _sample(self) -> None:
        client = self.redis.connect()
        try:
            keys = float(await client.dbsize())
        finally:
            await client.aclose()
        for name, value in {**usage(), "keys": keys}.items():
            self.curves[name].append(value)


async def _spread(count: int, work: Callable[[int], Awaitable[None]]) -> None:
    """Do `count` pieces of work, `CALLERS` at a time."""
    numbers = iter(range(count))

    async def caller() -> None:
        for number in numbers:
            await work(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(CALLERS):
            group.create_task(caller())


def main(words: Sequence[str]) -> None:
    """Run the soak, print the curves, and exit with 1 if one grows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks soak", description=__doc__)
    parser.add_argument("--cycles", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--calls", type=int, default=1_000_000, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the curves there")
    options = parser.parse_args(words)
    if options.rounds < WARM_UP + 2:
        parser.error(f"--rounds must be at least {WARM_UP + 2}: the first {WARM_UP} warm up")
    linux.become_subreaper()
    with tempfile.TemporaryDirectory(prefix="ae-", dir="/tmp") as directory:  # short, for sockets
        os.environ["AENV_DATA_DIR"] = f"{directory}/data"
        os.environ["AENV_RUNTIME_DIR"] = f"{directory}/run"
        rounds = options.rounds
        curves = _run(options.cycles // rounds, options.calls // rounds, rounds)
    if options.json:
        options.json.write_text(json.dumps(curves, indent=2) + "\n", encoding="utf-8")
    print(f"\n{'from round ' + str(WARM_UP + 1):<36}{'first':>10}{'last':>10}{'growth':>10}")
    for name, values in curves.items():
        judged = values[WARM_UP:]
        growth = slope(judged) * (len(judged) - 1)
        print(f"{name:<36}{judged[0]:>10.1f}{judged[-1]:>10.1f}{growth:>10.1f}")
    grown = leaks(curves)
    if grown:
        sys.exit(f"grown by more than allowed: {', '.join(grown)}")
    print("verdict: flat; nothing grew by more than is allowed")


def _run(cycles: int, calls: int, rounds: int) -> dict[str, list[float]]:
    aenv_ray.init()
    try:
        with gateway.our_gateway(ECHO) as token:
            redis = RedisServer(settings().data_dir, settings().runtime_dir)
            soak = Soak(cycles, calls, token, redis)
            asyncio.run(soak.run(rounds))
            return dict(soak.curves)
    finally:
        aenv_ray.shutdown()
        ray.shutdown()
        is_over = eventually(lambda: not [*below(os.getpid())], "no process is left", SETTLE_S)
        asyncio.run(is_over)
