"""Ends sandboxes that take too much of their node: memory, process ids, or watches of epoll.

The problem: the kernel's resource limits (`aenv_ray.runtime.fork.jail.set_limits`) apply to one
process at a time. A sandbox can exceed its memory limit with many processes, or with memory that
belongs to no process: memory files (memfd), shared memory, files in its tmpfs, and unread data in
pipes and sockets. A control group for each sandbox covers all of this
(`aenv_ray.engines.process.cgroups`), but it needs a delegated hierarchy, and it does not keep
enough memory and process ids free for Ray. So the launcher watches its sandboxes.

Measuring a sandbox is expensive, and a node may run thousands of them. `ResourceWatch.check`, which
the launcher calls about twice a second, therefore works in three steps. Each one runs only if the
step before it gives a reason:

1. Read the state of the node (`read_node`), a few short files. Stop here if its memory has hardly
   changed, unless the node runs short of something or the last scan was `SCAN_EVERY_S` ago.
2. Scan the process table: one line for each process of the node. This gives the resident memory and
   the process ids of each sandbox. Scans use at most `MAX_CPU_SHARE` of one core, unless the node
   loses memory fast (`FAST_SHARE`) or is short of it.
3. Measure exactly (`measure`) the sandboxes that could be too large: those whose resident memory,
   plus all memory of the node that belongs to no process, exceeds their limit or what the node has
   left. A sandbox whose processes have not run since its last measurement keeps the result.

Watches of epoll are counted only while the kernel's memory is so large that they could take the
user's share of them (`count_watches`). The kernel limits them for each user, and all sandboxes of a
node run as the same user: one of them could take them all, and programs of the others could no
longer wait for sockets.

`offences` then decides which sandboxes must end.

This module imports only the standard library, `aenv_ray.errors`, `aenv_ray.files`,
`aenv_ray.engines.node.memory` and `aenv_ray.runtime.fork.jail_spec`, because the launcher imports
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import signal
import socket
import struct
import sys
import termios
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple

from aenv_ray.engines.node.memory import DEFAULT_LIMIT_SHARE
from aenv_ray.errors import InsideCause
from aenv_ray.files import read_start
from aenv_ray.runtime.fork.jail_spec import MAX_PROCESSES

GROWTH_BYTES: Final = 32 << 20
"""Scan the processes once the node's used or shared memory has grown by this much."""
SCAN_EVERY_S: Final = 10.0
"""Scan the processes after this long even if the node's memory has not grown."""
MAX_CPU_SHARE: Final = 0.05
"""Share of one core that scans and measurements may use, unless memory is being taken fast. This is
CPU time, not elapsed time: a sandbox that keeps all cores busy could otherwise delay the next scan.
"""
FAST_SHARE: Final = 1 / 8
"""Share of the available memory that is taken fast if it is taken between two scans."""
LOW_MEMORY_SHARE: Final = 0.08
"""End the largest sandbox when less than this share of the node's memory is available. Ray begins
to end its own workers at 0.05."""
MAX_ID_SHARE: Final = 0.75
"""End the sandbox with the most processes when this share of the node's process ids is in use."""
FAIR_PROCESSES: Final = 256
"""A sandbox with fewer processes and threads than this is not ended when process ids run short."""
MAX_WATCH_SHARE: Final = 0.25
"""End the sandbox with the most watches of epoll when all sandboxes have this share of them."""
_WATCH_BYTES: Final = 128
"""Kernel memory of a watch; most take more."""
_EPOLL_WATCHES: Final = 16
"""Number of watches that an epoll instance itself counts as; it bounds how many are looked at."""
_MAX_WATCHES: Final = Path("/proc/sys/fs/epoll/max_user_watches")
_MEMORY_FILES: Final = ("/memfd:", "/dev/zero (deleted)")
"""How /proc names memory files: shared memory that is not a file in the sandbox's tmpfs."""
_CLOSE_S: Final = 0.05
"""Longest time for closing our copy of a sandbox's socket."""
_PIDFD_GETFD: Final = 438
_PIDFD_THREAD: Final = os.O_EXCL
_KCMP: Final = {"x86_64": 312, "aarch64": 272}.get(platform.machine(), -1)
_KCMP_FILES: Final = 2
_COMPARED: Final = 16
"""Tables of descriptors with which another one is compared."""
_SO_MEMINFO: Final = 55
_MEMINFO: Final = struct.Struct("6I")
"""SO_MEMINFO of a socket, in bytes: received, receive limit, in transit, send limit, reserved,
queued for sending."""
_OBJECT_BYTES: Final = 2048
"""What an empty pipe or socket takes of the kernel's memory: buffers for it, its inode and file."""
_FULL_BYTES: Final = 1 << 18
"""What a pipe or socket can hold, with usual limits."""
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_CGROUP: Final = Path("/sys/fs/cgroup")


