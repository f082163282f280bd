"""Finds sandboxes that take more of the node than they may: memory as a whole, and process ids.

The limits that the kernel enforces for a process (`aenv_ray.runtime.fork.jail.set_limits`) do not
cover shared memory, memfds, or what many processes use together. A control group for each sandbox
does (`aenv_ray.engines.process.cgroups`), but it needs a delegated hierarchy, and does not protect
the node as a whole. So the launcher looks, and ends offenders:

- A look costs two short reads while the node's memory hardly changes. Otherwise, and now and then,
  it reads one line for each process of the node, for at most `MOST_CPU` of one core.
- A sandbox is measured exactly only if its processes may exceed its limit, and only if they ran
  since the last time: what it stores in memory files, pipes and sockets appears in no process.

The standard library, `aenv_ray.errors` and `aenv_ray.files` alone, because the launcher imports it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys
import termios
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from aenv_ray.errors import InsideCause
from aenv_ray.files import read_start

STEP_BYTES: Final = 32 << 20
"""A look is thorough once the node's used or shared memory has grown by this."""
LOOK_AGAIN_S: Final = 10.0
"""A look is thorough after this long in any case."""
MOST_CPU: Final = 0.05
"""Share of one core that thorough looks may take."""
DEFAULT_SHARE: Final = 0.5
"""The share of the node's memory that limits a sandbox whose project sets none."""
LOW_MEMORY: Final = 0.08
"""The largest sandbox is ended when less of the node's memory is available than this share: Ray
begins to end its own processes at 0.05."""
MOST_IDS: Final = 0.75
"""The sandbox with most processes is ended when the node has used this share of its ids."""
FAIR_PROCESSES: Final = 256
"""A sandbox with fewer processes and threads is not ended for the node's want of ids."""
_HIDDEN: Final = ("/memfd:", "/dev/zero (deleted)", "/SYSV")
"""Names of shared memory that is not a file of the sandbox's own tmpfs."""
_CLOSE_S: Final = 0.05
"""Longest close of a sandbox's socket."""
_PIDFD_GETFD: Final = 438
_SO_MEMINFO: Final = 55
_MEMINFO: Final = struct.Struct("6I")
"""SO_MEMINFO of a socket: received, its limit, being sent, its limit, reserved, queued to be
sent."""
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_CGROUP: Final = Path("/sys/fs/cgroup")


class Watched(NamedTuple):
    """A sandbox to look after."""

    id: str
    pid: int
    """Its first process, on the node."""
    limit_bytes: int | None
    """What its project asks for."""
    is_isolated: bool
    """Whether it has a tmpfs of its own."""


class Offence(NamedTuple):
    """A sandbox that must end."""

    id: str
    cause: str
    inside: InsideCause | None
    """The limit that it exceeded; None if the node had too little memory for all."""


@dataclass(frozen=True)
class SandboxUsage:
    """What a sandbox uses."""

    id: str
    bytes: int
    limit_bytes: int
    processes: int


class Node(NamedTuple):
    """The state of the node, or of the container that it is."""

    total_bytes: int
    available_bytes: int
    shared_bytes: int
    """Shared memory, memory files and tmpfs."""
    ids: int
    """Processes and threads."""
    most_ids: int
    kernel_bytes: int = 0
    """What belongs to no process and no file: buffers of pipes and sockets, among others."""

    @property
    def is_short_of_ids(self) -> bool:
        """Whether new processes may soon fail, those of Ray included."""
        return self.ids > MOST_IDS * self.most_ids

    @property
    def is_short_of_memory(self) -> bool:
        """Whether Ray or the kernel will soon end processes."""
        return self.available_bytes < LOW_MEMORY * self.total_bytes


