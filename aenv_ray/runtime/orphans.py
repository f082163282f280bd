"""Process 1 of a sandbox: it adopts what others leave, and reaps that and nothing else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path


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
    for pid in children_of_main_thread():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
