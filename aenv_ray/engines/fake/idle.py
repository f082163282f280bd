"""The connections of all sandboxes of this process that wait for a request.

A thread for each of thousands of connections would make every burst of calls a contest of as many
threads for Python's lock.
"""

from __future__ import annotations

import select
import sys
import threading
import time
from collections import deque
from functools import cache
from typing import Final

from aenv_ray.runtime.door.door import Connection
from aenv_ray.runtime.system.threads import start_thread

_READERS: Final = 8
"""Threads that serve connections, unless all of them run calls for longer than `_STUCK_S`."""
_STUCK_S: Final = 0.02


class PolledConnections:
    """Serves connections when they can be read; an `IdleConnections`. Linux only."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._watched: dict[int, Connection] = {}
        """By file descriptor."""
        self._readable: deque[Connection] = deque()
        self._changed = threading.Condition()
        self._waiting = 0
        """Threads that wait for a readable connection."""
        self._threads = 0
        self._served = 0
        """Connections that threads have taken so far."""
        start_thread(self._wait_for_ever)

    def watch(self, connection: Connection, fileno: int) -> None:
        """See `IdleConnections.watch`."""
        self._watched[fileno] = connection
        events = select.EPOLLIN | select.EPOLLONESHOT
        try:
            self._poll.register(fileno, events)
        except FileExistsError:
            self._poll.modify(fileno, events)

    def _wait_for_ever(self) -> None:
        checked_at, checked = 0.0, 0
        while True:
            events = self._poll.poll(_STUCK_S if self._readable else None)
            with self._changed:
                found = [self._watched.pop(fileno, None) for fileno, _ in events]
                self._readable += [connection for connection in found if connection is not None]
                self._changed.notify(len(found))
                missing = len(self._readable) - self._waiting
                grow = min(missing, _READERS - self._threads)
                if missing > 0 >= grow and time.monotonic() - checked_at > _STUCK_S:
                    if self._served == checked:
                        grow = min(missing, self._threads)
                    checked_at, checked = time.monotonic(), self._served
                self._threads += max(0, grow)
            for _ in range(grow):
                self._start_thread()

    def _start_thread(self) -> None:
        try:
            start_thread(self._serve)
        except RuntimeError:  # the system allows no more threads now; the existing ones continue
            with self._changed:
                self._threads -= 1

    def _serve(self) -> None:
        while True:
            with self._changed:
                if self._waiting >= _READERS:
                    self._threads -= 1
                    return
                self._waiting += 1
                self._changed.wait_for(lambda: self._readable)
                self._waiting -= 1
                self._served += 1
                connection = self._readable.popleft()
            connection.serve()


@cache
def polled_connections() -> PolledConnections | None:
    """Return what watches the connections of this process; None where it cannot be done."""
    return PolledConnections() if sys.platform == "linux" else None
