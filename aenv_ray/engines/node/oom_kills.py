"""The processes that the kernel of this node has killed for lack of memory.

This module imports only the standard library, because the launcher imports it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path


def node_oom_kills() -> int:
    """Return how many processes the node's kernel has killed for lack of memory; Linux only."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/vmstat").read_text().split("oom_kill ")[1].split("\n")[0])
    return 0