def offences(usages: Sequence[SandboxUsage], node: Node) -> list[Offence]:
    """Return which sandboxes must end.

    If the node is short of something, one sandbox is ended at a time, so that there is time to see
    whether that helps.
    """
    found = [_memory_offence(usage) for usage in usages if usage.bytes > usage.limit_bytes]
    if found:
        return found
    largest = max(usages, key=lambda usage: usage.bytes, default=None)
    busiest = max(usages, key=lambda usage: usage.processes, default=None)
    if node.is_short_of_ids and busiest is not None and busiest.processes >= FAIR_PROCESSES:
        cause = (
            f"it had {busiest.processes} processes and threads, the most of all sandboxes, when "
            f"{node.ids} of the node's {node.most_ids} process ids were in use (kernel.pid_max, "
            "kernel.threads-max, or the container's pids.max)"
        )
        return [Offence(busiest.id, cause, InsideCause.PROCESSES)]
    if node.is_short_of_memory and largest is not None and largest.bytes >= node.available_bytes:
        cause = (
            f"the node had only {node.available_bytes >> 20} MiB of memory left, and it used the "
            f"most of all sandboxes: {largest.bytes >> 20} MiB"
        )
        return [Offence(largest.id, cause, None)]
    return []


def _memory_offence(usage: SandboxUsage) -> Offence:
    cause = (
        f"it used {usage.bytes >> 20} MiB of memory, shared memory and files in memory included, "
        f"more than its limit of {usage.limit_bytes >> 20} MiB (deployConfig.memory)"
    )
    return Offence(usage.id, cause, InsideCause.MEMORY)


class ResourceWatch:
    """Looks after the sandboxes of one launcher.

    Args:
        watched: Returns the sandboxes.
    """

    def __init__(self, watched: Callable[[], Sequence[Watched]]) -> None:
        self._watched = watched
        self._last: Node | None = None
        self._next_at = 0.0
        self._due_at = 0.0
        self._measured: dict[str, tuple[int, int]] = {}
        """Processor time of a sandbox when it was last measured exactly, and its bytes."""
        self._least_kernel_bytes: int | None = None

    def look(self) -> list[Offence]:
        """Return which sandboxes must end; call it a few times a second."""
        started = time.monotonic()
        node = read_node()
        if node is None or started < self._next_at or not self._is_due(node, started):
            return []
        watched = self._watched()
        found = offences(self._usages(watched, node), node) if watched else []
        self._last = node
        ended = time.monotonic()
        self._next_at = ended + (ended - started) / MOST_CPU
        self._due_at = ended + LOOK_AGAIN_S
        return found

    def _is_due(self, node: Node, now: float) -> bool:
        last = self._last
        if last is None or now >= self._due_at or node.is_short_of_ids or node.is_short_of_memory:
            return True
        return (
            last.available_bytes - node.available_bytes > STEP_BYTES
            or node.shared_bytes - last.shared_bytes > STEP_BYTES
        )

    def _usages(self, watched: Sequence[Watched], node: Node) -> list[SandboxUsage]:
        table = _Table()
        least = min(node.kernel_bytes, self._least_kernel_bytes or node.kernel_bytes)
        self._least_kernel_bytes = least
        in_no_process = node.shared_bytes + node.kernel_bytes - least
        measured: dict[str, tuple[int, int]] = {}
        usages = []
        for one in watched:
            rows = table.below(one.pid)
            limit = one.limit_bytes or int(DEFAULT_SHARE * node.total_bytes)
            used = sum(row.resident_bytes for row in rows)
            if used + in_no_process > min(limit, node.available_bytes):
                ticks = sum(row.ticks for row in rows)
                before = self._measured.get(one.id)
                if before is None or before[0] != ticks:
                    before = ticks, measure([row.pid for row in rows], one)
                measured[one.id] = before
                used = before[1]
            processes = sum(row.threads for row in rows)
            usages.append(SandboxUsage(one.id, used, limit, processes))
        self._measured = measured
        return usages


# --- the node -------------------------------------------------------------------------------------

_NOT_KERNEL: Final = (b"MemFree", b"Buffers", b"Cached", b"AnonPages", b"SReclaimable")
"""Rows of ``/proc/meminfo`` for what is free, or belongs to processes and files."""


def read_node() -> Node | None:
    """Return the state of the node; None on a system without ``/proc``."""
    try:
        with open("/proc/meminfo", "rb") as file:
            rows = dict(line.split(b":") for line in file.read().splitlines())
        memory = {
            name: int(rows[name].split()[0]) << 10
            for name in (b"MemTotal", b"MemAvailable", b"Shmem", *_NOT_KERNEL)
        }
        ids = int(_text("/proc/loadavg").split()[3].split("/")[1])
        most = min(int(_text(f"/proc/sys/kernel/{name}")) for name in ("pid_max", "threads-max"))
    except (OSError, KeyError, IndexError, ValueError):
        return None
    total = memory[b"MemTotal"]
    kernel = total - sum(memory[name] for name in _NOT_KERNEL)
    node = Node(total, memory[b"MemAvailable"], memory[b"Shmem"], ids, most, kernel)
    return _of_container(node)


