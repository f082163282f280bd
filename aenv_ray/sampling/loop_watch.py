"""Measures for how long the event loop of episodes was blocked, and reports it."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

logger = logging.getLogger("aenv_ray")

_BEAT_S: Final = 0.05
_BLOCK_S: Final = 2 * _BEAT_S
"""A loop that does not beat for this long is blocked. Shorter spans are ordinary work, such as
decoding large results, which an agent can cause."""
_MOST_S: Final = 10.0
"""A loop that was blocked for this long in sum, and for `_SHARE` of the time, is reported."""
_SHARE: Final = 0.1


class LoopWatch:
    """Measures how long a loop was blocked, mostly by an async policy that does not await.

    The loop may also be the caller's, who reads with ``async for`` and computes between episodes.

    While a loop is blocked, no episode on it can take the answer of its sandbox, and no limit of
    time takes effect. A call that was under way seems to last as long as the block.
    """

    def __init__(self) -> None:
        self._began = 0.0
        self._state: tuple[float | None, float] = (None, 0.0)
        """When the loop ran last, None if it is not watched, and how long it was blocked before."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_reported = False

    def start(self) -> None:
        """Watch the running loop until `stop`."""
        self._began = time.perf_counter()
        self._state = (self._began, 0.0)
        self._timer = asyncio.get_running_loop().call_later(_BEAT_S, self._beat)

    def stop(self) -> None:
        """Stop watching; may be called any number of times."""
        if self._timer is not None:
            self._timer.cancel()
        self._state = (None, self.blocked_s(time.perf_counter()))

    def blocked_s(self, now: float) -> float:
        """Return for how many seconds the loop was blocked in sum, until now. For any thread.

        Args:
            now: The time of `time.perf_counter`.
        """
        ran_at, blocked_s = self._state
        silent_s = 0.0 if ran_at is None else now - ran_at
        return blocked_s + (silent_s if silent_s >= _BLOCK_S else 0.0)

    def report(self) -> None:
        """Log once that the loop was blocked for long. For any thread."""
        now = time.perf_counter()
        blocked_s, watched_s = self.blocked_s(now), now - self._began
        if self._is_reported or blocked_s < max(_MOST_S, _SHARE * watched_s):
            return
        self._is_reported = True
        logger.warning(
            "the event loop of the episodes was blocked for %.0f of %.0f s, and with it all "
            "episodes and their time limits: if the policy is async, use await in it, or make it "
            "a sync function; if your code reads episodes with async for, call what takes long "
            "there with asyncio.to_thread",
            blocked_s,
            watched_s,
        )

    def _beat(self) -> None:
        now = time.perf_counter()
        blocked_s = self.blocked_s(now)
        is_new = blocked_s > self._state[1]
        self._state = (now, blocked_s)
        self._timer = asyncio.get_running_loop().call_later(_BEAT_S, self._beat)
        if is_new:
            self.report()