class Watched(NamedTuple):
    """A sandbox or a template to watch."""

    id: str
    pid: int
    """The pid of its first process, as the node sees it."""
    limit_bytes: int | None
    """The memory limit that its project sets; None: it sets none."""
    is_isolated: bool
    """Whether it has its own tmpfs."""
    without: frozenset[int] | None = None
    """For a template: the pids of its instances, which count on their own. None: no template."""


class Offence(NamedTuple):
    """A sandbox that must end, and why."""

    id: str
    cause: str
    inside: InsideCause | None
    """The limit that it exceeded. None: it exceeded no limit, but the node ran out of memory."""


@dataclass(frozen=True)
class SandboxUsage:
    """What a sandbox uses: bytes of memory, and processes and threads."""

    id: str
    bytes: int
    limit_bytes: int
    processes: int
    watches: int = 0
    """Watches of epoll; 0 also while there is no reason to count them."""
    max_processes: int = sys.maxsize
    """Own limit of processes and threads, if the kernel does not enforce it."""
    has_instances: bool = False
    """A template that instances depend on."""


class Measured(NamedTuple):
    """What `measure` finds."""

    bytes: int
    shared_bytes: int
    """How many of them belong to no process: memory files and tmpfs."""
    in_transit: int
    """Descriptors that were sent through a Unix socket and not received yet."""


class Node(NamedTuple):
    """The state of the node; if the node is a container, of that container."""

    total_bytes: int
    available_bytes: int
    shared_bytes: int
    """Shared memory, memory files and tmpfs."""
    process_ids: int
    """Process ids in use: one for each process and each thread."""
    max_process_ids: int
    kernel_bytes: int = 0
    """Memory of the kernel that belongs to no process and no file, such as buffers of pipes."""
    max_watches: int = sys.maxsize
    """How many watches of epoll a user may have."""

    @property
    def is_short_of_ids(self) -> bool:
        """Whether it may soon be impossible to start processes, for Ray too."""
        return self.process_ids > MAX_ID_SHARE * self.max_process_ids

    @property
    def is_short_of_memory(self) -> bool:
        """Whether Ray or the kernel will soon end processes."""
        return self.available_bytes < LOW_MEMORY_SHARE * self.total_bytes


def offences(usages: Sequence[SandboxUsage], node: Node) -> list[Offence]:
    """Return which sandboxes must end.

    Every sandbox over its own limit must end. If there is none and the node runs short of
    something, only the sandbox that uses most of it must end: the next check shows whether that
    was enough. A template with instances does not end for that, because an agent could void the
    episodes of all of them by making the node run short.
    """
    found = [_memory_offence(usage) for usage in usages if usage.bytes > usage.limit_bytes]
    found += [_process_offence(usage) for usage in usages if usage.processes > usage.max_processes]
    usages = [usage for usage in usages if not usage.has_instances]
    if found or not usages:
        return found
    largest = max(usages, key=lambda usage: usage.bytes)
    busiest = max(usages, key=lambda usage: usage.processes)
    watcher = max(usages, key=lambda usage: usage.watches)
    watches = sum(usage.watches for usage in usages)
    if watches > MAX_WATCH_SHARE * node.max_watches:
        cause = (
            f"it had {watcher.watches} watches of epoll, the most of all sandboxes, which had "
            f"{watches} of the user's {node.max_watches} (fs.epoll.max_user_watches)"
        )
        return [Offence(watcher.id, cause, InsideCause.PROCESSES)]
    if node.is_short_of_ids and busiest.processes >= FAIR_PROCESSES:
        cause = (
            f"it had {busiest.processes} processes and threads, the most of all sandboxes, when "
            f"{node.process_ids} of the node's {node.max_process_ids} process ids were in use "
            "(kernel.pid_max, kernel.threads-max, or the container's pids.max)"
        )
        return [Offence(busiest.id, cause, InsideCause.PROCESSES)]
    if node.is_short_of_memory and largest.bytes >= node.available_bytes:
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


