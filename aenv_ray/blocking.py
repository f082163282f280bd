"""Running code that is written once, as coroutines, for callers that block."""

from __future__ import annotations

from collections.abc import Coroutine
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
