"""A clock for tests, in place of the system's."""

from __future__ import annotations


class FakeClock:
    """A clock that moves only by `advance`."""

    def __init__(self, start_s: float = 1_000_000.0) -> None:
        self._now = start_s

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`."""
        self._now += seconds
