"""The starter: forks the process of each test, and ends it with everything that it has started.

The judge forks it before it reads the tests, so that neither it nor a solution has them in memory.
"""

from __future__ import annotations

import marshal
import os
import signal
import time
from typing import Any, NamedTuple

from judge import process, solution

_END_S = 5.0
_PAUSE_S = 0.001


class End(NamedTuple):
    """How the process of a test ended."""

    status: int
    """Exit code, or minus the number of a signal."""
    cpu_s: float
    """Seconds of CPU of the process and of the children that it waited for."""


class Starter:
    """The judge's side of a starter.

    Args:
        pipes: For solutions: descriptors of ``requests``, ``replies``, ``input`` and ``errors``.
        private: Descriptors of the judge that the starter closes.
    """

    def __init__(self, pipes: dict[str, int], private: tuple[int, ...]) -> None:
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        if os.fork() == 0:
            try:
                for fd in (*private, self._orders, self._answers):
                    os.close(fd)
                _serve(orders, answers, pipes)
            finally:
                os._exit(1)
        for fd in (orders, answers):
            os.close(fd)

    def start(self, job: dict[str, Any]) -> int:
        """Start the process of a test, see `solution.run`; return its pid.

        Raises:
            EOFError: The starter has ended: a solution has killed it.
            OSError: The node has no process left for it.
        """
        self._send(job)
        pid = self._receive()
        if isinstance(pid, str):
            raise OSError(pid)
        return int(pid)

    def end(self) -> End:
        """End the process and all its descendants.

        Raises:
            EOFError: The starter has ended: a solution has killed it.
        """
        self._send(None)
        return End(*self._receive())

    def _send(self, message: Any) -> None:
        try:
            write(self._orders, message)
        except BrokenPipeError:
            raise EOFError from None

    def _receive(self) -> Any:
        return read(self._answers)


def write(fd: int, message: Any) -> None:
    """Write a message for `read`."""
    data = marshal.dumps(message)
    view = memoryview(len(data).to_bytes(8, "big") + data)
    while view:
        view = view[os.write(fd, view) :]


def read(fd: int) -> Any:
    """Return the next message.

    Raises:
        EOFError: There is none.
    """
    return marshal.loads(_exactly(fd, int.from_bytes(_exactly(fd, 8), "big")))


def _exactly(fd: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _serve(orders: int, answers: int, pipes: dict[str, int]) -> None:
    process.adopt_orphans()
    pid = 0
    try:
        while True:
            job = read(orders)
            if job is None:
                write(answers, tuple(_end(pid)))
            else:
                try:
                    pid = os.fork()
                except OSError as exc:
                    write(answers, f"the process of a test cannot be started: {exc}")
                    continue
                if pid == 0:
                    solution.run(job, pipes)
                write(answers, pid)
    except EOFError:
        _end(pid)


def _end(pid: int) -> End:
    """Kill the descendants of this process, to which orphans return, and reap them."""
    found = End(-signal.SIGKILL, 0.0)
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        # Stopped before they are killed, they cannot fork faster than they are killed.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for one in _descendants():
                _signal(one, number)
        try:
            while (reaped := os.wait4(-1, os.WNOHANG))[0]:
                if reaped[0] == pid:
                    used = reaped[2]
                    status = os.waitstatus_to_exitcode(reaped[1])
                    found = End(status, used.ru_utime + used.ru_stime)
        except ChildProcessError:
            return found
        time.sleep(_PAUSE_S)
    return found


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _descendants() -> list[int]:
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    words = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            # The state is that of the main thread; the 18th field counts the threads that run.
            if words[0] not in "ZX" or int(words[17]) > 1:
                parents.setdefault(int(words[1]), []).append(int(name))
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found