def _process_offence(usage: SandboxUsage) -> Offence:
    cause = (
        f"it had {usage.processes} processes and threads, more than its limit of "
        f"{usage.max_processes}"
    )
    return Offence(usage.id, cause, InsideCause.PROCESSES)


class ResourceWatch:
    """Watches the sandboxes of one launcher.

    Args:
        watched: Returns the running sandboxes.
    """

    def __init__(self, watched: Callable[[], Sequence[Watched]]) -> None:
        self._watched = watched
        self._last: Node | None = None
        self._next_at = 0.0
        self._due_at = 0.0
        self._measured: dict[str, tuple[int, Measured]] = {}
        """By sandbox id: its processor time when it was last measured exactly, and the result."""
        self._others_bytes: int | None = None
        """Shared memory of no sandbox and no tmpfs of the node when the first check was made."""
        self._least_kernel_bytes: int | None = None
        """The lowest `Node.kernel_bytes` so far. What exceeds it may belong to a sandbox."""

    def check(self) -> list[Offence]:
        """Return which sandboxes must end; call it about twice a second."""
        started, used = time.monotonic(), time.process_time()
        node = read_node()
        if node is None or not self._is_due(node, started):
            return []
        if started < self._next_at and not self._is_urgent(node):
            return []
        watched = self._watched()
        if self._others_bytes is None:
            self._others_bytes = max(0, node.shared_bytes - _tmpfs_of_node())
        found = offences(self._usages(watched, node), node) if watched else []
        self._last = node
        ended = time.monotonic()
        self._next_at = ended + (time.process_time() - used) / MAX_CPU_SHARE
        self._due_at = ended + SCAN_EVERY_S
        return found

    def _is_due(self, node: Node, now: float) -> bool:
        last = self._last
        if last is None or now >= self._due_at or node.is_short_of_ids or node.is_short_of_memory:
            return True
        return (
            last.available_bytes - node.available_bytes > GROWTH_BYTES
            or node.shared_bytes - last.shared_bytes > GROWTH_BYTES
        )

    def _is_urgent(self, node: Node) -> bool:
        last = self._last
        if last is None or node.is_short_of_memory:
            return True
        return last.available_bytes - node.available_bytes > FAST_SHARE * last.available_bytes

    def _usages(self, watched: Sequence[Watched], node: Node) -> list[SandboxUsage]:
        table = _ProcessTable()
        least = min(node.kernel_bytes, self._least_kernel_bytes or node.kernel_bytes)
        self._least_kernel_bytes = least
        # Any one sandbox could own all of it, until it is measured.
        unattributed = node.shared_bytes + node.kernel_bytes - least
        most_watches = int(MAX_WATCH_SHARE * node.max_watches)
        are_counted = node.kernel_bytes - least > most_watches * _WATCH_BYTES
        before, self._measured = self._measured, {}
        usages = []
        for one in watched:
            processes = table.tree(one.pid, one.without or frozenset())
            pids = [process.pid for process in processes]
            limit = one.limit_bytes or int(DEFAULT_LIMIT_SHARE * node.total_bytes)
            used = sum(process.resident_bytes for process in processes)
            if used + unattributed > min(limit, node.available_bytes):
                used = self._measure(one, processes, before).bytes
            threads = sum(process.threads for process in processes)
            watches = count_watches(pids, most_watches) if are_counted else 0
            most = sys.maxsize if one.without is None else MAX_PROCESSES
            usages.append(
                SandboxUsage(one.id, used, limit, threads, watches, most, bool(one.without))
            )
        return self._with_hidden(usages, watched, node, table, before)

    def _measure(
        self,
        one: Watched,
        processes: Sequence[_Process],
        before: dict[str, tuple[int, Measured]],
    ) -> Measured:
        ticks = sum(process.ticks for process in processes)
        latest = before.get(one.id)
        if latest is None or latest[0] != ticks:  # a process has run since
            latest = ticks, measure([process.pid for process in processes], one)
        self._measured[one.id] = latest
        return latest[1]

    def _with_hidden(
        self,
        usages: list[SandboxUsage],
        watched: Sequence[Watched],
        node: Node,
        table: _ProcessTable,
        before: dict[str, tuple[int, Measured]],
    ) -> list[SandboxUsage]:
        """Add the shared memory that is nowhere else to a sandbox that can hide it.

        A memory file whose only descriptor is in transit appears in no process, and nothing tells
        who sent it. So the memory is charged to the sandbox with the most descriptors in transit
        in this measurement and the one before: programs usually receive theirs at once.
        """
        in_transit = {
            usage.id: now.in_transit
            for usage in usages
            for _, now in [self._measured.get(usage.id, _NOTHING)]
            if now.in_transit and before.get(usage.id, _NOTHING)[1].in_transit
        }
        if not in_transit:
            return usages
        suspect = max(in_transit, key=lambda name: in_transit[name])
        (at,) = (index for index, usage in enumerate(usages) if usage.id == suspect)
        room = usages[at].limit_bytes - usages[at].bytes
        hidden = node.shared_bytes - _tmpfs_of_node() - (self._others_bytes or 0)
        hidden -= sum(now.shared_bytes for _, now in self._measured.values())
        for one in watched:
            if hidden <= room:
                return usages
            if one.id not in self._measured:
                processes = table.tree(one.pid, one.without or frozenset())
                hidden -= self._measure(one, processes, before).shared_bytes
        usages[at] = replace(usages[at], bytes=usages[at].bytes + hidden)
        return usages


