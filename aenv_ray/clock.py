"""Clocks, passed to code that makes decisions, so that it can be tested."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def now(self) -> float:
        """Return seconds since the epoch, comparable between processes."""
        ...


class SystemClock:
    """The system clock."""

    def now(self) -> float:  # noqa: D102
        return time.time()  # noqa: TID251  # the one place that reads it


class FakeClock:
    """A clock that moves only by `advance`."""

    def __init__(self, start_s: float = 1_000_000.0) -> None:
        self._now = start_s

    def now(self) -> float:  # noqa: D102
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`."""
        self._now += seconds
