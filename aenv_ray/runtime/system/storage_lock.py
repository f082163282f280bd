"""The lock on a storage volume, which a sandbox that uses the storage holds for its whole life.

A sandbox with exclusive use takes an exclusive lock, sandboxes that share the storage a shared one;
deleting the storage needs the exclusive lock. The kernel releases the lock when the process that
holds it ends, so two sandboxes never have exclusive use, even when what started them has crashed.
"""

from __future__ import annotations

import fcntl
import os
import time
from typing import Final

from aenv_ray.runtime.faults import ProjectLoadError

WAIT_S: Final = 20.0
"""How long to wait by default: the previous sandbox may still be ending."""
_RETRY_S: Final = 0.05


def lock_storage(path: str, *, is_shared: bool, wait_s: float = WAIT_S) -> None:
    """Take the lock for as long as this process lives.

    Args:
        path: The lock file.
        is_shared: Whether other sandboxes may use the storage too.
        wait_s: How long to wait for another sandbox that holds the lock.

    Raises:
        ProjectLoadError: Another sandbox held the lock all that time.
        OSError: The file does not exist, or its filesystem has no locks.
    """
    # Opened for writing, since otherwise NFS would lock it on this machine only. Closed on exec,
    # since processes that tools start may outlive this one for a moment.
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise ProjectLoadError(
                    f"another sandbox still uses the storage of this one, after {wait_s:g} s"
                ) from None
            time.sleep(_RETRY_S)
        else:
            return
