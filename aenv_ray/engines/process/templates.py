"""The template processes of a launcher and the instances forked from them.

A template (`aenv_ray.runtime.fork.template`) has loaded the code of one project. It forks *spare*
processes, each of which becomes an instance when the launcher assigns it one.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from aenv_ray.engines.node.directory import short_name
from aenv_ray.engines.process.logs import Logs
from aenv_ray.engines.process.peers import Peer, Peers
from aenv_ray.errors import InsideCause

TEMPLATE_DEADLINE_S: Final = 180.0
"""A template that has not loaded the project's code within this is ended."""
IDLE_TEMPLATE_S: Final = 600.0
"""A template is ended after this long without instances; a new one takes about half a second."""
MAX_TEMPLATES: Final = 32
SPARES: Final = 3
"""Spare processes of a template: they hide the time of a fork from creates in quick succession."""
SPARE_DELAY_S: Final = 0.006
"""While a spare is left, ordering another is delayed by this: a fork takes a core for milliseconds
that the create under way and its first call need."""
SILENT_SWEEPS: Final = 12
"""A template that was told to end a process and then sends nothing for this many sweeps hangs. They
take 6 s, and an instance may outlive its deadline by 10 s. Counted in sweeps, because the clock
goes on while the machine sleeps."""
PACKET_BYTES: Final = 1 << 20
_DIED: Final = "its template process died"
_EXIT_CODE_S: Final = 0.1


@dataclass
class InstanceProcess:
    """An instance, from its request to the end of its process."""

    id: str
    host: str
    template: str
    """Its key."""
    deadline: float
    item: dict[str, Any]
    """The request."""
    boot_by: float
    number: int = 0
    """Of its process at the template; 0 while the instance waits for one."""
    dead_spares: int = 0
    """Processes assigned to it that died while they were still spares."""
    reply: tuple[Peer, int] | None = None
    """Who asked for it, with the request's number; None once answered."""
    status: str = "starting"
    stoppers: list[tuple[Peer, int]] = field(default_factory=list)
    """Who asked for its end."""
    cause: str = ""
    """Why it is being ended; "" unless the launcher ends it."""
    inside: InsideCause | None = None
    """Set if it is being ended for what happened in it, as for a limit that it exceeded."""
    oom_kills: int = 0
    """How many processes the node had killed for lack of memory when this one started."""

    @property
    def log(self) -> str:
        """Return the name of its log."""
        return short_name(self.id)

    def assign(
        self, channel: socket.socket, work_dir: str, listener: socket.socket, output: int
    ) -> None:
        """Tell a spare to become this instance.

        Args:
            channel: The spare's.
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
        socket.send_fds(channel, [json.dumps(message).encode()], [listener.fileno(), output])


@dataclass
class TemplateProcess:
    """One template, as its launcher sees it."""

    key: str
    setup: dict[str, Any]
    process: subprocess.Popen[bytes]
    control: socket.socket
    launched_at: float
    used_at: float
    ready: dict[str, Any] | None = None
    """Its report; None until it has loaded the code."""
    waiting: list[tuple[Peer, int]] = field(default_factory=list)
    """Requests to answer when it is ready or has failed."""
    queued: deque[InstanceProcess] = field(default_factory=deque)
    """Instances that wait for a process, in order of arrival."""
    spares: dict[int, socket.socket] = field(default_factory=dict)
    """Processes that wait for an instance, by number, oldest first."""
    ordered: int = 0
    """Spares that were ordered and have not arrived."""
    order_at: float = 0.0
    """When to order spares that no instance waits for; 0: nothing is to be ordered."""
    no_spares_before: float = 0.0
    """No spare is ordered ahead until then: one could not be made, or died."""
    instances: dict[int, str] = field(default_factory=dict)
    """Ids of its instances by the numbers of their processes."""
    has_raised: bool = False
    """The project's code raised when it was loaded."""
    env_reads: list[str] = field(default_factory=list)
    """Variables that code which failed to load had read."""

    is_ending: bool = False
    """It was told to end a process since the last sweep."""
    silent_sweeps: int = 0
    """Sweeps with such an order since its last message."""

    @property
    def log(self) -> str:
        """Return the name of its log."""
        return _log_name(self.key)

    @property
    def is_isolated(self) -> bool:
        """Return whether its instances have namespaces."""
        return self.ready is not None and self.ready["isolation"]["kind"] == "namespaces"

    def end(self, number: int) -> None:
        """Order it to end a process with all that the process started."""
        self.is_ending = True
        with contextlib.suppress(OSError):  # a full socket: the next sweep repeats the order
            self.control.send(json.dumps({"kill": number}).encode())

    def hangs(self) -> bool:
        """Return whether it ignores orders to end a process; call this once a sweep."""
        if not self.is_ending:
            return False
        self.is_ending = False
        self.silent_sweeps += 1
        with contextlib.suppress(OSError):  # a full socket: it does not read
            self.control.send(b'{"ping":1}')
        return self.silent_sweeps > SILENT_SWEEPS

    def order_soon(self, now: float) -> None:
        """Order spares: at once if an instance waits or no spare is left, else a little later."""
        if self.queued or not self.spares:
            self.order(now)
        elif not self.order_at:
            self.order_at = now + SPARE_DELAY_S

    def order(self, now: float) -> None:
        """Order as many spares as are needed now and soon."""
        self.order_at = 0.0
        if self.ready is None:
            return
        ahead = SPARES if now >= self.no_spares_before else 0
        wanted = len(self.queued) + ahead - len(self.spares) - self.ordered
        if wanted > 0:
            with contextlib.suppress(OSError):  # a full socket: the next sweep repeats the order
                order = {"spares": wanted, "prefault": not self.queued}
                self.control.send(json.dumps(order).encode())
                self.ordered += wanted

    def take_spare(self) -> tuple[int, socket.socket]:
        """Return number and channel of the oldest spare."""
        number = next(iter(self.spares))
        return number, self.spares.pop(number)


