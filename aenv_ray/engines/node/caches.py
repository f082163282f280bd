"""The caches on a node's disk: what nothing uses is deleted when it is old or when they are full.

An entry is a file or directory below a cache, with a *mark* beside it, ``NAME.used``: its time is
that of the last use, its content the entry's size, and who uses the entry for long holds a shared
lock on it. An entry that is not there must be created again when it is needed.

This module imports only the standard library and `aenv_ray.files`, because the launcher imports it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, NamedTuple

from aenv_ray.files import FileLock

logger = logging.getLogger(__name__)

LEAST_AGE_S: Final = 600.0
"""An entry that was used this recently is kept: its user may be about to lock it."""
_MARK: Final = ".used"
_DELETED: Final = ".deleted-"
_BESIDE: Final = (_MARK, ".lock", ".done")
"""Ends of the names of files that belong to an entry."""


def note_use(entry: Path) -> None:
    """Note that an entry is used now; does nothing if this user cannot write to the cache."""
    mark = _mark(entry)
    with contextlib.suppress(PermissionError):
        try:
            os.utime(mark)
        except FileNotFoundError:
            os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def hold(entry: Path) -> FileLock | None:
    """Return a lock that keeps an entry until it is closed; None for what is in no cache."""
    if not _mark(entry).exists():
        return None
    with contextlib.suppress(PermissionError):
        return FileLock.try_acquire(_mark(entry), shared=True)
    return None


def collect(
    cache: Path,
    max_bytes: int,
    max_age_s: float,
    in_use: Callable[[], Collection[str]] = tuple,
) -> list[str]:
    """Delete the entries of a cache that exceed its limits, those unused for longest first.

    Entries that are locked, being built, in use or used recently are kept, so the cache can be
    larger. Processes may do this concurrently; it blocks.

    Args:
        cache: The directory of the cache.
        max_bytes: Limit for the total size of the entries.
        max_age_s: Limit for the time since the last use of an entry.
        in_use: Returns the names of entries that are used without a lock; called if something
            would be deleted.

    Returns:
        The names of the deleted entries.
    """
    for left in cache.glob(f"{_DELETED}*"):  # left by a process that was killed
        _remove(left)
    entries = _entries(cache)
    total = sum(entry.size for entry in entries)
    used: Collection[str] | None = None
    deleted = []
    for age_s, size, name in entries:
        if not _is_due(age_s, total, max_bytes, max_age_s):
            break
        used = in_use() if used is None else used
        if name not in used and _delete(cache / name):
            total -= size
            deleted.append(name)
    if deleted:
        logger.info("deleted %d unused entries of %s", len(deleted), cache)
    return deleted


def exceeds(cache: Path, max_bytes: int, max_age_s: float) -> bool:
    """Return whether `collect` would delete something, unless it is in use."""
    entries = _entries(cache)
    total = sum(entry.size for entry in entries)
    return bool(entries) and _is_due(entries[0].age_s, total, max_bytes, max_age_s)


def _is_due(age_s: float, total: int, max_bytes: int, max_age_s: float) -> bool:
    return age_s > LEAST_AGE_S and (total > max_bytes or age_s > max_age_s)


class _Entry(NamedTuple):
    """An entry of a cache."""

    age_s: float
    """Time since its last use."""
    size: int
    name: str


def _entries(cache: Path) -> list[_Entry]:
    """Return the entries of a cache, those unused for longest first."""
    now = time.time()  # noqa: TID251  # compared to file times
    found = []
    for path in cache.iterdir():
        if path.name.startswith(".") or path.name.endswith(_BESIDE):
            continue
        with contextlib.suppress(FileNotFoundError):  # another process deletes it
            mark = _mark(path)
            if not mark.exists():
                used_at = path.stat().st_mtime
                note_use(path)
                os.utime(mark, (used_at, used_at))
            found.append(_Entry(now - mark.stat().st_mtime, _size_of(path), path.name))
    return sorted(found, reverse=True)


def _size_of(entry: Path) -> int:
    """Return the bytes of an entry, which its mark remembers."""
    mark = _mark(entry)
    times = mark.stat()
    text = mark.read_text()
    if text.isdigit():
        return int(text)
    size = entry.lstat().st_blocks * 512 + sum(
        os.lstat(os.path.join(directory, name)).st_blocks * 512
        for directory, _, files in os.walk(entry)
        for name in files
    )
    mark.write_text(str(size))
    os.utime(mark, ns=(times.st_atime_ns, times.st_mtime_ns))
    return size


def _delete(entry: Path) -> bool:
    """Delete an entry and the files beside it; return False if somebody has it."""
    with contextlib.ExitStack() as locks:
        for path in (_mark(entry), entry.with_name(f"{entry.name}.lock")):
            lock = FileLock.try_acquire(path)
            if lock is None:
                return False
            locks.enter_context(lock)
        entry.with_name(f"{entry.name}.done").unlink(missing_ok=True)  # it is incomplete from here
        gone = entry.with_name(f"{_DELETED}{entry.name}")
        with contextlib.suppress(FileNotFoundError):  # another process was first
            entry.rename(gone)
        _remove(gone)
        for end in _BESIDE:
            entry.with_name(f"{entry.name}{end}").unlink(missing_ok=True)
    return True


def _remove(path: Path) -> None:
    """Remove a file or directory, as far as this user may."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _mark(entry: Path) -> Path:
    return entry.with_name(f"{entry.name}{_MARK}")