_NOTHING: Final = 0, Measured(0, 0, 0)


# --- the node -------------------------------------------------------------------------------------

_NOT_KERNEL: Final = (b"MemFree", b"Buffers", b"Cached", b"AnonPages", b"SReclaimable")
"""Rows of ``/proc/meminfo`` for memory that is free, or belongs to a process or a file."""


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
    watches = _number(_MAX_WATCHES) or sys.maxsize
    node = Node(total, memory[b"MemAvailable"], memory[b"Shmem"], ids, most, kernel, watches)
    return _of_container(node)


def _of_container(node: Node) -> Node:
    """If this node is a container, apply the limits of the container's control group."""
    most_bytes, max_process_ids = _number(_CGROUP / "memory.max"), _number(_CGROUP / "pids.max")
    if most_bytes is not None and most_bytes < node.total_bytes:
        rows = (line.split() for line in _text(str(_CGROUP / "memory.stat")).splitlines())
        stat = {name: int(value) for name, value in rows}
        used = (_number(_CGROUP / "memory.current") or 0) - stat.get("inactive_file", 0)
        node = node._replace(
            total_bytes=most_bytes,
            available_bytes=min(node.available_bytes, most_bytes - used),
            shared_bytes=min(node.shared_bytes, stat.get("shmem", node.shared_bytes)),
        )
    if max_process_ids is not None and max_process_ids < node.max_process_ids:
        node = node._replace(
            process_ids=_number(_CGROUP / "pids.current") or 0, max_process_ids=max_process_ids
        )
    return node


