"""The files of a launcher: sockets, logs and, without namespaces, work directories.

All in one directory of the machine's memory file system, named by a hash of the instance: socket
paths hold 108 bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any, Final

STALE_AFTER_S: Final = 60.0
"""A directory without a live launcher is removed when it is at least this old."""


def short_name(instance_id: str) -> str:
    """Return the file name of an instance's socket, log and work directory."""
    return hashlib.sha256(instance_id.encode()).hexdigest()[:20]


class InstanceFiles:
    """What a launcher keeps for its instances.

    Args:
        directory: The launcher's.
    """

    def __init__(self, directory: Path) -> None:
        self._sockets = directory / "s"
        self._logs = directory / "log"
        self._work = directory / "work"
        self._root = directory / "root"

    def prepare(self) -> None:
        """Make the directories."""
        for path in (self._sockets, self._logs, self._work, self._root):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def clear(self) -> None:
        """Remove what an earlier launcher left that was killed: its instances died with it."""
        for path in (self._sockets, self._logs, self._work):
            for entry in path.iterdir():
                if entry.is_dir():
                    remove_tree(entry)
                else:
                    entry.unlink(missing_ok=True)

    def listen(self, instance_id: str) -> socket.socket:
        """Return a listening socket for an instance; it can be connected to at once."""
        path = self._sockets / short_name(instance_id)
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(path))
            listener.listen(16)
        except OSError:
            listener.close()
            raise
        return listener

    def make_work_dir(self, instance_id: str) -> Path:
        """Make the work directory of an instance that has no mounts of its own."""
        path = self._work / short_name(instance_id)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def clean(self, instance_id: str) -> None:
        """Remove what an instance leaves."""
        name = short_name(instance_id)
        (self._sockets / name).unlink(missing_ok=True)
        work = self._work / name
        if work.exists():
            remove_tree(work)


def remove_stale(runtime_dir: Path) -> None:
    """Remove the directories of launchers that are gone, for example after a SIGKILL."""
    for lock in runtime_dir.glob("*/lock"):
        with contextlib.suppress(OSError):
            old = time.time() - lock.stat().st_mtime > STALE_AFTER_S  # noqa: TID251  # file times
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if old:
                    remove_tree(lock.parent)
            finally:
                os.close(fd)


def remove_tree(path: Path) -> None:
    """Delete a directory whatever modes its content has."""

    def retry(function: Any, name: str, _: Any) -> None:
        with contextlib.suppress(OSError):
            Path(name).parent.chmod(0o700)
            Path(name).chmod(0o700)
            function(name)

    shutil.rmtree(path, onerror=retry)
