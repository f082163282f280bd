"""Which thread started which process, where the kernel does not tell.

Linux lists the children of each thread. Kernels like gVisor's list those of no thread, and tell of
a process its parent process alone. There every way in which Python starts a process is wrapped, and
what came of it is noted for the thread that called it. A process that C code starts by itself is
not.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

_NOBODY: Final = 0
"""Instead of a pid: the start failed."""
_KEPT: Final = 256
"""So many notes there are before those of processes that are gone are dropped."""


class Births:
    """Notes of the processes that the threads of this process started."""

    def __init__(self) -> None:
        self._notes: collections.deque[tuple[int, list[Any]]] = collections.deque()
        self._limit = _KEPT

    def noting(self, start: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that starts a process as `start` does, and notes it.

        Args:
            start: Returns a pid, or a tuple that begins with one.
        """

        @functools.wraps(start)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if len(self._notes) >= self._limit:
                self._forget_gone()
            made: list[Any] = []
            self._notes.append((threading.get_native_id(), made))
            try:
                # Nothing but C runs from the start to the note: an interrupt (`Call.stop`) hits
                # between two steps of Python code, and what it hid would outlive the call.
                made.extend(itertools.starmap(functools.partial(start, **kwargs), [args]))
                return made[0]
            finally:
                if not made:
                    made.append(_NOBODY)

        return noted

    def of_thread(self, native_id: int) -> list[int]:
        """Return the pids that a thread started and that were not reaped."""
        # Of a number that was given twice, the later note counts.
        threads = {_pid(made): thread for thread, made in list(self._notes) if made}
        mine = [pid for pid, thread in threads.items() if thread == native_id]
        return [pid for pid in mine if parent_of(pid) == os.getpid()]

    def _forget_gone(self) -> None:
        for _ in range(len(self._notes)):
            with contextlib.suppress(IndexError):  # another thread does the same
                note = self._notes.popleft()
                if not note[1] or parent_of(_pid(note[1])) == os.getpid():
                    self._notes.append(note)
        self._limit = max(_KEPT, 2 * len(self._notes))


def _pid(made: list[Any]) -> int:
    return int(made[0][0] if isinstance(made[0], tuple) else made[0])


def parent_of(pid: int) -> int | None:
    """Return the parent of a process; None of one that is gone."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # After the name, in parentheses, which may hold anything: state, parent.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


_births: Final = Births()


def note() -> None:
    """Note from now on which thread starts which process."""
    # Not needed, and not loaded, elsewhere.
    import _posixsubprocess
    import subprocess

    starters = (
        (_posixsubprocess, "fork_exec"),
        (subprocess, "_fork_exec"),  # its own name for the one above
        (os, "fork"),
        (os, "forkpty"),
        (os, "posix_spawn"),
        (os, "posix_spawnp"),
    )
    for module, name in starters:
        start = getattr(module, name, None)  # Python has not always had all of them
        if start is not None:
            setattr(module, name, _births.noting(start))


def of_thread(native_id: int) -> list[int]:
    """Return the pids that a thread started since `note` and that were not reaped."""
    return _births.of_thread(native_id)
