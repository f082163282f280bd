"""What each script in this directory measures of one library, and how it prints that.

It needs only the standard library, because a script runs in the virtual environment of its library.
Each figure is one line of JSON on standard output: ``{"figure": NAME, "value": NUMBER}``, or with
``error`` in place of ``value``.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

FIGURE_S = 60.0
"""A figure that takes longer than this is an error, or counts what was done by then."""
CANCEL_S = 10.0
SECONDS = 5.0
"""How long rates are measured."""
BURST = 100
LIVE = 10
"""Environments that are alive when memory is measured."""
AT_ONCE = 16
"""Concurrent episodes."""
PR_SET_CHILD_SUBREAPER = 36


class Peer:
    """One library: how it makes, calls and ends an environment with the tool ``echo``."""

    async def open(self) -> None:
        """Start what all environments share; it is not measured."""

    async def create(self) -> Any:
        """Start an environment and return it, connected."""
        raise NotImplementedError

    async def call(self, env: Any) -> None:
        """Have ``echo`` return a word, and check that it did."""
        raise NotImplementedError

    async def release(self, env: Any) -> None:
        """End an environment."""
        raise NotImplementedError

    async def close(self) -> None:
        """End what `open` started."""

    # --- what a library may have a faster way for -------------------------------------------------

    async def burst(self, count: int) -> list[Any]:
        """Start environments at the same time, each of which has answered a call."""
        async with asyncio.TaskGroup() as group:
            started = [group.create_task(self._answered()) for _ in range(count)]
        return [one.result() for one in started]

    async def _answered(self) -> Any:
        env = await self.create()
        await self.call(env)
        return env

    async def episodes_per_s(self) -> float:
        """Return how many environments a second are created, called and released."""

        async def episode() -> None:
            env = await self.create()
            try:
                await self.call(env)
            finally:
                await self.release(env)

        return await rate(episode, AT_ONCE)


async def rate(work: Callable[[], Awaitable[None]], callers: int) -> float:
    """Return how often a second `callers` do some work together."""
    done, started = 0, time.perf_counter()

    async def caller() -> None:
        nonlocal done
        while time.perf_counter() - started < SECONDS:
            await work()
            done += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(caller())
    return done / (time.perf_counter() - started)


def run(peer: Peer) -> None:
    """Measure a library and print its figures."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # daemons count as its processes
    asyncio.run(_run(peer))
    sys.stdout.flush()
    os._exit(0)  # without the threads and processes of a figure that was given up


async def _run(peer: Peer) -> None:
    await peer.open()
    try:
        await _figure("create_ms", lambda: _create_ms(peer))
        await _calls(peer)
        await _figure("episodes_per_s", peer.episodes_per_s)
        await _figure("memory_mib", lambda: _memory_mib(peer))
        await _figure("burst_100_s", lambda: _burst_s(peer))
    finally:
        await peer.close()


async def _figure(name: str, measure: Callable[[], Awaitable[float]]) -> None:
    task = asyncio.ensure_future(measure())
    try:
        if not (await asyncio.wait([task], timeout=FIGURE_S))[0]:
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_S)  # what does not end is left behind
            raise TimeoutError
        line = {"figure": name, "value": task.result()}
    except Exception as exc:  # noqa: BLE001  # the other figures are measured all the same
        while isinstance(exc, ExceptionGroup):
            exc = exc.exceptions[0]
        text = f"more than {FIGURE_S:g} s" if isinstance(exc, TimeoutError) else str(exc)
        line = {"figure": name, "error": f"{type(exc).__name__}: {text}"[:300]}
    print(json.dumps(line), flush=True)


async def _create_ms(peer: Peer) -> float:
    """Return the median time from a create to the first result."""
    times: list[float] = []
    ends = time.perf_counter() + 2 * SECONDS
    while len(times) < 4 or (len(times) <= 50 and time.perf_counter() < ends):
        started = time.perf_counter()
        env = await peer.create()
        await peer.call(env)
        times.append(time.perf_counter() - started)
        await peer.release(env)
    return 1e3 * statistics.median(times[1:])  # the first warms up


async def _calls(peer: Peer) -> None:
    """Measure calls of one environment."""
    env = await peer.create()

    async def call_ms() -> float:
        times = []
        for _ in range(220):
            started = time.perf_counter()
            await peer.call(env)
            times.append(time.perf_counter() - started)
        return 1e3 * statistics.median(times[20:])

    await _figure("call_ms", call_ms)
    for callers in (1, 16, 256):
        await _figure(f"calls_per_s_{callers}", lambda n=callers: rate(lambda: peer.call(env), n))
    await peer.release(env)


async def _burst_s(peer: Peer) -> float:
    started = time.perf_counter()
    envs = await peer.burst(BURST)
    took_s = time.perf_counter() - started
    await _release_all(peer, envs)
    return took_s


async def _memory_mib(peer: Peer) -> float:
    before = _used_mib()
    envs = await peer.burst(LIVE)
    used = (_used_mib() - before) / LIVE
    await _release_all(peer, envs)
    return max(0.0, used)


async def _release_all(peer: Peer, envs: list[Any]) -> None:
    for env in envs:
        await peer.release(env)


def _used_mib() -> float:
    """Return the proportional memory of this process and all below it."""
    return sum(_pss_mib(pid) for pid in _tree(os.getpid()))


def _pss_mib(pid: int) -> float:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    except OSError:  # it has ended
        pass
    return 0.0


def _tree(root: int) -> Iterator[int]:
    children = defaultdict(list)
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = Path(f"/proc/{name}/stat").read_text(encoding="utf-8").rpartition(") ")[2]
            children[int(parent.split()[1])].append(int(name))
        except OSError:
            continue  # it has ended
    pending = [root]
    while pending:
        pid = pending.pop()
        pending += children[pid]
        yield pid


async def ended(process: asyncio.subprocess.Process) -> None:
    """End a process and wait until it is gone."""
    if process.returncode is None:
        process.kill()
    await process.wait()


async def listening(host: str, port: int) -> None:
    """Wait until a server accepts connections."""
    async with asyncio.timeout(FIGURE_S):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, port)
            except OSError:
                await asyncio.sleep(0.01)
                continue
            writer.close()
            return


def python() -> str:
    """Return the interpreter of the library."""
    return sys.executable
