"""One caller at a time, first come, first served."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from typing import Final

WAKE_S: Final = 0.25
"""Longest single blocking wait.

The runtime stops a call by raising in its thread, which takes effect only when a blocking call
returns. Nothing is decided at these wake-ups: results arrive by events.
"""


class Turn:
    """A place in the queue; it is given up when nobody refers to it any more."""

    __slots__ = ("__weakref__", "gate")

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()


class Turns:
    """A first-in-first-out lock (`threading.Lock` promises no order).

    Places are held weakly, so that a thread that is interrupted between taking its turn and
    noting it does not lock out everyone else for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[weakref.ref[Turn]] = deque()

    def take(self, deadline: float) -> Turn | None:
        """Wait for the caller's turn.

        Args:
            deadline: Seconds on `time.monotonic`.

        Returns:
            The turn, for `give_back`; None when the deadline passed first.
        """
        turn = Turn()
        with self._lock:
            self._queue.append(weakref.ref(turn))
            is_first = self._head() is turn
        while not is_first:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                self.give_back(turn)
                return None
            turn.gate.acquire(timeout=min(WAKE_S, remaining_s))
            with self._lock:
                is_first = self._head() is turn
        return turn

    def give_back(self, turn: Turn) -> None:
        """End a turn, or leave the queue."""
        with self._lock:
            self._queue = deque(ref for ref in self._queue if ref() not in (turn, None))
            following = self._head()
        if following is not None and following.gate.locked():
            following.gate.release()

    def _head(self) -> Turn | None:
        while self._queue:
            turn = self._queue[0]()
            if turn is not None:
                return turn
            self._queue.popleft()
        return None
