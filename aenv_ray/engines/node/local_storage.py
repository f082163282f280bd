"""Storage as directories of a machine, or of a file system that machines share.

Each storage has a directory that only its owner may enter. It contains the data, a directory that
sandboxes see, and a lock that a sandbox holds while it runs: exclusively, or shared with others if
the storage is shared. The lock protects the data from other sandboxes and from deletion, whichever
engine, host or node started the sandbox.

Sandboxes write the data, so no link in it is ever followed.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aenv_ray.errors import FabricUnavailable
from aenv_ray.files import FileLock
from aenv_ray.project.storage import StorageMount, shown_size

DELETE_S: Final = 240.0
"""A sandbox that uses the storage may finish calls for two minutes."""


@dataclass(frozen=True)
class LocalDirectory:
    """A storage volume that exists."""

    data: Path
    lock: Path
    """Held by the sandboxes that use it."""


class LocalStorage:
    """The storage volumes below a directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def open(self, storage: StorageMount) -> LocalDirectory:
        """Return a storage volume; create it if it is new.

        Raises:
            FabricUnavailable: It is not new and is missing here, it cannot be created, or the disk
                is too small.
        """
        directory = self._root / storage.name
        data, lock = directory / f"data-{storage.uid}", directory / "lock"
        if storage.is_made and not _is_directory(data):
            raise FabricUnavailable(
                f"storage {storage.name} is not in {self._root} of this machine",
                hint="use it on the machine that created it, or restore its directory",
            )
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_directory(directory):
                raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(directory))
            is_new = not _is_directory(data)
            self._check_room(storage, is_new=is_new)
            if is_new:
                data.mkdir()
            os.chmod(data, 0o777)  # for any user of a sandbox; others cannot enter its parent
            with open(lock, "a+b", opener=_no_link):
                lock.chmod(0o666)
        except OSError as exc:
            raise FabricUnavailable(
                f"storage {storage.name} cannot be created in {self._root}: {exc.strerror}",
                hint="set AENV_STORAGE_DIR to a directory that can be written to",
            ) from exc
        return LocalDirectory(data, lock)

    def _check_room(self, storage: StorageMount, *, is_new: bool) -> None:
        """Check that the disk is large enough; nothing else limits the size of a directory.

        An existing storage is compared with the whole disk, because its data are already on it.
        """
        disk = shutil.disk_usage(self._root / storage.name)
        room, word = (disk.free, "free") if is_new else (disk.total, "in total")
        if storage.size_bytes > room:
            raise FabricUnavailable(
                f"storage {storage.name} of {shown_size(storage.size_bytes)} does not fit: the "
                f"disk of {self._root} has {room >> 20}Mi {word}",
                hint="request less, or set AENV_STORAGE_DIR to a directory of a larger disk",
            )

    def delete(self, storage: StorageMount, within_s: float = DELETE_S) -> None:
        """Delete a storage volume once no sandbox uses it; does nothing if it is missing.

        Raises:
            FabricUnavailable: A sandbox still uses it, or its files cannot be deleted.
        """
        directory = self._root / storage.name
        data = directory / f"data-{storage.uid}"
        if not _is_directory(directory) or not _is_directory(data):
            return
        try:
            lock = FileLock.acquire(directory / "lock", within_s)
        except TimeoutError:
            raise FabricUnavailable(
                f"storage {storage.name} is not deleted: a sandbox still uses it",
                hint="end the service that uses it first",
            ) from None
        with lock:
            try:
                shutil.rmtree(data, onerror=_open_and_repeat)
            except OSError as exc:
                raise FabricUnavailable(
                    f"storage {storage.name} is not deleted: {exc.filename}: {exc.strerror}",
                    hint="a container wrote these files as another user; delete the directory as "
                    "that user or as root",
                ) from exc


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _open_and_repeat(function: Any, path: str, problem: Any) -> None:
    """Make a directory that a sandbox protected writable, and delete again."""
    if not isinstance(problem[1], PermissionError):
        raise problem[1]
    for directory in (os.path.dirname(path), path):
        if _is_directory(Path(directory)):
            os.chmod(directory, 0o700)
    if _is_directory(Path(path)):
        shutil.rmtree(path, onerror=_open_and_repeat)
    else:
        function(path)
