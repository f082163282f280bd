"""Memory of a node: the default limit of sandboxes, and what the kernel killed for lack of it.

This module imports only the standard library, because the launcher imports it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

DEFAULT_LIMIT_SHARE: Final = 0.5
"""Memory limit of a sandbox whose project sets none, as a share of the node's memory."""


def node_oom_kills() -> int:
    """Return how many processes the node's kernel has killed for lack of memory; Linux only."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/vmstat").read_text().split("oom_kill ")[1].split("\n")[0])
    return 0
