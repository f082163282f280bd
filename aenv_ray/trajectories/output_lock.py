"""The lock on an output, so that no second run writes to it, or replaces it, at the same time."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Final

from aenv_ray.errors import ConfigError
from aenv_ray.files import FileLock

LOCK_NAME: Final = ".lock"
"""In a directory of shards while a run writes to it."""
logger = logging.getLogger("aenv_ray")
_PATIENCE_S: Final = 2.0
"""A process that was killed holds its locks until the kernel has ended all of its threads."""
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

    Args:
        output: An existing file, or an existing directory of shards.

    Raises:
        ConfigError: Another process, sampling or pool has it.
    """

    def __init__(self, output: Path) -> None:
        self._output = output
        self._is_directory = output.is_dir()
        self._path = (output / LOCK_NAME if self._is_directory else output).absolute()
        self._lock = self._acquired()

    def follow(self) -> None:
        """Lock the file that has replaced the locked one.

        Raises:
            ConfigError: Another process was faster; it has not changed the file.
        """
        replaced, self._lock = self._lock, self._acquired()
        _release(replaced)

    def close(self) -> None:
        """Release the lock; a second time does nothing."""
        lock, self._lock = self._lock, None
        if lock is not None and self._is_directory:
            with contextlib.suppress(OSError):  # the directory may be gone, or another one
                if os.path.samestat(os.fstat(lock.fileno()), self._path.stat()):
                    self._path.unlink()
        _release(lock)

    def _acquired(self) -> FileLock | None:
        try:
            lock = FileLock.acquire(self._path, _PATIENCE_S)
        except TimeoutError:
            raise ConfigError(
                f"{self._output} is being written by another process, sampling or pool",
                hint="wait until it has ended, or choose another path; the processes of a trainer "
                "can share a directory",
            ) from None
        except OSError as exc:
            logger.warning(
                "%s cannot be locked: %s; let no other run write to it",
                self._output, exc.strerror,
            )  # fmt: skip
            return None
        _held.add(lock)
        return lock


def _release(lock: FileLock | None) -> None:
    if lock is not None:
        _held.discard(lock)
        lock.close()
