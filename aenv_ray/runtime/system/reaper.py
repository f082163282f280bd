"""Process 1 of a sandbox: it adopts what others leave, and reaps that and nothing else."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

_WNOTHREAD: Final = 0x2000_0000
LISTS_CHILDREN: Final = (
    sys.platform != "linux" or Path(f"/proc/self/task/{os.getpid()}/children").exists()
)
"""Kernels like gVisor's do not."""


class Listener(Protocol):
    """A listening socket, or what hands over connections like one."""

    def fileno(self) -> int:
        """Return what becomes readable when there is a connection."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection and its peer's address."""


def children_of_main_thread() -> Sequence[int]:
    """Return the pids that the main thread started or adopted; Linux only."""
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    with contextlib.suppress(OSError):
        return [int(pid) for pid in listing.read_text().split()]
    return []


def reap_adopted(*_: object) -> None:
    """Reap orphans that this process adopted, and no child that a tool itself waits for.

    The kernel hands orphans to the main thread, which starts no processes of its own; children
    that tools start belong to the threads that started them.
    """
    if not LISTS_CHILDREN:  # any child of this thread then
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG | _WNOTHREAD)[0]:
                pass
    for pid in children_of_main_thread():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


class Acceptor:
    """Accepts connections in the main thread, whose signal handlers run meanwhile.

    The kernel may deliver a signal to any thread, and Python runs its handler in the main one: a
    main thread that blocks in ``accept`` would reap nothing before the next connection.

    Args:
        listener: Of stream connections.

    Raises:
        ValueError: This is not the main thread.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._woken, wakes = os.pipe()
        for fd in (self._woken, wakes):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)

    def accept(self) -> socket.socket:
        """Wait for the next connection.

        Raises:
            OSError: The listener is closed.
        """
        while True:
            for fd, _ in self._poll.poll():
                if fd != self._woken:
                    return self._listener.accept()[0]
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
