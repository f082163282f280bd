"""One making for all who ask at once."""

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


class Flights(Generic[T]):
    """Makes one thing for each key at a time, and gives it, or its failure, to all who wait.

    Nothing is kept: who asks after its end has it made anew.
    """

    def __init__(self) -> None:
        self._flights: dict[str, _Flight] = {}

    async def join(self, key: str, make: Callable[[], Awaitable[T]]) -> T:
        """Return what `make` gives, or what the making of the same key under way gives.

        Cancelling one who waits leaves the others their making; cancelling the last ends it.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(self._make(key, make)))
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                self._forget(key, flight.task)  # who asks now must not join what is ending
                flight.task.cancel()
                await asyncio.wait([flight.task])

    async def _make(self, key: str, make: Callable[[], Awaitable[T]]) -> T:
        task = asyncio.current_task()
        try:
            return await make()
        finally:
            self._forget(key, task)

    def _forget(self, key: str, task: asyncio.Task[Any] | None) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]
