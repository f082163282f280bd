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
