"""The processes that a template forks: spares, the instances that they become, and how they end."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import select
import signal
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from aenv_ray.engines.node.directory import short_name
from aenv_ray.engines.node.memory import node_oom_kills
from aenv_ray.engines.process.cgroups import SandboxGroup
from aenv_ray.engines.process.peers import Peer
from aenv_ray.errors import InsideCause
from aenv_ray.files import read_start
from aenv_ray.runtime.fork.jail_spec import (
    MAX_FILES,
    MAX_LOCKED_BYTES,
    MAX_PROCESSES,
    MAX_SIGNALS,
    NOBODY,
    limits_processes,
)
from aenv_ray.runtime.system.reaper import used_up_cpu_limit

PACKET_BYTES: Final = 1 << 20
_CREDENTIALS: Final = struct.Struct("iII")
_EXIT_CODE: Final = 50
"""Position of an exit code in a process's ``stat``, counted from its state."""


@dataclass
class InstanceProcess:
    """An instance, from its request to the end of its process."""

    id: str
    host: str
    template: str
    """The key of its template."""
    deadline: float
    item: dict[str, Any]
    """The request for it."""
    boot_by: float
    fork: Fork | None = None
    """Its process; None while the instance waits for one."""
    dead_spares: int = 0
    """Processes assigned to it that died while they were still spares."""
    reply: tuple[Peer, int] | None = None
    """The host that asked for it, and the number of the request; None once answered."""
    status: str = "starting"
    stoppers: list[tuple[Peer, int]] = field(default_factory=list)
    """The hosts that asked for its end, with the numbers of their requests."""
    cause: str = ""
    """Why it is being ended; "" unless the launcher ends it."""
    inside: InsideCause | None = None
    """Set if it is ended because of something inside it, such as an exceeded limit."""
    oom_kills: int = 0
    """How many processes the node had killed for lack of memory when this one started."""

    @property
    def log(self) -> str:
        """Return the name of its log."""
        return short_name(self.id)

    def assign(self, fork: Fork, work_dir: str, listener: socket.socket, output: int) -> None:
        """Tell a spare to become this instance.

        Args:
            fork: The spare.
            work_dir: Its directory; empty for a process with its own mounts.
            listener: Where it answers calls.
            output: Descriptor of its log.

        Raises:
            BrokenPipeError: The spare died.
        """
        message = {
            "id": self.id,
            "env": self.item["env"],
            "arguments": self.item["arguments"],
            "work_dir": work_dir,
        }
        packet = json.dumps(message).encode()
        socket.send_fds(fork.channel, [packet], [listener.fileno(), output])
        self.fork, fork.instance = fork, self.id


@dataclass(eq=False)
class Fork:
    """A process that was ordered from a template: first a spare, then an instance."""

    number: int
    """Its number, by which the template knows it."""
    channel: socket.socket
    """The channel to the process, until the instance has started."""
    pid: int = 0
    pidfd: int = -1
    """A descriptor that is readable once the process has ended; -1 before it is a spare."""
    instance: str = ""
    """Id of its instance; empty for a spare."""
    status: int | None = None
    """Its exit code or negated signal: what the kernel says, or the template; None: not known."""
    sweeps: int = 0
    """Sweeps since it ended without a status."""
    is_gone: bool = False
    """Whether its end is known."""
    group: SandboxGroup | None = None
    """Its control group, until it has ended."""
    ran_out_of_memory: bool = False
    """Whether the kernel ended it because of the limit of its group."""

    def has_ended(self) -> bool:
        """Return whether the process has ended, known or not."""
        if self.pidfd < 0:
            return self.is_gone
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def kernel_status(self) -> int | None:
        """Return the exit code or negated signal of the ended process, as the kernel says.

        None: its parent has reaped it, or the kernel does not tell it. To a user who may not trace
        the process it tells 0, so 0 is not believed.
        """
        # proc(5): pid (name) state … exit_code, the last of its 52 fields.
        fields = read_start(f"/proc/{self.pid}/stat").rpartition(b") ")[2].split()
        if self.pidfd < 0 or len(fields) < _EXIT_CODE or fields[0] != b"Z":
            return None
        is_over_limit = used_up_cpu_limit(self.pid)
        try:
            signal.pidfd_send_signal(self.pidfd, 0)
        except OSError:  # reaped: the process id may have been another's when it was read
            return None
        status = int(fields[_EXIT_CODE - 1])
        if not status:
            return None
        code = os.waitstatus_to_exitcode(status)
        return -signal.SIGXCPU if code == -signal.SIGKILL and is_over_limit else code

    def kill(self) -> None:
        """End the process, and with it all processes of its pid namespace."""
        with contextlib.suppress(ProcessLookupError):
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            elif self.pid:
                os.kill(self.pid, signal.SIGKILL)


def new_channel() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a channel; the kernel adds the sender's process id to each packet."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return ours, theirs