def _number(path: Path) -> int | None:
    """Return the number in a file; None if there is no file or no number."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_bytes())
    return None


def _text(path: str) -> str:
    return Path(path).read_text()


def _tmpfs_of_node() -> int:
    """Return the used bytes of the file systems in memory that this process sees."""
    used: dict[int, int] = {}
    for line in _text("/proc/self/mountinfo").splitlines():
        # proc(5): id parent device root path options … - type source options
        mount, _, kind = line.partition(" - ")
        if kind.startswith(("tmpfs ", "devtmpfs ")):
            path = mount.split()[4]
            with contextlib.suppress(OSError):  # hidden by another mount, or an unusual name
                status = os.statvfs(path)
                used[os.stat(path).st_dev] = (status.f_blocks - status.f_bfree) * status.f_frsize
    return sum(used.values())


# --- processes ------------------------------------------------------------------------------------


class _Process(NamedTuple):
    pid: int
    ticks: int
    threads: int
    resident_bytes: int


class _ProcessTable:
    """All processes of the node, with their children."""

    def __init__(self) -> None:
        self._processes: dict[int, _Process] = {}
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        for name in os.listdir("/proc"):
            if name.isdigit():
                self._add(int(name))

    def _add(self, pid: int) -> None:
        # proc(5): pid (name) state parent …; a name may contain parentheses and spaces.
        fields = read_start(f"/proc/{pid}/stat").rpartition(b") ")[2].split()
        if fields:
            ticks, threads, pages = int(fields[11]) + int(fields[12]), fields[17], int(fields[21])
            if fields[0] == b"Z" and threads != b"1":
                pages = _pages(_living_thread(pid))
            self._processes[pid] = _Process(pid, ticks, int(threads), pages * _PAGE_BYTES)
            self._children[int(fields[1])].append(pid)

    def tree(self, root: int, without: frozenset[int] = frozenset()) -> list[_Process]:
        """Return a process and its descendants, without some and their descendants."""
        found: list[_Process] = []
        pending = [root]
        while pending:
            pid = pending.pop()
            pending += [child for child in self._children[pid] if child not in without]
            if pid in self._processes:
                found.append(self._processes[pid])
        return found


# --- threads --------------------------------------------------------------------------------------

# `/proc/TID` exists for every thread. That of a process is the one of its first thread, which may
# have ended, or have another table of descriptors than the other threads.


def _threads(pid: int) -> list[int]:
    """Return the ids of the threads of a process; empty if it has ended."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _pages(thread: int) -> int:
    """Return how many pages of the memory of a thread's process are resident; 0 if it has ended."""
    sizes = read_start(f"/proc/{thread}/statm").split()
    return int(sizes[1]) if sizes else 0


def _living_thread(pid: int) -> int:
    """Return a thread of a process that has not ended; its first one if all have."""
    return next((thread for thread in _threads(pid) if _pages(thread)), pid)


def _threads_by_descriptors(pid: int) -> Iterator[int]:
    """Yield a thread for each table of descriptors of a process: usually there is one table.

    Some tables of a process with many may be found again. On a kernel without kcmp(2), and in a
    process that this user may not inspect, only one table is found.
    """
    kcmp = ctypes.CDLL(None).syscall
    found: list[int] = []
    for thread in _threads(pid):
        # 0: the same; 1 or 2: another; -1: unknown. Comparing each with all could take long.
        latest = found[:1] + found[-_COMPARED:]
        if all(kcmp(_KCMP, thread, other, _KCMP_FILES, 0, 0) > 0 for other in latest):
            found.append(thread)
            yield thread


# --- one sandbox ----------------------------------------------------------------------------------


def measure(pids: Sequence[int], watched: Watched) -> Measured:
    """Return what a sandbox uses: memory, swap, memory files, tmpfs, pipes and sockets.

    A page that several processes share is divided among them (proportional share). This user may
    not inspect process 1 of a sandbox, unless the launcher runs as root; such a process counts with
    the memory that it does not share with its template.
    """
    total = 0
    memory_files: dict[tuple[int, int], int] = {}
    buffers = _KernelBuffers()
    for pid in pids:
        if watched.without is None:  # a template has a lower score than its instances
            _raise_oom_score(pid)
        thread = pid if _pages(pid) else _living_thread(pid)
        rollup = _sizes(f"/proc/{thread}/smaps_rollup")
        if not rollup:
            total += _private_bytes(pid)
            continue
        total += rollup["Pss_Anon"] + rollup["SwapPss"]
        files: dict[tuple[int, int], int] = {}
        for holder in _threads_by_descriptors(pid):
            with _short_closes():
                files |= _open_memory_files(pid, holder, buffers)
        memory_files |= files
        if rollup["Pss_Shmem"]:
            for key, size in _mapped_memory_files(thread).items():
                if key not in files:
                    memory_files[key] = memory_files.get(key, 0) + size
    shared = sum(memory_files.values()) + (_tmpfs_bytes(pids) if watched.is_isolated else 0)
    return Measured(total + shared + buffers.bytes, shared, buffers.in_transit)


