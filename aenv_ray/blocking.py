"""Coroutines that serve both callers that await and callers that block."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, because everything that it waits for blocks."""
    try:
        work.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    work.close()
    raise AssertionError(f"{work!r} suspended outside of an event loop")


async def awaited(result: Awaitable[T] | T) -> T:
    """Return the result of a function that may be async."""
    return await result if inspect.isawaitable(result) else result