def receive_from_fork(channel: socket.socket) -> tuple[bytes, int]:
    """Return a packet and its sender's process id; descriptors in it are dropped.

    Raises:
        BlockingIOError: There is no packet.
    """
    room = socket.CMSG_SPACE(_CREDENTIALS.size)  # no room for descriptors: they are dropped
    data, ancillary, _, _ = channel.recvmsg(PACKET_BYTES, room, socket.MSG_DONTWAIT)
    for _, kind, content in ancillary:
        if kind == socket.SCM_CREDENTIALS:
            return data, _CREDENTIALS.unpack(content)[0]
    return data, 0


def open_process(pid: int) -> int:
    """Return a descriptor of a process; -1 where the kernel has none (before Linux 5.3).

    Raises:
        ProcessLookupError: The process has ended.
    """
    if not hasattr(os, "pidfd_open"):
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError as exc:
        if exc.errno == errno.ENOSYS:
            return -1
        raise


def limit_resources(pid: int, memory_bytes: int | None, *, jailed: bool) -> None:
    """Set the kernel's limits of a fork that has left them out; it cannot raise them again.

    They are those of `aenv_ray.runtime.fork.jail.set_limits`, which runs in the fork, where code of
    the project can prevent it. Processes that the fork has started before are not limited by this.

    Args:
        pid: The fork.
        memory_bytes: Its limit of data. None: it has none.
        jailed: Whether it has namespaces. Then it has inherited all limits that are not counted
            for a sandbox, see `aenv_ray.runtime.fork.jail.lock_template`.

    Raises:
        ProcessLookupError: It has ended.
    """
    if not hasattr(resource, "prlimit"):
        return  # not Linux
    # A kernel, such as gVisor's, may refuse: the limits are then those that the fork has set. No
    # fork can bring that about, since it has no other user to become.
    with contextlib.suppress(PermissionError):
        if not jailed:
            _lower(pid, _OF_EACH_PROCESS)
            if memory_bytes:
                _lower(pid, [(resource.RLIMIT_DATA, memory_bytes)])
        elif limits_processes(jailed=True):
            try:
                _lower(pid, _OF_A_SANDBOX)
            except PermissionError:  # it is nobody's, and root here lacks CAP_SYS_RESOURCE
                if os.geteuid() != 0:
                    raise
                with _real_ids(NOBODY):
                    _lower(pid, _OF_A_SANDBOX)


_OF_EACH_PROCESS: Final = (
    (resource.RLIMIT_NOFILE, MAX_FILES),
    (resource.RLIMIT_CORE, 0),
    (getattr(resource, "RLIMIT_MSGQUEUE", 0), 0),
)
_OF_A_SANDBOX: Final = (
    (resource.RLIMIT_NPROC, MAX_PROCESSES),
    (getattr(resource, "RLIMIT_SIGPENDING", 0), MAX_SIGNALS),
    (resource.RLIMIT_MEMLOCK, MAX_LOCKED_BYTES),
)


def _lower(pid: int, limits: Iterable[tuple[int, int]]) -> None:
    for kind, most in limits:
        _, hard = resource.prlimit(pid, kind)
        if hard == resource.RLIM_INFINITY or hard > most:
            resource.prlimit(pid, kind, (most, most))


@contextlib.contextmanager
def _real_ids(number: int) -> Iterator[None]:
    """Have another real user and group: without privileges, `prlimit` asks for those of its target.

    The effective ones, which decide about all else, stay.
    """
    uid, gid = os.getuid(), os.getgid()
    os.setresgid(number, -1, -1)
    try:
        os.setresuid(number, -1, -1)
        yield
    finally:
        os.setresuid(uid, -1, -1)
        os.setresgid(gid, -1, -1)


def inside_of(status: int | None, *, isolated: bool, oom_kills_before: int) -> InsideCause | None:
    """Return what inside a sandbox ended its process; None if it was ended from outside.

    Args:
        status: Its exit code or negated signal; None if that is not known.
        isolated: It was process 1 of a pid namespace, which no signal from inside kills: SIGKILL
            came from outside, for example because the node had no memory left.
        oom_kills_before: `node_oom_kills` when it started; used without isolation, where its own
            processes can send SIGKILL too.
    """
    if status is None:
        return None
    if status >= 0:
        return InsideCause.EXIT
    if status == -signal.SIGKILL and (isolated or node_oom_kills() != oom_kills_before):
        return None
    return InsideCause.SIGNAL


def cause_of(status: int | None) -> str:
    """Describe how a process ended, from its exit code or its negated signal."""
    if status is None:
        return "its process ended"
    if status >= 0:
        return f"its process exited with code {status}"
    with contextlib.suppress(ValueError):
        return f"its process was killed by {signal.Signals(-status).name}"
    return f"its process was killed by signal {-status}"
