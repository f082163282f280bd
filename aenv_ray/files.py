"""Files: atomic writes, advisory locks, and short reads of ``/proc``.

This module imports only the standard library, without asyncio, because the small processes of a
node (launcher, janitor) import it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

_START_BYTES: Final = 16_384
_OWN_MODE: Final = 0o600
_POLL_S: Final = 0.02
"""How often a waiting process tries a lock again; a blocking `flock` could not be cancelled."""


def write_atomically(
    path: Path, content: bytes | str, *, mode: int | None = 0o600, durable: bool = False
) -> None:
    """Replace a file in one step: readers see the old content or the new, never a part.

    Args:
        path: Its directory must exist.
        content: Text is written as UTF-8.
        mode: See `replacing`.
        durable: See `replacing`.

    Raises:
        OSError: The file cannot be written; what was there is unchanged and no partial file is
            left.
    """
    left = memoryview(content.encode() if isinstance(content, str) else content)
    with replacing(path, mode=mode, durable=durable) as descriptor:
        while left:
            left = left[os.write(descriptor, left) :]


@contextlib.contextmanager
def replacing(path: Path, *, mode: int | None = 0o600, durable: bool = False) -> Iterator[int]:
    """Replace a file in one step with what the block writes to the descriptor that it gets.

    If the block raises, what was there is unchanged and no partial file is left.

    Args:
        path: Its directory must exist.
        mode: Permissions of the new file, regardless of the umask. None: those of the file that is
            replaced; without one, what the umask leaves of 0666.
        durable: Also survive a crash of the machine (``fsync`` before the replacement).

    Raises:
        OSError: The file cannot be written; likewise.
    """
    created = _OWN_MODE
    if mode is None:
        try:
            mode = path.stat().st_mode & 0o777
        except FileNotFoundError:
            mode = created = 0o666
    partial = f"{path.parent}/.{path.name}.{os.urandom(6).hex()}"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, created)
    try:
        try:
            yield descriptor
            if mode != created:
                os.fchmod(descriptor, mode)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def make_private(path: Path, *, close: bool = False) -> None:
    """Create a directory, with its missing parents, that only this user can enter; idempotent.

    Args:
        path: The directory; one that exists stays as it is.
        close: Close an existing directory of this user to others, too.

    Raises:
        OSError: It cannot be created.
    """
    for directory in (*reversed(path.parents), path):
        with contextlib.suppress(FileExistsError):
            if not directory.is_dir():
                directory.mkdir(mode=0o700)
    status = path.stat()
    if close and status.st_uid == os.geteuid() and status.st_mode & 0o077:
        path.chmod(0o700)


class FileLock:
    """A held advisory lock on a file (``flock``).

    It ends with `close`, with the ``with`` block, or with the process that holds it. A file that
    its holder removes is created again by the next process that locks it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def try_acquire(cls, path: Path, *, shared: bool = False) -> Self | None:
        """Return the lock, or None if another holder is in the way.

        Args:
            path: Created if missing, with mode 0600; its directory must exist.
            shared: Compatible with other shared locks, not with exclusive ones.

        Raises:
            OSError: The file cannot be opened.
        """
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return None
            except BaseException:
                os.close(descriptor)
                raise
            if _is_at(path, descriptor):
                return cls(descriptor)
            os.close(descriptor)  # its last holder removed the file between the two calls

    @classmethod
    def acquire(cls, path: Path, deadline_s: float, *, shared: bool = False) -> Self:
        """Wait for the lock; blocks the thread.

        Raises:
            TimeoutError: It was not free within `deadline_s`; the message names the file.
            OSError: The file cannot be opened.
        """
        until = time.monotonic() + deadline_s
        while (lock := cls.try_acquire(path, shared=shared)) is None:
            if time.monotonic() >= until:
                raise _timed_out(path, deadline_s)
            time.sleep(_POLL_S)
        return lock

    @classmethod
    async def acquire_async(cls, path: Path, deadline_s: float, *, shared: bool = False) -> Self:
        """Wait for the lock without blocking the event loop.

        Cancelling leaves nothing locked.

        Raises:
            TimeoutError: It was not free within `deadline_s`; the message names the file.
            OSError: The file cannot be opened.
        """
        import asyncio

        until = time.monotonic() + deadline_s
        while (lock := cls.try_acquire(path, shared=shared)) is None:
            if time.monotonic() >= until:
                raise _timed_out(path, deadline_s)
            await asyncio.sleep(_POLL_S)
        return lock

    def fileno(self) -> int:
        """Return the descriptor that holds the lock, for example to pass it to a child."""
        return self._descriptor

    def close(self) -> None:
        """Release the lock; a second time does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_unlocked(directory: Path) -> None:
    """Remove the files of a directory that no process holds a lock on.

    Raises:
        OSError: The directory cannot be read or changed.
    """
    for path in directory.iterdir():
        lock = FileLock.try_acquire(path)
        if lock is not None:
            with lock:
                path.unlink(missing_ok=True)


def is_locked(path: Path) -> bool:
    """Return whether a live process holds the lock of a file; False if there is no file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return is_held(descriptor)
    finally:
        os.close(descriptor)


def is_held(descriptor: int) -> bool:
    """Return whether a live process holds the lock of an open file, which may have been removed.

    If none does, the caller has the lock until it closes the file.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _is_at(path: Path, descriptor: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    return False


def _timed_out(path: Path, deadline_s: float) -> TimeoutError:
    return TimeoutError(f"the lock {path} was not free within {deadline_s:g} s")


def read_start(path: str) -> bytes:
    """Return the first 16 KiB of a file, such as one in ``/proc``; empty if it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, _START_BYTES)
    except OSError:  # the process has ended
        return b""
    finally:
        os.close(fd)
