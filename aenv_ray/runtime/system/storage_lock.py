"""The lock of a storage: held by each sandbox that has it, from its start to its end.

One that is alone in having it excludes all others; those that share it exclude only such a one, and
whoever would delete it. The kernel gives it back when the process that holds it ends, however it
does; so a storage has no two such sandboxes, whatever became of those who started them.
"""

from __future__ import annotations

import fcntl
import os
import time
from typing import Final

from aenv_ray.runtime.faults import ProjectLoadError

WAIT_S: Final = 20.0
"""The sandbox that had it before may be ending."""
_LOOK_S: Final = 0.05


def hold(path: str, *, is_shared: bool, wait_s: float = WAIT_S) -> None:
    """Take the lock for as long as this process lives.

    Args:
        path: Of its file.
        is_shared: Others may have the storage too.
        wait_s: How long another sandbox may have it still.

    Raises:
        ProjectLoadError: Another one has it for longer.
        OSError: The file is not there, or its filesystem has no locks.
    """
    # Open to write, or a network filesystem would lock it on this machine alone. It is not for
    # what tools start: those may outlive this process for a moment.
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise ProjectLoadError(
                    f"another sandbox has its storage still, after {wait_s:g} s"
                ) from None
            time.sleep(_LOOK_S)
        else:
            return
