"""Where sandboxes of the fake engine work: below one directory for each process."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

PREFIX: Final = "aenv-fake-"


@cache
def base_dir() -> Path:
    """Return this process's directory, which goes with it: at its end, or with the next start.

    A host that is killed removes nothing itself.
    """
    directory = claim(Path(tempfile.gettempdir()))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def claim(parent: Path) -> Path:
    """Return a new directory below `parent`; those of processes that are gone are removed.

    It is held by a lock that the kernel gives up when this process ends, however it ends.
    """
    for left in parent.glob(f"{PREFIX}*"):
        _remove_unless_held(left)
    while True:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        held = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(held, fcntl.LOCK_SH)
        if directory.is_dir():
            return directory
        os.close(held)  # another process found it before it was held


def _remove_unless_held(directory: Path) -> None:
    # Held, another user's, or removed by another process meanwhile: then it is not for us.
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(descriptor)
