"""The circuit breaker: pauses calls after repeated infrastructure failures."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from aenv_ray.errors import INFRASTRUCTURE, AenvError, CircuitOpen

CIRCUIT_THRESHOLD: Final = 5
"""Infrastructure failures in a row that open the circuit; AEnvironment's number."""
CIRCUIT_PAUSE_S: Final = 5.0
"""How long an open circuit refuses calls before it lets one through to probe."""


class CircuitBreaker:
    """Refuses calls after repeated infrastructure failures, and recovers by itself.

    What a tool does, raise, time out or refuse its arguments, is no failure of the infrastructure.

    Args:
        threshold: Failures in a row that open it.
        pause_s: Seconds until one call may probe again.
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
        """Let a call through.

        Raises:
            CircuitOpen: Too many failures in a row, and the pause is not over.
        """
        if self._opened_at is None:
            return
        if self._now() - self._opened_at < self._pause_s or self._probing:
            raise CircuitOpen(
                f"{self._failures} infrastructure failures in a row; calls pause for "
                f"{self._pause_s:g} s",
                hint="the next call after that probes; release() and initialize() start anew",
            )
        self._probing = True

    def record(self, error: BaseException | None) -> None:
        """Note how a call ended."""
        self._probing = False
        if isinstance(error, INFRASTRUCTURE):
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
