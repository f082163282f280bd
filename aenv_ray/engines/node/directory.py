"""The directory that a Ray node's engines share: sockets, locks, keys, records, logs.

Each engine has one for each node, named by a hash of its scope because a socket path holds only 108
bytes. It is private to its user and outlives the processes that use it. It is removed when its
owner, the node's raylet, is gone.

This module imports only the standard library and `aenv_ray.errors`, because the launcher and the
janitor import it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import time
from pathlib import Path
from typing import Any, Final

from aenv_ray.errors import ConfigError
from aenv_ray.files import FileLock, write_atomically

STALE_AFTER_S: Final = 60.0
"""A directory that names no owner is removed when nobody has locked it for this long."""
LOCK: Final = "lock"
"""Held by a launcher for as long as it runs."""
_OWNER: Final = "owner"
_RECORDS: Final = "records"
_SOCKET_PATH_BYTES: Final = 107


def short_name(instance_id: str) -> str:
    """Return the file name of an instance's socket, log and work directory."""
    return hashlib.sha256(instance_id.encode()).hexdigest()[:20]


def node_path(runtime_dir: Path, scope: str) -> Path:
    """Return the path of a scope's directory, whether it exists or not."""
    return runtime_dir / hashlib.sha256(scope.encode()).hexdigest()[:10]


def node_directory(runtime_dir: Path, scope: str) -> Path:
    """Return the directory of a scope (a Ray node, as one engine sees it); creates it if missing.

    Raises:
        ConfigError: It belongs to another user, or its path is too long for a socket.
    """
    directory = node_path(runtime_dir, scope)
    if len(str(directory)) + len("/s/") + 20 > _SOCKET_PATH_BYTES:
        raise ConfigError(
            f"runtime directory {runtime_dir} is too long for a Unix socket",
            hint="set AENV_RUNTIME_DIR to a shorter path",
        )
    for path in (runtime_dir, directory):
        path.mkdir(mode=0o711, parents=True, exist_ok=True)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise ConfigError(
                f"{path} belongs to another user",
                hint="set AENV_RUNTIME_DIR to a directory that you own",
            )
    return directory


def set_owner(directory: Path, pid: int) -> None:
    """Record the process with which a directory becomes useless; the first caller decides."""
    path = directory / _OWNER
    if not path.exists():
        write_atomically(path, json.dumps([pid, _started_at(pid)]))


def has_live_owner(directory: Path) -> bool:
    """Return whether the process that `set_owner` recorded runs; False when none is recorded."""
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
        pass  # a process of another user
    return True


def _started_at(pid: int) -> str:
    """Return what tells a process from a later one with the same pid; empty without ``/proc``."""
    with contextlib.suppress(OSError, IndexError):
        # The name, in parentheses, may hold any character; the start is the 20th field after it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def vacate(directory: Path) -> None:
    """Remove what a launcher that exits no longer needs; the caller holds `LOCK`.

    While the owner runs, three things stay: the hosts' records, the owner, and the lock itself,
    because removing it would let two launchers run at once.
    """
    if not has_live_owner(directory):
        remove_tree(directory)
        return
    for path in directory.iterdir():
        if path.name in (_RECORDS, _OWNER, LOCK):
            continue
        if path.is_dir():
            remove_tree(path)
        else:
            path.unlink(missing_ok=True)


def remove_stale(runtime_dir: Path) -> None:
    """Remove the directories of nodes that are gone, for example after a SIGKILL."""
    marks = [path for name in (LOCK, _OWNER) for path in runtime_dir.glob(f"*/{name}")]
    for directory in {path.parent for path in marks}:
        with contextlib.suppress(OSError):
            lock = FileLock.try_acquire(directory / LOCK)
            if lock is not None:
                with lock:
                    if _is_stale(directory, lock):
                        remove_tree(directory)


def _is_stale(directory: Path, lock: FileLock) -> bool:
    if _owner(directory) is not None:
        return not has_live_owner(directory)
    # Its launcher may be about to take the lock.
    age_s = time.time() - os.fstat(lock.fileno()).st_mtime  # noqa: TID251  # compared to file times
    return age_s > STALE_AFTER_S


def remove_tree(path: Path) -> None:
    """Delete a directory, whatever the modes of its content."""

    def retry(function: Any, name: str, _: Any) -> None:
        with contextlib.suppress(OSError):
            Path(name).parent.chmod(0o700)
            Path(name).chmod(0o700)
            function(name)

    shutil.rmtree(path, onerror=retry)
