"""A lock that is acquired in the order of the requests."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from typing import Final

WAKE_S: Final = 0.25
"""Longest blocking wait.

The runtime stops a call by raising an exception in its thread, which takes effect only when a
blocking call returns. Nothing depends on these wake-ups otherwise.
"""


class Ticket:
    """A place in the queue of a lock, which is given up when nothing refers to it any more."""

    __slots__ = ("__weakref__", "gate")

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()


class FifoLock:
    """A first-in-first-out lock (`threading.Lock` guarantees no order).

    The queue refers to tickets weakly: a thread that is interrupted after it acquired the lock, but
    before it stored its ticket, does not block the others for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[weakref.ref[Ticket]] = deque()

    def acquire(self, deadline: float) -> Ticket | None:
        """Acquire the lock.

        Args:
            deadline: Seconds on `time.monotonic`.

        Returns:
            A ticket for `release`; None when the deadline passed first.
        """
        ticket = Ticket()
        with self._lock:
            self._queue.append(weakref.ref(ticket))
            is_first = self._head() is ticket
        while not is_first:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                self.release(ticket)
                return None
            ticket.gate.acquire(timeout=min(WAKE_S, remaining_s))
            with self._lock:
                is_first = self._head() is ticket
        return ticket

    def release(self, ticket: Ticket) -> None:
        """Release the lock, or leave its queue."""
        with self._lock:
            self._queue = deque(ref for ref in self._queue if ref() not in (ticket, None))
            following = self._head()
        if following is not None and following.gate.locked():
            following.gate.release()

    def _head(self) -> Ticket | None:
        while self._queue:
            ticket = self._queue[0]()
            if ticket is not None:
                return ticket
            self._queue.popleft()
        return None
