"""The circuit breaker: pauses calls after repeated infrastructure failures."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from aenv_ray.errors import AenvError, CircuitOpen, is_infrastructure

CIRCUIT_THRESHOLD: Final = 5
"""Consecutive infrastructure failures that open the circuit; as in AEnvironment."""
CIRCUIT_PAUSE_S: Final = 5.0
"""How long an open circuit refuses calls before it lets one through as a probe."""


class CircuitBreaker:
    """Refuses calls after repeated infrastructure failures, and recovers by itself.

    A tool that raises, times out or rejects its arguments is not an infrastructure failure.

    Args:
        threshold: Consecutive failures that open the circuit.
        pause_s: Seconds until a call may probe again.
        now: Monotonic seconds.
    """

    def __init__(
        self,
        threshold: int = CIRCUIT_THRESHOLD,
        pause_s: float = CIRCUIT_PAUSE_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threshold = threshold
        self._pause_s = pause_s
        self._now = now
        self._failures = 0
        self._opened_at: float | None = None
        self._probing = False

    def check(self) -> None:
        """Allow a call.

        Raises:
            CircuitOpen: The circuit is open; the pause is not over, or a probe is running.
        """
        if self._opened_at is None:
            return
        if self._now() - self._opened_at < self._pause_s or self._probing:
            raise CircuitOpen(
                f"{self._failures} infrastructure failures in a row: calls are refused for "
                f"{self._pause_s:g} s",
                hint="try again after the pause, or call release() and initialize()",
            )
        self._probing = True

    def record(self, error: BaseException | None) -> None:
        """Record the outcome of a call."""
        self._probing = False
        if error is not None and is_infrastructure(error):
            self._failures += 1
            if self._failures >= self._threshold:
                self._opened_at = self._now()
        elif error is None or isinstance(error, AenvError):
            self.reset()

    def reset(self) -> None:
        """Forget all failures."""
        self._failures = 0
        self._opened_at = None
        self._probing = False
