"""Storage as directories of a machine, or of a filesystem that all machines have.

Each has a directory of its own name, which nobody but its owner may enter; in it are the data, in a
directory that a sandbox sees and nothing else, and a lock that a sandbox holds for as long as it
lives: alone, or with others where the storage is shared. So nobody else has the data, nor deletes
them, whichever engine, host or node made the sandbox.

What is in the data was written by sandboxes: no link in it is ever followed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aenv_ray.errors import FabricUnavailable
from aenv_ray.project.storage import StorageMount, shown_size

DELETE_S: Final = 240.0
"""Calls under way may go on for two minutes in the sandbox that has a storage."""
_LOOK_S: Final = 0.2


@dataclass(frozen=True)
class LocalDirectory:
    """A storage that is there."""

    data: Path
    lock: Path
    """What a sandbox holds that has it."""


class LocalStorage:
    """The storages below a directory.

    Args:
        root: The directory; made where it is missing.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def open(self, storage: StorageMount) -> LocalDirectory:
        """Return a storage, made where it never was.

        Raises:
            FabricUnavailable: It was there before and is not here, cannot be made, or has no room.
        """
        place = self._root / storage.name
        data, lock = place / f"data-{storage.uid}", place / "lock"
        if storage.is_made and not _is_directory(data):
            raise FabricUnavailable(
                f"storage {storage.name} is not in {self._root} of this machine",
                hint="it was made on another machine, or somebody deleted it there",
            )
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_directory(place):
                raise NotADirectoryError(errno.ENOTDIR, "it is no directory", str(place))
            is_new = not _is_directory(data)
            self._check_room(storage, is_new=is_new)
            if is_new:
                data.mkdir()
            os.chmod(data, 0o777)  # whoever a sandbox runs as; nobody else comes this far
            with open(lock, "a+b", opener=_no_link):
                lock.chmod(0o666)
        except OSError as exc:
            raise FabricUnavailable(
                f"storage {storage.name} cannot be made in {self._root}: {exc.strerror}",
                hint="AENV_STORAGE_DIR names the directory of all storages",
            ) from exc
        return LocalDirectory(data, lock)

    def _check_room(self, storage: StorageMount, *, is_new: bool) -> None:
        """Refuse what the disk cannot hold: nothing keeps a directory to its size but the disk.

        One that is there is compared with the whole disk, for its data are on it already.
        """
        disk = shutil.disk_usage(self._root / storage.name)
        room, word = (disk.free, "free") if is_new else (disk.total, "in all")
        if storage.size_bytes > room:
            raise FabricUnavailable(
                f"storage {storage.name} of {shown_size(storage.size_bytes)} does not fit: the "
                f"disk of {self._root} has {room >> 20}Mi {word}",
                hint="ask for less, or let AENV_STORAGE_DIR name a directory of a larger disk",
            )

    def delete(self, storage: StorageMount, within_s: float = DELETE_S) -> None:
        """Delete a storage once no sandbox holds it; does nothing where there is none.

        Args:
            storage: Which.
            within_s: How long a sandbox that has it may take to end.

        Raises:
            FabricUnavailable: A sandbox has it still, or its files cannot be deleted.
        """
        place = self._root / storage.name
        data = place / f"data-{storage.uid}"
        if not _is_directory(place) or not _is_directory(data):
            return
        with open(place / "lock", "a+b", opener=_no_link) as lock:
            if not _take(lock.fileno(), within_s):
                raise FabricUnavailable(
                    f"storage {storage.name} is not deleted: a sandbox has it still",
                    hint="end the service that has it first",
                )
            try:
                shutil.rmtree(data, onerror=_open_and_repeat)
            except OSError as exc:
                raise FabricUnavailable(
                    f"storage {storage.name} is not deleted: {exc.filename}: {exc.strerror}",
                    hint="a container wrote as another user; delete the directory as that one, or "
                    "as root",
                ) from exc


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _take(descriptor: int, within_s: float) -> bool:
    until = time.monotonic() + within_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(_LOOK_S)
        else:
            return True


def _open_and_repeat(function: Any, path: str, problem: Any) -> None:
    """Delete what a sandbox forbade itself to delete."""
    if not isinstance(problem[1], PermissionError):
        raise problem[1]
    for directory in (os.path.dirname(path), path):
        if _is_directory(Path(directory)):
            os.chmod(directory, 0o700)
    if _is_directory(Path(path)):
        shutil.rmtree(path, onerror=_open_and_repeat)
    else:
        function(path)
