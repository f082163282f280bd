"""What an episode leaves behind besides processes: files, System V IPC, descriptors, scheduling.

An agent can leave something for its next episode, or for the next task, that changes what happens
there. What it created in the directories that belong to the instance is removed. Whatever else it
may have changed is found, and then the instance is not used again. Everything here is bounded: an
instance with more files than `MAX_FILES` counts as not clean.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import socket
import stat
import time
from collections.abc import Collection, Iterator, Sequence, Set
from pathlib import Path
from typing import Final

from aenv_ray.runtime.system import linux

MAX_FILES: Final = 50_000
"""Maximum number of files that are checked; an instance with more is not clean."""
MAX_DEPTH: Final = 100
"""Maximum depth of directories that are checked."""
_TEMPORARY: Final = ("/tmp", "/var/tmp", "/dev/shm")
_IPC: Final = ("shm", "sem", "msg")
_WITHOUT_FILES: Final = frozenset({"proc", "sysfs", "devpts", "cgroup", "cgroup2"})
"""File systems whose entries belong to processes or to the kernel."""
_OTHERS_CAN_WRITE: Final = 0o022
_NAMED: Final = 3
"""Names in a reason; the others are counted."""

FileFacts = tuple[int, ...]
"""What identifies the state of a file. No process of a sandbox can set the change time."""


class Unchecked(Exception):
    """It cannot be determined whether an instance is clean; the message says why."""


class Leftovers:
    """The state of an instance right after its start, to which `remove` returns.

    Args:
        kept_files: Paths in the work directory that are neither removed nor checked.
        directory: The work directory, if nothing else belongs to the instance. None: the sandbox is
            the instance's own, with its temporary files and everything else that it can write to.
    """

    def __init__(self, kept_files: Sequence[str] = (), directory: str | None = None) -> None:
        self._work = directory or os.getcwd()
        self._owns_sandbox = directory is None
        self._kept = frozenset(os.path.join(self._work, path) for path in kept_files)
        self._started_ns = time.clock_gettime_ns(_COARSE_CLOCK)
        self._roots = _distinct([self._work, *(_TEMPORARY if self._owns_sandbox else ())])
        self._files: dict[str, FileFacts] | None = None
        self._times: dict[str, tuple[int, int]] = {}
        """Times of the directories at the start: an agent can choose them."""
        self._elsewhere: list[str] | None = None
        self._ipc = _ipc_objects()
        self._descriptors = frozenset(_own_descriptors())
        self._scheduling = _scheduling() if self._owns_sandbox else {}
        with contextlib.suppress(Unchecked, OSError):  # then the instance is never clean
            self._files = self._scan(self._times)
        self._has_queues = self._owns_sandbox and not _forbids_message_queues()

    def remove(self) -> list[str]:
        """Remove the files that were created since the start; return what else has changed.

        No process of the agent may run.
        """
        try:
            reasons = self._remove_new_files()
            if self._has_queues:
                reasons.append(
                    "this kernel cannot forbid POSIX message queues, which are not listed"
                )
            if self._owns_sandbox:
                reasons += self._changed_elsewhere()
                if _ipc_objects() != self._ipc:
                    reasons.append("System V IPC objects are left")
        except (Unchecked, OSError) as exc:
            return [str(exc)]
        return reasons

    def open_descriptors(self) -> list[str]:
        """Return files and listening sockets that this process has open since its start."""
        if not self._owns_sandbox:
            return []
        opened = set(_own_descriptors()) - self._descriptors
        return [f"open in the runtime: {_some(opened)}"] if opened else []

    def scheduling(self) -> list[str]:
        """Return the processes of the start of which a thread now has another priority or CPUs.

        Any process of the sandbox can take both from this one, which cannot take them back.
        """
        now = _scheduling() if self._owns_sandbox else {}
        changed = {
            str(pid) for pid, first in self._scheduling.items() if not now.get(pid, first) <= first
        }
        return [f"scheduling of process {_some(changed)} has changed"] if changed else []

    # --- the instance's own directories -------------------------------------------------------

    def _scan(self, times: dict[str, tuple[int, int]] | None = None) -> dict[str, FileFacts]:
        """Return the roots and all files below them; note the times of directories in `times`.

        Raises:
            Unchecked: There are too many.
        """
        found: dict[str, FileFacts] = {}
        for root in self._roots:
            top = (root, os.stat(root))  # before the walk, which may open it
            for path, status in itertools.chain([top], _walk(root, self._kept, owns=True)):
                found[path] = _facts(path, status)
                if times is not None and stat.S_ISDIR(status.st_mode):
                    times[path] = status.st_atime_ns, status.st_mtime_ns
                if len(found) > MAX_FILES:
                    raise Unchecked(f"{root} has more than {MAX_FILES} files")
        return found

    def _remove_new_files(self) -> list[str]:
        if self._files is None:
            raise Unchecked(f"the files of the start were unreadable, or more than {MAX_FILES}")
        found = self._scan()
        for path in sorted(found.keys() - self._files.keys(), key=len, reverse=True):
            (os.rmdir if stat.S_ISDIR(found[path][0]) else os.unlink)(path)
        reasons = []
        if missing := self._files.keys() - found.keys():
            reasons.append(f"deleted: {_some(missing)}")
        changed = {path for path, facts in self._files.items() if found.get(path) != facts}
        if changed := changed - missing:
            reasons.append(f"changed: {_some(changed)}")
        for path, times in self._times.items():
            with contextlib.suppress(OSError):  # it is another user's, or missing
                os.utime(path, ns=times, follow_symlinks=False)
        return reasons

    # --- everything else that the sandbox can write to ------------------------------------------

    def _changed_elsewhere(self) -> list[str]:
        """Return what has changed in places that only a careless image lets an instance change."""
        if self._elsewhere is None:
            self._elsewhere = self._writable_elsewhere()
        changed = []
        for path in self._elsewhere:
            with contextlib.suppress(FileNotFoundError):  # its directory has changed
                if os.lstat(path).st_ctime_ns >= self._started_ns:
                    changed.append(path)
        return [f"changed: {_some(changed)}"] if changed else []

    def _writable_elsewhere(self) -> list[str]:
        """Return files and directories that the agent could change, apart from the roots.

        They are those that the agent could change at the start, and those that were created in
        them since, which shows as a change of their directory. So one listing is enough.
        """
        skipped = {_identity(root) for root in self._roots} | {_identity("/proc")}
        user = os.getuid()
        found, looked_at = [], 0
        for mount in _writable_mounts():
            if _identity(mount) in skipped:
                continue
            entries = _walk(mount, self._kept, skipped=skipped)
            for path, status in (*((mount, os.lstat(mount)),), *entries):
                looked_at += 1
                if looked_at > MAX_FILES:
                    raise Unchecked(f"more than {MAX_FILES} files are in writable file systems")
                is_open = status.st_mode & _OTHERS_CAN_WRITE and not stat.S_ISLNK(status.st_mode)
                if (status.st_uid == user or is_open) and not stat.S_ISCHR(status.st_mode):
                    found.append(path)
        return found


_COARSE_CLOCK: Final = getattr(time, "CLOCK_REALTIME_COARSE", 5)
"""The clock of change times, which is up to 4 ms behind that of `time.time`."""


def _walk(
    root: str,
    kept: frozenset[str],
    *,
    skipped: Set[tuple[int, int]] = frozenset(),
    owns: bool = False,
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield everything below a directory on its file system.

    Args:
        root: The directory.
        kept: Paths that are left out, with what is below them.
        skipped: Directories, by identity, that are left out.
        owns: The directories are the instance's: closed ones are opened.

    Raises:
        Unchecked: Directories are nested too deeply, or one cannot be read.
    """
    device = os.lstat(root).st_dev
    pending = [(root, 0)]
    while pending:
        directory, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise Unchecked(f"directories in {root} are nested more than {MAX_DEPTH} deep")
        try:
            names = _names(directory, may_open=owns)
        except OSError as exc:
            if not owns:
                continue  # not ours: what it holds cannot be changed from here either
            raise Unchecked(f"{directory} cannot be read: {exc.strerror}") from exc
        for name in names:
            path = os.path.join(directory, name)
            if path in kept:
                continue
            status = os.lstat(path)
            if status.st_dev != device or (status.st_dev, status.st_ino) in skipped:
                continue
            yield path, status
            if stat.S_ISDIR(status.st_mode):
                pending.append((path, depth + 1))