def count_watches(pids: Sequence[int], most: int) -> int:
    """Return how many watches of epoll a sandbox has; counting stops above `most`.

    A watch counts once for each process that has its instance of epoll open. Those of processes
    that this user may not inspect are missing, as in `measure`.
    """
    total = 0
    for thread in (thread for pid in pids for thread in _threads_by_descriptors(pid)):
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{thread}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{thread}/fd/{fd}") == "anon_inode:[eventpoll]":
                        details = Path(f"/proc/{thread}/fdinfo/{fd}").read_bytes()
                        total += _EPOLL_WATCHES + details.count(b"tfd:")
                if total > most:
                    return total
    return total


def _raise_oom_score(pid: int) -> None:
    """Make a process the kernel's first choice when memory runs out.

    This is repeated, because a process may lower its own score again, down to the last one that
    was set with CAP_SYS_RESOURCE (proc(5)).
    """
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
    """Return the memory of a process that its parent, the template, does not share."""
    own = _sizes(f"/proc/{pid}/status")
    stat = read_start(f"/proc/{pid}/stat").rpartition(b") ")[2].split()
    parent = _sizes(f"/proc/{int(stat[1])}/status") if stat else own
    private = max(0, own["RssAnon"] - parent["RssAnon"])
    return private + own["VmSwap"] + own["RssShmem"]


@dataclass
class _KernelBuffers:
    """The pipes and sockets of a sandbox, with the data that the kernel holds in them."""

    pipes: int = 0
    received: int = 0
    sent: int = 0
    """Sent through Unix sockets and not read yet, counted at the sending ends."""
    unread: int = 0
    """The same data, counted at the receiving ends, since a sender may be closed."""
    in_transit: int = 0
    """Descriptors that wait in them."""
    _seen: set[str] = field(default_factory=set)

    @property
    def bytes(self) -> int:
        """The total. Up to half of the data that closed Unix sockets have sent may be missing."""
        data = self.pipes + self.received + max(self.sent, self.unread)
        return data + len(self._seen) * _OBJECT_BYTES

    def add(self, thread: int, fd: int, name: str, *, is_first: bool = True) -> None:
        """Add a descriptor's pipe or socket, unless it was added before.

        Args:
            thread: The thread that has it.
            fd: Its number there.
            name: What ``/proc`` shows for it.
            is_first: Whether the thread is the first one of its process.

        Raises:
            OSError: This user may not inspect the process, or it has ended.
        """
        if name in self._seen:
            return
        try:
            process = os.pidfd_open(thread, 0 if is_first else _PIDFD_THREAD)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            # Before Linux 6.9: nothing shows what it contains, so it counts as a full one.
            self._seen.add(name)
            self.pipes += _FULL_BYTES
            return
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
                # Also those in connections that a listening socket has not accepted.
                details = read_start(f"/proc/self/fdinfo/{descriptor}").partition(b"scm_fds:")[2]
                self.in_transit += int(details.split()[0]) if details else 0
                self.unread += _unread(descriptor)  # raises for a listening socket
        finally:
            sock.detach()


@contextlib.contextmanager
def _short_closes() -> Iterator[None]:
    """Interrupt every close in the block that takes `_CLOSE_S`; use it in the main thread only.

    The last close of a TCP socket can block until the peer has received the data, for as long as
    the socket's SO_LINGER says. Measuring copies the sockets of a sandbox. If the sandbox closes
    its own copy meanwhile, ours is the last one, and closing it would block the launcher.
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


def _open_memory_files(
    pid: int, thread: int, buffers: _KernelBuffers
) -> dict[tuple[int, int], int]:
    """Return the memory files that a thread of a process has open, with their allocated bytes.

    Its pipes and sockets are added to `buffers`.
    """
    found: dict[tuple[int, int], int] = {}
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{thread}/fd"):
            path = f"/proc/{thread}/fd/{fd}"
            with contextlib.suppress(OSError):
                name = os.readlink(path)
                if name.startswith(_MEMORY_FILES):
                    status = os.stat(path)
                    found[status.st_dev, status.st_ino] = status.st_blocks * 512
                elif name.startswith(("pipe:", "socket:")):
                    buffers.add(thread, int(fd), name, is_first=thread == pid)
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
            if len(fields) == 6 and fields[5].startswith(_MEMORY_FILES):
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
