"""The files of a launcher: sockets, logs and, without namespaces, work directories.

All in one directory of the machine's memory file system, named by a hash of the instance: socket
paths hold 108 bytes. The hosts of the node keep their records there as well, which outlive the
launcher: they are removed when the process that owns everything on the node, the raylet, is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any, Final

STALE_AFTER_S: Final = 60.0
"""A directory without a live launcher is removed when it is at least this old."""
_OWNER: Final = "owner"
_LOCK: Final = "lock"
_KEPT: Final = frozenset({"records", _OWNER, _LOCK})
"""What a launcher leaves to hosts and to its successor. The lock goes with the directory only: were
it removed, a successor that starts just now would have its files taken from it."""


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


def note_owner(directory: Path, pid: int) -> None:
    """Note the process without which nobody needs a node's directory; a second time does nothing.

    Args:
        directory: From `node_directory`.
        pid: Of the raylet.
    """
    path = directory / _OWNER
    if not path.exists():
        partial = directory / f".{_OWNER}.{os.getpid()}"
        partial.write_text(json.dumps([pid, _started_at(pid)]))
        partial.replace(path)


def has_live_owner(directory: Path) -> bool:
    """Whether the process that `note_owner` named runs; False when none was named."""
    owner = _owner(directory)
    return owner is not None and _is_running(owner[0]) and _started_at(owner[0]) == owner[1]


def _owner(directory: Path) -> tuple[int, str] | None:
    try:
        pid, started_at = json.loads((directory / _OWNER).read_bytes())
    except (OSError, ValueError):
        return None
    return int(pid), str(started_at)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's
    return True


def _started_at(pid: int) -> str:
    """Return what tells a process from a later one with its number; empty where nothing does."""
    with contextlib.suppress(OSError, IndexError):
        # The name, in parentheses, may hold anything; the start is the 20th field after it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def leave(directory: Path) -> None:
    """Remove what a launcher had; with its owner gone, everything. The launcher holds the lock."""
    if not has_live_owner(directory):
        remove_tree(directory)
        return
    for path in directory.iterdir():
        if path.name in _KEPT:
            continue
        if path.is_dir():
            remove_tree(path)
        else:
            path.unlink(missing_ok=True)


def remove_stale(runtime_dir: Path) -> None:
    """Remove the directories of nodes that are gone, for example after a SIGKILL."""
    marks = [path for name in (_LOCK, _OWNER) for path in runtime_dir.glob(f"*/{name}")]
    for directory in {path.parent for path in marks}:
        with contextlib.suppress(OSError):
            fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_stale(directory, fd):
                    remove_tree(directory)
            finally:
                os.close(fd)


def _is_stale(directory: Path, lock: int) -> bool:
    """Whether nobody can need a directory whose launcher is gone."""
    if _owner(directory) is not None:
        return not has_live_owner(directory)
    # Its launcher may be about to take the lock.
    return time.time() - os.fstat(lock).st_mtime > STALE_AFTER_S  # noqa: TID251  # file times


def remove_tree(path: Path) -> None:
    """Delete a directory whatever modes its content has."""

    def retry(function: Any, name: str, _: Any) -> None:
        with contextlib.suppress(OSError):
            Path(name).parent.chmod(0o700)
            Path(name).chmod(0o700)
            function(name)

    shutil.rmtree(path, onerror=retry)
