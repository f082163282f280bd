"""Calls of `Environment` to a sandbox on its own node, against calls of a bare actor."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import ray

from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.client.environment import Environment
from benchmarks.floor import bare_actor
from benchmarks.measure import per_s

CALLERS = 16
ARGUMENTS = {"text": "hi"}
BUDGET = {
    "local_call_p50_ratio": "<= 0.25 x a bare async actor call",
    "local_pipelined_ratio": f">= 5 x pipelined bare calls, {CALLERS} callers",
}

Call = Callable[[], Awaitable[Any]]


def local_door(figures: dict[str, float], project: Path, quick: bool) -> None:
    """Measure one caller, and `CALLERS` at once."""
    asyncio.run(_measure(figures, project, 9 if quick else 15))


async def _measure(figures: dict[str, float], project: Path, blocks: int) -> None:
    actor = bare_actor()
    async with Environment(str(project), actor="shared") as env:
        instance = env._instance
        assert isinstance(instance, AsyncEnvHandle)
        assert await instance.connect_directly()

        async def ours() -> Any:
            return await env.call_tool("echo", ARGUMENTS)

        async def bare() -> Any:
            return await actor.echo.remote(ARGUMENTS)

        singles, pipelined = [], []
        for _ in range(blocks + 1):
            singles.append((await _p50_s(ours, 300), await _p50_s(bare, 200)))
            floor = per_s(lambda: actor.echo.remote(ARGUMENTS), 1000)
            pipelined.append((await _per_s(ours, 3200), floor))
    del singles[0], pipelined[0]  # warm-up
    ray.kill(actor)
    figures |= {
        "local_call_p50_ms": 1e3 * statistics.median(a for a, _ in singles),
        "local_call_p50_ratio": statistics.median(a / b for a, b in singles),
        "local_pipelined_per_s": statistics.median(a for a, _ in pipelined),
        "local_pipelined_ratio": statistics.median(a / b for a, b in pipelined),
    }


async def _p50_s(call: Call, count: int) -> float:
    """Return the median seconds of `count` calls, one after another."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        await call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


async def _per_s(call: Call, count: int) -> float:
    """Return calls per second of `CALLERS` callers that each await their results."""

    async def caller() -> None:
        for _ in range(count // CALLERS):
            await call()

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(CALLERS):
            group.create_task(caller())
    return count / (time.perf_counter() - started)
