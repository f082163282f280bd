"""Time, passed in rather than reached for, so that decisions can be tested."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where decisions read the time."""

    def now(self) -> float:
        """Return wall-clock seconds since the epoch: deadlines are compared across processes."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:  # noqa: D102
        return time.time()  # noqa: TID251  # the one place that reads it


class FakeClock:
    """A clock that moves only when told."""

    def __init__(self, start_s: float = 1_000_000.0) -> None:
        self._now = start_s

    def now(self) -> float:  # noqa: D102
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`."""
        self._now += seconds