def _of_container(node: Node) -> Node:
    """Apply the limits of the control group that this node's container is, if it is one."""
    most_bytes, most_ids = _number(_CGROUP / "memory.max"), _number(_CGROUP / "pids.max")
    if most_bytes is not None and most_bytes < node.total_bytes:
        rows = (line.split() for line in _text(str(_CGROUP / "memory.stat")).splitlines())
        stat = {name: int(value) for name, value in rows}
        used = (_number(_CGROUP / "memory.current") or 0) - stat.get("inactive_file", 0)
        node = node._replace(
            total_bytes=most_bytes,
            available_bytes=min(node.available_bytes, most_bytes - used),
            shared_bytes=min(node.shared_bytes, stat.get("shmem", node.shared_bytes)),
        )
    if most_ids is not None and most_ids < node.most_ids:
        node = node._replace(ids=_number(_CGROUP / "pids.current") or 0, most_ids=most_ids)
    return node


def _number(path: Path) -> int | None:
    """Return the number in a file; None if there is no file or no number."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_bytes())
    return None


def _text(path: str) -> str:
    return Path(path).read_text()


# --- processes ------------------------------------------------------------------------------------


class _Row(NamedTuple):
    pid: int
    ticks: int
    threads: int
    resident_bytes: int


class _Table:
    """The processes of the node, by parent."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        for name in os.listdir("/proc"):
            if name.isdigit():
                self._add(int(name))

    def _add(self, pid: int) -> None:
        # proc(5): pid (name) state parent …; a name may contain parentheses and spaces.
        fields = read_start(f"/proc/{pid}/stat").rpartition(b") ")[2].split()
        if fields:
            ticks, threads, pages = int(fields[11]) + int(fields[12]), fields[17], fields[21]
            self._rows[pid] = _Row(pid, ticks, int(threads), int(pages) * _PAGE_BYTES)
            self._children[int(fields[1])].append(pid)

    def below(self, root: int) -> list[_Row]:
        """Return a process and its descendants."""
        found: list[_Row] = []
        pending = [root]
        while pending:
            pid = pending.pop()
            pending += self._children[pid]
            if pid in self._rows:
                found.append(self._rows[pid])
        return found


# --- one sandbox ----------------------------------------------------------------------------------


def measure(pids: Sequence[int], watched: Watched) -> int:
    """Return the bytes that a sandbox uses: memory, swap, memory files, tmpfs, pipes, sockets.

    Pages that several processes share count for each of them in part. Processes that this user may
    not look into (process 1 of a sandbox, if the launcher is not root) count with what they do not
    share with their template.
    """
    total = 0
    hidden: dict[tuple[int, int], int] = {}
    queues = _Queues()
    for pid in pids:
        _raise_oom_score(pid)
        rollup = _sizes(f"/proc/{pid}/smaps_rollup")
        if not rollup:
            total += _private_bytes(pid)
            continue
        total += rollup["Pss_Anon"] + rollup["SwapPss"]
        with _short_closes():
            files = _open_memory_files(pid, queues)
        hidden |= files
        if rollup["Pss_Shmem"]:
            for key, size in _mapped_memory_files(pid).items():
                if key not in files:
                    hidden[key] = hidden.get(key, 0) + size
    total += sum(hidden.values()) + queues.bytes
    return total + (_tmpfs_bytes(pids) if watched.is_isolated else 0)