class Templates:
    """The templates of a launcher: started on request, ended when they hang or are idle.

    Args:
        directory: The launcher's.
        selector: The launcher's.
        peers: The hosts that request templates.
        logs: For the output of templates.
        clock: Returns seconds since the epoch.
        on_spare: Called with ``(template, number, channel)`` of a new spare.
        on_message: Called with a template's other messages about its processes.
        on_end: Called with ``(key, why)`` of a template that ended, and its instances with it.
        in_use: Returns the keys of the templates that have instances.
    """

    def __init__(
        self,
        directory: Path,
        selector: selectors.BaseSelector,
        peers: Peers,
        logs: Logs,
        clock: Callable[[], float],
        *,
        on_spare: Callable[[TemplateProcess, int, socket.socket], None],
        on_message: Callable[[TemplateProcess, dict[str, Any]], None],
        on_end: Callable[[str, str], None],
        in_use: Callable[[], set[str]],
    ) -> None:
        self._directory = directory
        self._selector = selector
        self._peers = peers
        self._logs = logs
        self._clock = clock
        self._on_spare = on_spare
        self._on_message = on_message
        self._on_end = on_end
        self._in_use = in_use
        self._templates: dict[str, TemplateProcess] = {}
        self._jail_refusal = ""

    def get(self, key: str) -> TemplateProcess | None:
        """Return a template, ready or not."""
        return self._templates.get(key)

    def all(self) -> list[TemplateProcess]:
        """Return all templates, ready or not."""
        return list(self._templates.values())

    def order_due(self, longest_s: float) -> float:
        """Order the spares that are due; return the seconds until the next order, at most given."""
        wait_s, now = longest_s, self._clock()
        for template in self._templates.values():
            if template.order_at:
                if template.order_at <= now:
                    template.order(now)
                else:
                    wait_s = min(wait_s, template.order_at - now)
        return wait_s

    def sweep(self, now: float) -> None:
        """End the templates that hang, load for too long or are idle."""
        in_use = self._in_use()
        for template in self.all():
            template.order(now)
            if template.hangs():
                self._end(template, "it hung: it did not end a process that it was told to end")
                continue
            if template.ready is None and now - template.launched_at > TEMPLATE_DEADLINE_S:
                self._end(template, f"not loaded after {TEMPLATE_DEADLINE_S:g} s")
                continue
            idle = template.key not in in_use and template.ready is not None
            if idle and now - template.used_at > IDLE_TEMPLATE_S:
                self._end(template, "idle")

    def kill(self) -> None:
        """End all templates; their forks end with them."""
        for template in self.all():
            template.process.kill()
        for template in self.all():
            template.process.wait()

    def request(self, peer: Peer, seq: int, key: str, setup: dict[str, Any]) -> None:
        """Answer a host when a template is ready; start the template if it is missing."""
        template = self._templates.get(key)
        if template is None:
            self._make_room()
            try:
                template = self._launch(key, setup)
            except (OSError, ValueError) as exc:  # variables too long, interpreter missing
                failed = f"its template cannot be started: {exc}"
                self._peers.send(peer, {"seq": seq, "failed": failed, "env_reads": []})
                return
        template.used_at = self._clock()
        if template.ready is not None:
            self._peers.send(peer, {"seq": seq, "ready": template.ready})
        else:
            template.waiting.append((peer, seq))

    def _launch(self, key: str, setup: dict[str, Any]) -> TemplateProcess:
        first = {
            "jail": setup["jail"],
            "preload": setup["preload"],
            "isolated": setup["isolation"] != "none" and not self._jail_refusal,
            "reason": self._jail_refusal or "switched off by AENV_ISOLATION=none",
            "scratch": str(self._directory / "root"),
        }
        output = self._logs.open(_log_name(key))
        try:
            template = _start(key, setup, first, output, self._clock())
        except (OSError, ValueError):
            self._logs.discard(_log_name(key))
            raise
        finally:
            os.close(output)
        self._templates[key] = template
        self._selector.register(
            template.control, selectors.EVENT_READ, lambda *_: self._on_readable(template)
        )
        return template

    def _make_room(self) -> None:
        """If there are too many templates, end the one that was unused for longest."""
        in_use = self._in_use()
        idle = [t for t in self._templates.values() if t.key not in in_use and t.ready]
        if len(self._templates) >= MAX_TEMPLATES and idle:
            self._end(min(idle, key=lambda t: t.used_at), "made room")

    def _on_readable(self, template: TemplateProcess) -> None:
        while True:
            fds: list[int] = []
            try:
                data, fds, _, _ = socket.recv_fds(template.control, PACKET_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._end(template, _DIED)
                return
            try:
                self._on_packet(template, json.loads(data), fds)
            except (ValueError, KeyError, TypeError, AttributeError) as exc:
                # The project's code can write to this socket; invalid data ends only its template.
                self._end(template, f"its template process sent an invalid message: {exc!r}")
            if template.control.fileno() < 0:
                return

    def _on_packet(
        self, template: TemplateProcess, message: dict[str, Any], fds: list[int]
    ) -> None:
        template.silent_sweeps = 0
        if "spare" in message and not fds:  # the kernel drops descriptors beyond the limit
            message = {"no_spare": "the launcher reached its limit of open files"}
        if fds:
            self._on_spare(template, message["spare"], socket.socket(fileno=fds[0]))
        else:
            self._on_report(template, message)

    def _on_report(self, template: TemplateProcess, message: dict[str, Any]) -> None:
        if "ready" in message:
            template.ready = message["ready"]
            template.order(self._clock())
            for peer, seq in template.waiting:
                self._peers.send(peer, {"seq": seq, "ready": template.ready})
            template.waiting.clear()
        elif "failed" in message:
            template.env_reads = message.get("env_reads", [])
            template.has_raised = True
            self._end(template, message["failed"])
        elif "jail_unavailable" in message:
            self._restart_without_jail(template, message["jail_unavailable"])
        else:
            self._on_message(template, message)

    def _restart_without_jail(self, template: TemplateProcess, reason: str) -> None:
        """Start the template again without namespaces; the facts of its instances say so."""
        waiting, setup = list(template.waiting), template.setup
        template.waiting.clear()
        if setup["isolation"] == "required":
            template.waiting = waiting
            self._end(template, f"namespaces are required, but: {reason}")
            return
        self._end(template, reason)
        self._jail_refusal = reason
        for peer, seq in waiting:
            self.request(peer, seq, template.key, setup)

    def _end(self, template: TemplateProcess, why: str) -> None:
        if self._templates.get(template.key) is template:
            del self._templates[template.key]
        if template.control.fileno() >= 0:
            self._selector.unregister(template.control)
            template.control.close()
        for channel in template.spares.values():
            channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # The socket closes a moment before the exit code, which says more, is available.
            template.process.wait(_EXIT_CODE_S if why is _DIED else 0)
        is_killed_here = template.process.poll() is None
        template.process.kill()
        status = template.process.wait()
        output = self._logs.close(template.log)
        if why is _DIED and not is_killed_here:
            why = f"its template process ended: {cause_of(status)}"
        elif why is not _DIED:
            output = ""
        failed = {
            "failed": f"{why}\n{output}".strip(),
            "env_reads": template.env_reads,
            "raised": template.has_raised,
        }
        for peer, seq in template.waiting:
            self._peers.send(peer, {"seq": seq, **failed})
        self._on_end(template.key, why)


def _log_name(key: str) -> str:
    return f"template-{short_name(key)}"


def _start(
    key: str, setup: dict[str, Any], first: dict[str, Any], output: int, now: float
) -> TemplateProcess:
    """Start a template process.

    Args:
        key: Its name.
        setup: Contains its ``python`` command and its variables, ``env``.
        first: The first message to it.
        output: Descriptor of its log.
        now: Seconds since the epoch.

    Raises:
        OSError: The interpreter is missing, its variables are too long, or the node is full.
        ValueError: A variable contains a null character.
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
    with contextlib.suppress(OSError):  # it died at once: reading from it reports that
        ours.send(json.dumps({"setup": first}).encode())
    ours.setblocking(False)
    return TemplateProcess(key, setup, process, ours, launched_at=now, used_at=now)


def node_oom_kills() -> int:
    """Return how many processes the node's kernel has killed for lack of memory; Linux only."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/vmstat").read_text().split("oom_kill ")[1].split("\n")[0])
    return 0


def inside_of(status: int, *, isolated: bool, oom_kills_before: int) -> InsideCause | None:
    """Return what inside a sandbox ended its process; None if it was ended from outside.

    Args:
        status: Its exit code or negated signal.
        isolated: It was process 1 of a pid namespace, which no signal from inside kills: SIGKILL
            came from outside, for example because the node had no memory left.
        oom_kills_before: `node_oom_kills` when it started; used without isolation, where its own
            processes can send SIGKILL too.
    """
    if status >= 0:
        return InsideCause.EXIT
    if status == -signal.SIGKILL and (isolated or node_oom_kills() != oom_kills_before):
        return None
    return InsideCause.SIGNAL


def cause_of(status: int) -> str:
    """Describe how a process ended, from its exit code or its negated signal."""
    if status >= 0:
        return f"its process exited with code {status}"
    with contextlib.suppress(ValueError):
        return f"its process was killed by {signal.Signals(-status).name}"
    return f"its process was killed by signal {-status}"
