"""Tracks which thread started which process, on kernels that do not report it.

Linux lists the children of each thread. Kernels like gVisor's do not, and report only the parent
process of a process. There, every function with which Python starts a process is wrapped, and the
pid is recorded for the thread that called it. A process that C code starts is not recorded.
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

_FAILED: Final = 0
"""Recorded instead of a pid: the start failed."""
_PRUNE_AT: Final = 256
"""Number of records at which those of finished processes are dropped."""


class ChildTracker:
    """Records the processes that the threads of this process start."""

    def __init__(self) -> None:
        self._records: collections.deque[tuple[int, list[Any]]] = collections.deque()
        self._prune_at = _PRUNE_AT

    def track(self, start: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that starts a process as `start` does and records it.

        Args:
            start: Returns a pid, or a tuple that begins with one.
        """

        @functools.wraps(start)
        def tracked(*args: Any, **kwargs: Any) -> Any:
            if len(self._records) >= self._prune_at:
                self._prune()
            started: list[Any] = []
            self._records.append((threading.get_native_id(), started))
            try:
                # Only C code runs between the start and the record: an interrupt (`Call.stop`)
                # hits between two steps of Python code, and an unrecorded process would outlive
                # the call.
                started.extend(itertools.starmap(functools.partial(start, **kwargs), [args]))
                return started[0]
            finally:
                if not started:
                    started.append(_FAILED)

        return tracked

    def children_of_thread(self, native_id: int) -> list[int]:
        """Return the pids that a thread started and that were not reaped."""
        # A pid can be reused: its latest record counts.
        threads = {_pid(started): thread for thread, started in list(self._records) if started}
        mine = [pid for pid, thread in threads.items() if thread == native_id]
        return [pid for pid in mine if parent_of(pid) == os.getpid()]

    def _prune(self) -> None:
        for _ in range(len(self._records)):
            with contextlib.suppress(IndexError):  # another thread prunes too
                record = self._records.popleft()
                if not record[1] or parent_of(_pid(record[1])) == os.getpid():
                    self._records.append(record)
        self._prune_at = max(_PRUNE_AT, 2 * len(self._records))


def _pid(started: list[Any]) -> int:
    return int(started[0][0] if isinstance(started[0], tuple) else started[0])


def parent_of(pid: int) -> int | None:
    """Return the parent of a process; None if the process is gone."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # After the name, in parentheses, which may hold anything: state, parent.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


_tracker: Final = ChildTracker()


def track_children() -> None:
    """Record from now on which thread starts which process."""
    import _posixsubprocess  # imported here: most sandboxes need neither
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
        start = getattr(module, name, None)  # not every version of Python has all of them
        if start is not None:
            setattr(module, name, _tracker.track(start))


def children_of_thread(native_id: int) -> list[int]:
    """Return the pids that a thread started since `track_children` and that were not reaped."""
    return _tracker.children_of_thread(native_id)