def _raise_oom_score(pid: int) -> None:
    """Undo what a process without CAP_SYS_RESOURCE in its history can do: lower its score."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


def _sizes(path: str) -> dict[str, int]:
    """Return the sizes in a file of ``Name:  123 kB`` lines, in bytes."""
    found: dict[str, int] = defaultdict(int)
    for line in read_start(path).decode(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[name] = int(value[:-3]) << 10
    return found


def _private_bytes(pid: int) -> int:
    own = _sizes(f"/proc/{pid}/status")
    stat = read_start(f"/proc/{pid}/stat").rpartition(b") ")[2].split()
    parent = _sizes(f"/proc/{int(stat[1])}/status") if stat else own
    private = max(0, own["RssAnon"] - parent["RssAnon"])
    return private + own["VmSwap"] + own["RssShmem"]


@dataclass
class _Queues:
    """What the kernel holds in the pipes and sockets of a sandbox."""

    pipes: int = 0
    received: int = 0
    sent: int = 0
    """In Unix sockets, what the other end has not read yet."""
    unread: int = 0
    """The same by the receiving ends: a sender may be closed."""
    _seen: set[str] = field(default_factory=set)

    @property
    def bytes(self) -> int:
        """All of it; up to half of what closed Unix sockets have sent may be missing."""
        return self.pipes + self.received + max(self.sent, self.unread)

    def add(self, pid: int, fd: int, name: str) -> None:
        """Add a descriptor's pipe or socket, unless it was added before.

        Raises:
            OSError: This user may not look into the process, or it has ended.
        """
        if name in self._seen:
            return
        process = os.pidfd_open(pid)
        try:
            own = ctypes.CDLL(None).syscall(_PIDFD_GETFD, process, fd, 0)
        finally:
            os.close(process)
        if own < 0:
            return
        self._seen.add(name)
        try:  # the process may have opened something else under this number meanwhile
            if name.startswith("socket:"):
                self._add_socket(own)
            elif _unread(own):
                self.pipes += fcntl.fcntl(own, fcntl.F_GETPIPE_SZ)
        finally:
            os.close(own)

    def _add_socket(self, descriptor: int) -> None:
        sock = socket.socket(fileno=descriptor)
        try:
            data = sock.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
            received, _, sent, _, _, queued = _MEMINFO.unpack(data)
            self.received += received
            self.sent += max(sent, queued)
            if sock.family == socket.AF_UNIX:
                self.unread += _unread(descriptor)
        finally:
            sock.detach()


@contextlib.contextmanager
def _short_closes() -> Iterator[None]:
    """Interrupt every close within the block that takes `_CLOSE_S`; call it in the main thread.

    The last close of a TCP socket waits until its data has been received, for at most the time that
    its SO_LINGER sets. A sandbox could otherwise stop the launcher by closing such a socket first
    while it is measured.
    """
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    timer = signal.setitimer(signal.ITIMER_REAL, _CLOSE_S, _CLOSE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def _unread(fd: int) -> int:
    """Return how many bytes can be read from a pipe or socket now."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


def _open_memory_files(pid: int, queues: _Queues) -> dict[tuple[int, int], int]:
    """Return the memory files that a process has open, with their allocated bytes.

    Its pipes and sockets are added to `queues`.
    """
    found: dict[tuple[int, int], int] = {}
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{fd}"
            with contextlib.suppress(OSError):
                name = os.readlink(path)
                if name.startswith(_HIDDEN):
                    status = os.stat(path)
                    found[status.st_dev, status.st_ino] = status.st_blocks * 512
                elif name.startswith(("pipe:", "socket:")):
                    queues.add(pid, int(fd), name)
    return found


def _mapped_memory_files(pid: int) -> dict[tuple[int, int], int]:
    """Return the memory files that a process has mapped, with its share of their mapped bytes."""
    found: dict[tuple[int, int], int] = {}
    key: tuple[int, int] | None = None
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text(errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        if line.startswith("Pss:"):
            if key is not None:
                found[key] = found.get(key, 0) + (int(line.split()[1]) << 10)
        elif "-" in line.partition(" ")[0]:
            # proc(5): addresses permissions offset device inode name
            fields = line.split(None, 5)
            key = None
            if len(fields) == 6 and fields[5].startswith(_HIDDEN):
                major, minor = (int(part, 16) for part in fields[3].split(":"))
                key = os.makedev(major, minor), int(fields[4])
    return found


def _tmpfs_bytes(pids: Sequence[int]) -> int:
    """Return the used bytes of a sandbox's tmpfs, which all its writable directories share."""
    for pid in pids:
        with contextlib.suppress(OSError):
            status = os.statvfs(f"/proc/{pid}/root/dev/shm")
            return (status.f_blocks - status.f_bfree) * status.f_frsize
    return 0
