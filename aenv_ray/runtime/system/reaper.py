"""Reaping of orphans, which the kernel makes children of process 1 of a sandbox."""

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
_CPU_LIMIT: Final = b"Max cpu time"
_STAT_UTIME: Final = 11
"""Position of the CPU time in user mode in a process's ``stat``, counted from its state."""
_STAT_STIME: Final = 12
_CLOSE: Final = 0.75
"""The kernel applies the limit to a coarser count of the time than the one that it shows."""
LISTS_CHILDREN: Final = (
    sys.platform != "linux" or Path(f"/proc/self/task/{os.getpid()}/children").exists()
)
"""Whether the kernel lists the children of a thread; gVisor's does not."""


class ListeningSocket(Protocol):
    """A listening socket, or an object that is used like one."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while a connection waits."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection and the address of its peer."""


def children_of_main_thread() -> Sequence[int]:
    """Return the pids that the main thread started or adopted; Linux only."""
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    with contextlib.suppress(OSError):
        return [int(pid) for pid in listing.read_text().split()]
    return []


def reap_adopted(*_: object) -> None:
    """Reap orphans that this process adopted, but no child that a tool waits for.

    The kernel makes orphans children of the main thread, which starts no processes. A process that
    a tool starts is a child of the tool's thread.
    """
    if not LISTS_CHILDREN:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG | _WNOTHREAD)[0]:
                pass
    for pid in children_of_main_thread():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def used_up_cpu_limit(pid: int) -> bool:
    """Return whether a process that nobody has reaped yet has reached its limit of CPU time.

    The kernel ends it with SIGKILL, as if from outside; but code in a sandbox can lower the limit.
    """
    process = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):  # somebody has reaped it
        for line in (process / "limits").read_bytes().splitlines():
            if line.startswith(_CPU_LIMIT):
                hard = line[len(_CPU_LIMIT) :].split()[1]
                if not hard.isdigit():  # unlimited
                    return False
                fields = (process / "stat").read_bytes().rpartition(b") ")[2].split()
                ticks = int(fields[_STAT_UTIME]) + int(fields[_STAT_STIME])
                return ticks >= _CLOSE * int(hard) * os.sysconf("SC_CLK_TCK")
    return False


class Acceptor:
    """Accepts connections in the main thread without delaying signal handlers.

    The kernel may deliver a signal to any thread, but Python runs its handler in the main thread.
    A main thread that blocks in ``accept`` would reap nothing until the next connection.

    Args:
        listener: Accepts stream connections.

    Raises:
        ValueError: This is not the main thread.
    """

    def __init__(self, listener: ListeningSocket) -> None:
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
