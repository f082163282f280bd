"""Loads a project in its template, and detects what its forks could not share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aenv_ray.runtime.api.loader import load_project
from aenv_ray.runtime.system.reaper import children_of_main_thread


class TrackingEnviron(os._Environ):  # type: ignore[type-arg]  # generic only in the stubs
    """`os.environ` and `os.environb` that record which variables the project reads."""

    reads: set[str] = set()  # noqa: RUF012  # one process, one environment

    def __getitem__(self, key: str | bytes) -> Any:
        self.reads.add(os.fsdecode(key))
        return super().__getitem__(key)  # raises for the wrong type of key

    def __iter__(self) -> Any:
        self.reads.add("*")
        return super().__iter__()


@dataclass(frozen=True)
class OpenedFile:
    """A file or directory that the project opened when it was loaded."""

    fd: int
    flags: int
    offset: int

    def reopen(self) -> None:
        """Open it again, as it was, under the same number.

        A fork inherits the position with the descriptor: when one instance reads, it would move
        for all others.

        Raises:
            OSError: It cannot be opened.
        """
        fd = os.open(f"/proc/self/fd/{self.fd}", self.flags & ~os.O_NOFOLLOW)
        try:
            os.lseek(fd, self.offset, os.SEEK_SET)
            os.dup2(fd, self.fd, os.get_inheritable(self.fd))
        finally:
            os.close(fd)


def preload(project: str) -> dict[str, Any]:
    """Load a project, and report whether instances can be forked from this process.

    Returns:
        ``bare_reason``: why they cannot, or empty; and ``env_reads``, see `variables_read`.

    Raises:
        ProjectLoadError: The code does not load.
    """
    special, files, shared = _special_fds(), opened_files(), _shared_memory()
    TrackingEnviron.reads.clear()
    for environ in (os.environ, os.environb):
        environ.__class__ = TrackingEnviron
    try:
        load_project(project)
    finally:
        for environ in (os.environ, os.environb):
            environ.__class__ = os._Environ
    reason = ""
    if threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:
        reason = "its code starts threads when it is imported"
    elif children_of_main_thread():
        reason = "its code starts processes when it is imported"
    elif opened := _special_fds() - special:
        kinds = sorted({target.partition(":")[0] for target in opened})
        reason = f"its code opens {', '.join(kinds)} when it is imported"
    elif not _can_be_reopened(opened_files() - files):
        reason = "its code opens a file that instances would share when it is imported"
    elif _shared_memory() - shared:
        reason = "its code maps memory that processes share when it is imported"
    return {"bare_reason": reason, "env_reads": variables_read()}


def variables_read() -> list[str]:
    """Return the variables that the project read while it was loaded; ``*`` stands for all."""
    return sorted(TrackingEnviron.reads)


def opened_files() -> set[int]:
    """Return the descriptors of this process that are files, directories or devices.

    Sockets, pipes and namespaces are none, so an instance does not get those of its template.
    """
    return {fd for fd, target in _descriptors().items() if target.startswith("/")}


def with_position(fds: Iterable[int]) -> list[OpenedFile]:
    """Return what is open under these descriptors and has a position: no devices.

    Raises:
        OSError: One is neither a file, nor a directory, nor a device.
    """
    found = []
    for fd in fds:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if not flags & os.O_PATH and not stat.S_ISCHR(os.fstat(fd).st_mode):
            found.append(OpenedFile(fd, flags, os.lseek(fd, 0, os.SEEK_CUR)))
    return found


def _can_be_reopened(fds: Iterable[int]) -> bool:
    """Whether each instance can open these files for itself, and sees no writes of another."""
    try:
        for file in with_position(fds):
            if file.flags & os.O_ACCMODE != os.O_RDONLY:
                return False
            file.reopen()
    except OSError:
        return False
    return True


def _shared_memory() -> set[bytes]:
    """Return the addresses of writable memory that forks share with this process."""
    lines = [line.split(b" ", 2) for line in Path("/proc/self/maps").read_bytes().splitlines()]
    return {address for address, mode, _ in lines if mode[1:2] == b"w" and mode[3:] == b"s"}


def _special_fds() -> set[str]:
    """Return the open sockets and pipes, identified by their inode numbers."""
    return {found for found in _descriptors().values() if found.startswith(("socket:", "pipe:"))}


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found
