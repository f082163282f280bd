"""The processes of a local Ray whose start was given up: they are ended at once.

Ray ends its own children when the driver exits, and with them the one that watches the node's
agents. Those still wait for the head of a Ray that is gone, a minute long.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from aenv_ray.runtime.door.calls import kill_tree

_RAYS: Final = os.fsencode(Path("ray", "core", "src", "ray"))
"""In the command of Ray's own programs for a node."""


def children() -> frozenset[int]:
    """Return the children of this process; Linux only, elsewhere none."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            found.update(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
    return frozenset(found)


def end_since(before: frozenset[int]) -> None:
    """Kill the programs of Ray that this process started since, and all that they started.

    Args:
        before: The children that there were; those, and what is not Ray's, is left alone.
    """
    for pid in children() - before:
        with contextlib.suppress(OSError):
            if _RAYS in Path(f"/proc/{pid}/cmdline").read_bytes():
                kill_tree(pid)
