"""The lock on an output, so that no second run writes to it, or replaces it, at the same time."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Final, Self

from aenv_ray.errors import ConfigError
from aenv_ray.files import FileLock

LOCK_NAME: Final = ".lock"
"""In a directory of shards while a run writes to it."""
logger = logging.getLogger("aenv_ray")
_PATIENCE_S: Final = 2.0
"""A process that was killed holds its locks until the kernel has ended all of its threads."""
_ENDING_S: Final = 15.0
"""A run of this process that was left, for example by ``break``, ends its episodes first."""
_held: set[FileLock] = set()
"""The locks of this process."""


def _drop_in_child() -> None:
    """Close inherited descriptors: a forked child that outlives its parent would keep the locks."""
    for lock in tuple(_held):
        lock.close()
    _held.clear()


os.register_at_fork(after_in_child=_drop_in_child)


class OutputLock:
    """The exclusive right to write to an output; it ends with `close`, or with this process.

    Where files cannot be locked, which is logged, nothing protects the output.
    """

    def __init__(self, output: Path, lock: FileLock | None) -> None:
        self._output = output
        self._is_directory = output.is_dir()
        self._path = _path(output)
        self._lock = lock

    @classmethod
    def acquire(cls, output: Path) -> Self:
        """Lock an existing file, or an existing directory of shards; may block for 2 s.

        Raises:
            ConfigError: Another process, sampling or pool has it.
        """
        return cls(output, _acquired(output))

    @classmethod
    async def acquire_async(cls, output: Path) -> Self:
        """As `acquire`, without blocking the event loop, on which a run that was left may end.

        Raises:
            ConfigError: Another process, sampling or pool has it.
        """
        path, lock = _path(output), None
        patience_s = _ENDING_S if _is_held_here(path) else _PATIENCE_S
        try:
            lock = _noted(await FileLock.acquire_async(path, patience_s))
        except OSError as exc:
            _tell(output, exc)
        return cls(output, lock)

    def follow(self) -> None:
        """Lock the file that has replaced the locked one.

        Raises:
            ConfigError: Another process was faster; it has not changed the file.
        """
        replaced, self._lock = self._lock, _acquired(self._output)
        _release(replaced)

    def close(self) -> None:
        """Release the lock; a second time does nothing."""
        lock, self._lock = self._lock, None
        if lock is not None and self._is_directory:
            with contextlib.suppress(OSError):  # the directory may be gone, or another one
                if os.path.samestat(os.fstat(lock.fileno()), self._path.stat()):
                    self._path.unlink()
        _release(lock)


def _path(output: Path) -> Path:
    """Return the absolute path of the file that is locked."""
    return (output / LOCK_NAME if output.is_dir() else output).absolute()


def _acquired(output: Path) -> FileLock | None:
    try:
        return _noted(FileLock.acquire(_path(output), _PATIENCE_S))
    except OSError as exc:
        _tell(output, exc)
        return None


def _noted(lock: FileLock) -> FileLock:
    _held.add(lock)
    return lock


def _release(lock: FileLock | None) -> None:
    if lock is not None:
        _held.discard(lock)
        lock.close()


def _is_held_here(path: Path) -> bool:
    """Whether this process has the lock of a file."""
    try:
        found = path.stat()
    except OSError:
        return False
    return any(os.path.samestat(os.fstat(lock.fileno()), found) for lock in tuple(_held))


def _tell(output: Path, failure: OSError) -> None:
    """Log that an output cannot be locked.

    Raises:
        ConfigError: It was not free in time.
    """
    if isinstance(failure, TimeoutError):
        is_here = _is_held_here(_path(output))
        who = "sampling or pool of this process" if is_here else "process, sampling or pool"
        raise ConfigError(
            f"{output} is being written by another {who}",
            hint="wait until it has ended, choose another path, or copy it and resume the copy; "
            "the processes of a trainer can share a directory",
        ) from None
    logger.warning(
        "%s cannot be locked: %s; let no other run write to it", output, failure.strerror
    )
