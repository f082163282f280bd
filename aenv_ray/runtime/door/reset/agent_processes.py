"""What a reward needs before it runs: an end to the agent's processes, and room for its own.

An agent could otherwise keep a reward from running with processes, memory or files, and so void an
episode in which it fails (invariant 14).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from aenv_ray.runtime.system.reaper import children_of_main_thread

RESERVED_MEMORY_BYTES: Final = 8 * 1024 * 1024
"""Address space of this process: it counts towards its limit, but takes no memory."""
RESERVED_DISK_BYTES: Final = 128 * 1024
_END_S: Final = 5.0
"""How long the processes may take to end; one that waits for a disk takes longer."""
_PAUSE_S: Final = 0.002
_ALL: Final = -1
"""All processes but this one."""

ProcessId = tuple[int, str]
"""Pid and start time."""
ProgramId = tuple[int, int, str]
"""Device and inode of a program's file, and the address of its stack, which is random. Of a process
that may not be examined, such as another user's: zeros, and its name, which servers change less
often than their command lines."""


class AgentProcesses:
    """The processes that an agent has started, in a sandbox that this process has to itself.

    The processes that exist at the first tool call or command belong to the environment: its code
    started them when it was imported, or in a function. One that has executed another program since
    belongs to the agent, which may have told a shell to do so.

    Args:
        may_be_reset: Note the processes that exist now, for `end_episode`.
        owns_namespace: All processes in the pid namespace of this process are the sandbox's.
    """

    def __init__(self, *, may_be_reset: bool = False, owns_namespace: bool = False) -> None:
        self._owner = os.getpid() if owns_namespace else 1
        """The process that may signal all others at once."""
        self._first = _programs() if may_be_reset else {}
        """The processes that existed at the start; they outlive a reset."""
        self._spared: dict[ProcessId, ProgramId | None] | None = None
        self._memory: mmap.mmap | None = None
        self._files: list[int] = []

    def note(self) -> None:
        """Note at the first call of the agent which processes exist."""
        if self._spared is None:
            self._spared = _programs()

    def expect(self) -> None:
        """Prepare for a call of the agent: reserve room; at the first one, note what exists."""
        self.note()
        if self._memory is None:
            with contextlib.suppress(OSError):  # there is no room left to reserve
                self._memory = mmap.mmap(
                    -1, RESERVED_MEMORY_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                )
                self._reserve_disk(".")
                if os.stat("/tmp").st_dev != os.stat(".").st_dev:
                    self._reserve_disk("/tmp")

    def _reserve_disk(self, directory: str) -> None:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._files.append(fd)
        os.posix_fallocate(fd, 0, RESERVED_DISK_BYTES)

    def end(self) -> None:
        """Kill the processes that the agent has started, and give the reserved room free."""
        if self._spared is not None:
            self._kill_all_but(self._spared)
        self.give_room()

    def end_episode(self) -> int:
        """Kill all processes that were started since the start; return how many did not end."""
        self._kill_all_but(self._first)
        self.give_room()
        self._spared = None
        return len(_all_but(self._first))

    def give_room(self) -> None:
        """Give the reserved room free."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        while self._files:
            os.close(self._files.pop())

    def _kill_all_but(self, spared: Mapping[ProcessId, ProgramId | None]) -> None:
        """Stop all others before killing them, so that they cannot fork faster than they die."""
        deadline = time.monotonic() + _END_S
        stopped: set[ProcessId] = set()
        has_all = os.getpid() == self._owner and _has_children()
        try:
            if has_all:  # at once, which no fork escapes; not beside the processes of others
                _signal(_ALL, signal.SIGSTOP)
            while found := _all_but(spared) - stopped:
                for pid, _ in found:
                    _signal(pid, signal.SIGSTOP)
                stopped |= found
                if time.monotonic() > deadline:
                    break
            for pid, _ in stopped:
                _signal(pid, signal.SIGKILL)
        finally:  # also if a deadline interrupts this
            if has_all:
                _signal(_ALL, signal.SIGCONT)
        killed = {pid for pid, _ in stopped}
        while stopped.intersection(_others()) or killed.intersection(children_of_main_thread()):
            if time.monotonic() > deadline:
                return
            time.sleep(_PAUSE_S)  # the main thread reaps orphans, which count until then


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _all_but(spared: Mapping[ProcessId, ProgramId | None]) -> set[ProcessId]:
    """Return the other processes without those of `spared` that still run the same program."""
    return {
        process
        for process in _others()
        if process not in spared or spared[process] != _program(process[0])
    }


def _programs() -> dict[ProcessId, ProgramId | None]:
    return {process: _program(process[0]) for process in _others()}


def _program(pid: int) -> ProgramId | None:
    """Return what tells the program of a process from the next one; None if it has ended."""
    with contextlib.suppress(OSError):
        file = os.stat(f"/proc/{pid}/exe")
        return file.st_dev, file.st_ino, _fields(pid)[25]
    with contextlib.suppress(OSError):
        return 0, 0, Path(f"/proc/{pid}/comm").read_text(errors="replace")
    return None


def _fields(pid: int) -> list[str]:
    """Return the fields of a process after its name, which may contain anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _others() -> list[ProcessId]:
    """Return the other processes that run in this pid namespace.

    Process 1 of a pod belongs to the runtime, and so does a process without a parent here, which
    was started from outside, such as the bridge of a container with its own kernel.
    """
    if not _has_children():
        return []
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (1, os.getpid()):
            with contextlib.suppress(OSError, IndexError):
                words = _fields(int(name))
                state, parent, threads, started = words[0], words[1], words[17], words[19]
                # The state is that of the main thread, which may end long before the others.
                if (state not in "ZX" or int(threads) > 1) and parent != "0":
                    found.append((int(name), started))
    return found


def _has_children() -> bool:
    """Whether this process has children, orphans included: one system call."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
