"""What a launcher knows of its templates and instances, and how a template is started."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
from dataclasses import dataclass, field
from typing import Any, Final

from aenv_ray.engines.launcher_files import short_name
from aenv_ray.engines.launcher_peers import Peer

PACKET_BYTES: Final = 1 << 20


@dataclass
class Template:
    """A template process, see `aenv_ray.runtime.template`."""

    key: str
    setup: dict[str, Any]
    process: subprocess.Popen[bytes]
    control: socket.socket
    launched_at: float
    used_at: float
    ready: dict[str, Any] | None = None
    waiting: list[tuple[Peer, int]] = field(default_factory=list)
    queued: list[Instance] = field(default_factory=list)
    env_reads: list[str] = field(default_factory=list)
    """Variables that code which failed to load had read."""

    @property
    def log(self) -> str:
        """The name of its log."""
        return log_of_template(self.key)

    def fork(self, instance: Instance, work_dir: str, listener: socket.socket, output: int) -> None:
        """Ask the process for an instance.

        Args:
            instance: What it becomes.
            work_dir: Its directory; empty where it has mounts of its own.
            listener: Where it answers calls.
            output: Descriptor of its log.

        Raises:
            BlockingIOError: The process has as much to do as it takes; try again.
            OSError: It is gone.
        """
        message = {
            "fork": instance.id,
            "env": instance.item["env"],
            "arguments": instance.item["arguments"],
            "work_dir": work_dir,
        }
        packet = json.dumps(message).encode()
        socket.send_fds(self.control, [packet], [listener.fileno(), output])


@dataclass
class Instance:
    """An instance, from its request to the end of its process."""

    id: str
    host: str
    template: str
    deadline: float
    item: dict[str, Any]
    boot_by: float
    reply: tuple[Peer, int] | None = None
    status: str = "starting"
    stoppers: list[tuple[Peer, int]] = field(default_factory=list)
    cause: str = ""

    @property
    def log(self) -> str:
        """The name of its log."""
        return short_name(self.id)


def log_of_template(key: str) -> str:
    """Return the name of a template's log."""
    return f"template-{short_name(key)}"


def start_template(
    key: str, setup: dict[str, Any], first: dict[str, Any], output: int, now: float
) -> Template:
    """Start a template process.

    Args:
        key: Names it.
        setup: What it is made from: ``python, env`` here, the rest in `first`.
        first: What it is told first.
        output: Descriptor of its log.
        now: Seconds since the epoch.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES)
    with theirs:
        process = subprocess.Popen(
            [*setup["python"], "-m", "aenv_ray.runtime.template", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=setup["env"],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    with contextlib.suppress(OSError):  # it died at once: reading from it will say so
        ours.send(json.dumps({"setup": first}).encode())
    ours.setblocking(False)
    return Template(key, setup, process, ours, launched_at=now, used_at=now)


def cause_of(status: int) -> str:
    """Return in words how a process ended, from its exit code, or minus its signal."""
    if status >= 0:
        return f"its process exited with code {status}"
    with contextlib.suppress(ValueError):
        return f"its process was killed by {signal.Signals(-status).name}"
    return f"its process was killed by signal {-status}"
