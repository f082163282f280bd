"""Concurrent work is deduplicated by key."""

from __future__ import annotations

import asyncio

import pytest

from aenv_ray.engines.node.singleflight import SingleFlight


class Work:
    """Counts its calls and returns when the test says so."""

    def __init__(self) -> None:
        self.begun = self.cancelled = 0
        self.has_begun = asyncio.Event()
        self.end = asyncio.Event()

    async def __call__(self) -> int:
        self.begun += 1
        self.has_begun.set()
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.begun


async def ask(flights: SingleFlight[int], make: Work, times: int = 1) -> list[asyncio.Task[int]]:
    tasks = [asyncio.create_task(flights.run("x", make)) for _ in range(times)]
    await make.has_begun.wait()
    return tasks


async def test_concurrent_callers_share_one_call_and_later_ones_start_another():
    flights, make = SingleFlight[int](), Work()
    tasks = await ask(flights, make, 3)
    make.end.set()
    assert [await task for task in tasks] == [1, 1, 1]
    assert await flights.run("x", make) == 2


async def test_concurrent_callers_share_an_exception_that_is_not_cached():
    flights = SingleFlight[int]()
    release = asyncio.Event()

    async def fail() -> int:
        await release.wait()
        raise ValueError("no")

    tasks = [asyncio.create_task(flights.run("x", fail)) for _ in range(2)]
    await asyncio.sleep(0)
    release.set()
    for task in tasks:
        with pytest.raises(ValueError, match="no"):
            await task
    make = Work()
    make.end.set()
    assert await flights.run("x", make) == 1


async def test_cancelling_one_caller_does_not_affect_the_others():
    """Invariant 11."""
    flights, make = SingleFlight[int](), Work()
    first, second = await ask(flights, make, 2)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert make.cancelled == 0
    make.end.set()
    assert await second == 1


async def test_cancelling_the_last_caller_cancels_the_work():
    """Invariant 11."""
    flights, make = SingleFlight[int](), Work()
    tasks = await ask(flights, make, 2)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert (make.begun, make.cancelled) == (1, 1)
    make.end.set()
    assert await flights.run("x", make) == 2
