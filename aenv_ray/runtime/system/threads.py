"""The threads of the runtime: how to start one, and what the kernel knows about it."""

from __future__ import annotations

import _thread
import contextlib
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from aenv_ray.runtime.system import child_tracking
from aenv_ray.runtime.system.reaper import LISTS_CHILDREN

STACK_BYTES: Final = 2 * 1024 * 1024
"""Stack size of a thread where memory is limited; CPython's own limit of C recursion, 10,000, fits
in it."""
_PIDS_MAX: Final = ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max")  # v2, v1

_forbidden: Final = [False]


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """Let `start_thread` fail in this process meanwhile: after a fork, threads would be missing."""
    _forbidden[0] = True
    try:
        yield
    finally:
        _forbidden[0] = False


def start_thread(target: Callable[[], object]) -> None:
    """Run `target` in a new daemon thread, and return once that thread runs.

    `threading.Thread` would touch more memory, and in a freshly forked process every page that is
    touched is copied first. This waits because CPython gives a new thread the identity of its
    creator until it runs: an interrupt for the creator (`Call.stop`) would hit the new thread.

    Raises:
        RuntimeError: The system allows no more threads, see `process_limits`; or `no_threads`.
    """
    if _forbidden[0]:
        raise RuntimeError("this process may start no threads now")
    running = _thread.allocate_lock()
    running.acquire()

    def run() -> None:
        running.release()
        target()

    try:
        _thread.start_new_thread(run, ())
    except MemoryError as exc:
        raise RuntimeError("no memory for a new thread") from exc
    running.acquire()


def limit_stacks() -> None:
    """Give new threads small stacks if the memory of this process is limited.

    RLIMIT_DATA counts the whole stack of a thread, used or not. With the usual 8 MiB, a process
    with 1 GiB could run 120 threads, and would have no memory left for anything else.
    """
    if resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY:
        _thread.stack_size(STACK_BYTES)


def has_children() -> bool:
    """Whether this thread has child processes, running or not reaped; Linux only."""
    if not LISTS_CHILDREN:
        return bool(child_tracking.children_of_thread(threading.get_native_id()))
    with contextlib.suppress(OSError):
        path = f"/proc/self/task/{threading.get_native_id()}/children"
        with open(path, "rb") as file:
            return bool(file.read(1))
    return False


def process_limits() -> str:
    """Return the limits that make a fork or a new thread fail, for an error message."""
    limits = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY:
        limits.append(f"RLIMIT_NPROC of user {os.getuid()} is {soft}")
    for path in _PIDS_MAX:
        with contextlib.suppress(OSError, ValueError):
            limits.append(f"pids.max of the cgroup is {int(Path(path).read_text())}")
    return " and ".join(limits) or "neither RLIMIT_NPROC nor a cgroup sets one: see kernel.pid_max"
