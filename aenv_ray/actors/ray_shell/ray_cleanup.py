"""Ends the processes of a local Ray whose start failed.

Ray itself ends them only when the driver exits, and some of them a minute later.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from aenv_ray.runtime.door.calls import kill_tree

_RAYS: Final = os.fsencode(Path("ray", "core", "src", "ray"))
"""Part of the command of Ray's own programs."""


def children() -> frozenset[int]:
    """Return the pids of this process's children; on systems other than Linux none."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            found.update(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
    return frozenset(found)


def end_since(before: frozenset[int]) -> None:
    """Kill the programs of Ray that this process started, with all their descendants.

    Args:
        before: Children that existed before the start; they are left alone.
    """
    for pid in children() - before:
        with contextlib.suppress(OSError):
            if _RAYS in Path(f"/proc/{pid}/cmdline").read_bytes():
                kill_tree(pid)
