"""One making for all who ask at once."""

from __future__ import annotations

import asyncio

import pytest

from aenv_ray.engines.node.singleflight import Flights


class Making:
    """Counts how often it is begun, and ends when it is told."""

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


async def ask(flights: Flights[int], make: Making, times: int = 1) -> list[asyncio.Task[int]]:
    tasks = [asyncio.create_task(flights.join("x", make)) for _ in range(times)]
    await make.has_begun.wait()
    return tasks


async def test_who_asks_at_once_gets_the_same_and_who_asks_later_a_new_one():
    flights, make = Flights[int](), Making()
    tasks = await ask(flights, make, 3)
    make.end.set()
    assert [await task for task in tasks] == [1, 1, 1]
    assert await flights.join("x", make) == 2


async def test_a_failure_is_everybodys_and_is_not_kept():
    flights = Flights[int]()
    release = asyncio.Event()

    async def fail() -> int:
        await release.wait()
        raise ValueError("no")

    tasks = [asyncio.create_task(flights.join("x", fail)) for _ in range(2)]
    await asyncio.sleep(0)
    release.set()
    for task in tasks:
        with pytest.raises(ValueError, match="no"):
            await task
    make = Making()
    make.end.set()
    assert await flights.join("x", make) == 1


async def test_one_who_leaves_takes_nothing_from_the_others():
    """Invariant 11."""
    flights, make = Flights[int](), Making()
    first, second = await ask(flights, make, 2)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert make.cancelled == 0
    make.end.set()
    assert await second == 1


async def test_the_last_who_leaves_ends_it_and_the_next_begins_anew():
    """Invariant 11."""
    flights, make = Flights[int](), Making()
    tasks = await ask(flights, make, 2)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert (make.begun, make.cancelled) == (1, 1)
    make.end.set()
    assert await flights.join("x", make) == 2