def _names(directory: str, *, may_open: bool) -> list[str]:
    try:
        return os.listdir(directory)
    except PermissionError:
        if not may_open:
            raise
        os.chmod(directory, 0o700)
        return os.listdir(directory)


def _facts(path: str, status: os.stat_result) -> FileFacts:
    facts = (status.st_mode, status.st_ino, status.st_uid, status.st_gid)
    if stat.S_ISDIR(status.st_mode):
        return (*facts, _attributes(path))  # its entries are compared, and its times set back
    return (*facts, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _attributes(path: str) -> int:
    """Return what tells the extended attributes of a directory from others."""
    found: dict[str, bytes] = {}
    if hasattr(os, "listxattr"):
        with contextlib.suppress(OSError):  # the file system has none
            for name in os.listxattr(path, follow_symlinks=False):
                found[name] = os.getxattr(path, name, follow_symlinks=False)
    return hash(tuple(sorted(found.items())))


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _distinct(paths: Sequence[str]) -> list[str]:
    """Return the directories that exist, each once, under its first name."""
    found: dict[tuple[int, int], str] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            found.setdefault(_identity(path), path)
    return list(found.values())


def _writable_mounts() -> list[str]:
    """Return the mount points of file systems that can be written to."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        words, kind = before.split(), after.split()
        is_writable = "ro" not in words[5].split(",") and "ro" not in kind[2].split(",")
        point = words[4].encode().decode("unicode_escape")
        if is_writable and kind[0] not in _WITHOUT_FILES and os.path.isdir(point):
            found.append(point)
    return found


# --- objects that are not files ------------------------------------------------------------------


def _ipc_objects() -> list[str]:
    """Return the System V IPC objects of this namespace."""
    found: list[str] = []
    for name in _IPC:
        with contextlib.suppress(FileNotFoundError):  # a kernel without them
            found += Path(f"/proc/sysvipc/{name}").read_text().splitlines()[1:]
    return found


def _forbids_message_queues() -> bool:
    """Allow no POSIX message queues, which could be left behind; return whether that worked."""
    if hasattr(resource, "RLIMIT_MSGQUEUE"):
        try:
            resource.setrlimit(resource.RLIMIT_MSGQUEUE, (0, 0))
        except (ValueError, OSError):  # gVisor refuses
            return False
    return True


def _own_descriptors() -> Iterator[str]:
    """Yield the files and the listening sockets that this process has open."""
    with contextlib.suppress(FileNotFoundError):  # a system without /proc
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # it was that of the listing
                target = os.readlink(f"/proc/self/fd/{name}")
                is_file = target.startswith("/") and not target.startswith(("/proc/", "/dev/"))
                if is_file or (target.startswith("socket:") and _is_listening(int(name))):
                    yield target


def _scheduling() -> dict[int, frozenset[object]]:
    """Return what the scheduler knows of the threads of each process."""
    found: dict[int, frozenset[object]] = {}
    with contextlib.suppress(FileNotFoundError):  # a system without /proc
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            facts: set[object] = set()
            with contextlib.suppress(OSError):  # it has ended
                for thread in map(int, os.listdir(f"/proc/{pid}/task")):
                    with contextlib.suppress(ProcessLookupError):
                        facts.add(_scheduling_of(thread))
            with contextlib.suppress(OSError):  # a kernel that does not group sessions
                facts.add(Path(f"/proc/{pid}/autogroup").read_text())
            found[int(pid)] = frozenset(facts)
    return found


def _scheduling_of(thread: int) -> tuple[object, ...]:
    is_idle_io = False
    with contextlib.suppress(OSError):  # gVisor has no such classes
        is_idle_io = linux.io_class(thread) == linux.IOPRIO_CLASS_IDLE
    return (
        os.sched_getscheduler(thread),
        os.getpriority(os.PRIO_PROCESS, thread),
        frozenset(os.sched_getaffinity(thread)),
        is_idle_io,
    )


def _is_listening(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _some(names: Collection[str]) -> str:
    """Return the first names, and how many there are if these are not all."""
    shown = ", ".join(sorted(names)[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
