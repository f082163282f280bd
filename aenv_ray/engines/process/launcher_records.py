"""What a launcher knows of its templates and instances, and how a template is started."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from aenv_ray.engines.node.directory import short_name
from aenv_ray.engines.process.launcher_peers import Peer

PACKET_BYTES: Final = 1 << 20
SPARES: Final = 3
"""Spare processes of a template: they hide a fork from whoever creates one after another."""
UNHEARD_SWEEPS: Final = 12
"""A template that was told to end a process, and then says nothing for so many sweeps, hangs. They
take 6 s, and what it was to end may outlive its deadline by 10 s. Not measured by the clock, which
runs on while the machine sleeps."""
SPARE_DELAY_S: Final = 0.006
"""While one is left, another is ordered this late: a fork takes a core for some milliseconds, which
the create that is under way and its first call have more use for."""


@dataclass
class Template:
    """A template process, see `aenv_ray.runtime.fork.template`."""

    key: str
    setup: dict[str, Any]
    process: subprocess.Popen[bytes]
    control: socket.socket
    launched_at: float
    used_at: float
    ready: dict[str, Any] | None = None
    waiting: list[tuple[Peer, int]] = field(default_factory=list)
    queued: deque[Instance] = field(default_factory=deque)
    """Instances that wait for a process, first come first served."""
    spares: dict[int, socket.socket] = field(default_factory=dict)
    """Processes that wait for an instance, by their numbers, oldest first."""
    ordered: int = 0
    """Spares that the process was asked for and has not made yet."""
    order_at: float = 0.0
    """When spares are ordered that nobody waits for; 0: nothing is to be ordered."""
    no_spares_before: float = 0.0
    """Until then none is ordered ahead: one could not be made, or died."""
    instances: dict[int, str] = field(default_factory=dict)
    """Which instance each other process is."""
    has_raised: bool = False
    """The project's code raised when it was loaded."""
    env_reads: list[str] = field(default_factory=list)
    """Variables that code which failed to load had read."""

    is_ending: bool = False
    """It was told to end a process since the last sweep."""
    unheard: int = 0
    """Sweeps in which it was told to, since it said something."""

    @property
    def log(self) -> str:
        """The name of its log."""
        return log_of_template(self.key)

    def end(self, process: int) -> None:
        """Have it end a process and all that this started."""
        self.is_ending = True
        with contextlib.suppress(OSError):  # a full socket: the next sweep asks again
            self.control.send(json.dumps({"kill": process}).encode())

    def hangs(self) -> bool:
        """Whether it has long said nothing although it was told to end something; ask it again."""
        if not self.is_ending:
            return False
        self.is_ending = False
        self.unheard += 1
        with contextlib.suppress(OSError):  # a full socket: it does not read
            self.control.send(b'{"ping":1}')
        return self.unheard > UNHEARD_SWEEPS

    def order_soon(self, now: float) -> None:
        """Ask for spares: at once where somebody waits or none is left, else a little later."""
        if self.queued or not self.spares:
            self.order(now)
        elif not self.order_at:
            self.order_at = now + SPARE_DELAY_S

    def order(self, now: float) -> None:
        """Ask the process for as many spares as are wanted now and soon."""
        self.order_at = 0.0
        if self.ready is None:
            return
        ahead = SPARES if now >= self.no_spares_before else 0
        wanted = len(self.queued) + ahead - len(self.spares) - self.ordered
        if wanted > 0:
            with contextlib.suppress(OSError):  # a full socket: the next sweep asks again
                order = {"spares": wanted, "rehearse": not self.queued}
                self.control.send(json.dumps(order).encode())
                self.ordered += wanted

    def take_spare(self) -> tuple[int, socket.socket]:
        """Return the number and channel of the spare that waited longest."""
        number = next(iter(self.spares))
        return number, self.spares.pop(number)


@dataclass
class Instance:
    """An instance, from its request to the end of its process."""

    id: str
    host: str
    template: str
    deadline: float
    item: dict[str, Any]
    boot_by: float
    process: int = 0
    """Its number at its template; 0 while it waits for one."""
    dead_spares: int = 0
    """Processes of it that died while they were still spares."""
    reply: tuple[Peer, int] | None = None
    status: str = "starting"
    stoppers: list[tuple[Peer, int]] = field(default_factory=list)
    cause: str = ""

    @property
    def log(self) -> str:
        """The name of its log."""
        return short_name(self.id)

    def assign(
        self, channel: socket.socket, work_dir: str, listener: socket.socket, output: int
    ) -> None:
        """Tell a spare to become this instance.

        Args:
            channel: The spare's.
            work_dir: Its directory; empty where it has mounts of its own.
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
        socket.send_fds(channel, [json.dumps(message).encode()], [listener.fileno(), output])


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

    Raises:
        OSError: The interpreter is gone, its variables are too long, or the node is full.
        ValueError: A variable cannot be one.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES)
    try:
        with theirs:
            process = subprocess.Popen(
                [*setup["python"], "-m", "aenv_ray.runtime.fork.template", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=setup["env"],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
    except (OSError, ValueError):
        ours.close()
        raise
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
