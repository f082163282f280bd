"""Deduplicate concurrent work by key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Flight:
    task: asyncio.Task[Any]
    waiting: int = 0


class SingleFlight(Generic[T]):
    """Runs at most one task per key; concurrent callers share its result or its exception.

    Results are not cached: a call after the task has finished starts a new one.
    """

    def __init__(self) -> None:
        self._flights: dict[str, _Flight] = {}

    async def run(self, key: str, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work`, or of the task that is already running for this key.

        Cancelling one caller does not affect the others; cancelling the last one cancels the task.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(self._work(key, work)))
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                self._forget(key, flight.task)  # later callers must not join a cancelled task
                flight.task.cancel()
                await asyncio.wait([flight.task])

    async def _work(self, key: str, work: Callable[[], Awaitable[T]]) -> T:
        task = asyncio.current_task()
        try:
            return await work()
        finally:
            self._forget(key, task)

    def _forget(self, key: str, task: asyncio.Task[Any] | None) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]
