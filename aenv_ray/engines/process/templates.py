"""The template processes of a launcher and the instances forked from them.

A template (`aenv_ray.runtime.fork.template`) has loaded the code of one project. It forks *spare*
processes, each of which becomes an instance when the launcher assigns it one.

A template runs the project's code, so nothing that it says is taken for granted. The launcher takes
the isolation from the jailer's report, which comes before that code. It makes the channels to the
spares itself and accepts no descriptor. It learns from the kernel which process is at the other end
of a channel and when that process ends, and ends it without the template's help.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from aenv_ray.engines.node import caches
from aenv_ray.engines.node.directory import short_name
from aenv_ray.engines.node.memory import DEFAULT_LIMIT_SHARE
from aenv_ray.engines.process.cgroups import CgroupUnavailable, SandboxGroups
from aenv_ray.engines.process.forks import (
    PACKET_BYTES,
    Fork,
    InstanceProcess,
    cause_of,
    limit_resources,
    new_channel,
    open_process,
    receive_from_fork,
)
from aenv_ray.engines.process.logs import Logs
from aenv_ray.engines.process.peers import Peer, Peers
from aenv_ray.engines.process.reports import (
    Booted,
    Exited,
    Failed,
    Isolated,
    JailRefused,
    NoSpare,
    SpareReady,
    TemplateReady,
    read_fork_report,
    read_template_report,
)
from aenv_ray.engines.process.resource_watch import read_node
from aenv_ray.files import FileLock
from aenv_ray.runtime.fork.jail_spec import MAX_PROCESSES

TEMPLATE_DEADLINE_S: Final = 180.0
"""A template that has not loaded the project's code within this is ended."""
IDLE_TEMPLATE_S: Final = 600.0
"""A template is ended after this long without instances; a new one takes about half a second."""
MAX_TEMPLATES: Final = 32
SPARES: Final = 3
"""Spare processes of a template: they hide the time of a fork from creates in quick succession."""
SPARE_PAUSE_S: Final = 5.0
"""After a spare could not be created, or died, none is ordered ahead for this long."""
SPARE_DELAY_S: Final = 0.006
"""While a spare is left, ordering another is delayed by this: a fork takes a core for milliseconds
that the create under way and its first call need."""
MAX_ORDERED: Final = 32
"""Spares that are ordered at a time; each takes a descriptor of the launcher and the template."""
SILENT_SWEEPS: Final = 120
"""A template that does not reap a process for this many sweeps hangs: a minute, because sandboxes
that keep all cores busy can delay it, and its end voids all its instances. Counted in sweeps,
because the clock continues while the machine sleeps."""
PATIENT_SWEEPS: Final = 2
"""How many sweeps an end that the kernel does not explain waits for the template to do so."""
PROBE_DEADLINE_S: Final = 20.0
_PACKETS_AT_A_TIME: Final = 16
"""Read from a template before others are served: its project's code can send without end."""
_JAILER_VARIABLES: Final = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/nonexistent",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Variables of the jailer. The project's variables are not set: it runs outside the sandbox."""
_DIED: Final = "its template process died"
_EXIT_CODE_S: Final = 0.1


@dataclass
class TemplateProcess:
    """One template, as its launcher sees it."""

    key: str
    setup: dict[str, Any]
    process: subprocess.Popen[bytes]
    control: socket.socket
    launched_at: float
    used_at: float
    isolation: dict[str, Any] | None = None
    """How its instances are isolated; None until the jailer has reported it."""
    ready: dict[str, Any] | None = None
    """Its report; None until it has loaded the code."""
    waiting: list[tuple[Peer, int]] = field(default_factory=list)
    """Requests to answer when it is ready or has failed."""
    queued: deque[InstanceProcess] = field(default_factory=deque)
    """Instances that wait for a process, in order of arrival."""
    forked: int = 0
    """Number of processes ordered so far."""
    ordered: dict[int, Fork] = field(default_factory=dict)
    """Ordered processes that are not spares yet. The key is their number, as in the next three."""
    spares: dict[int, Fork] = field(default_factory=dict)
    """Processes that wait for an instance, oldest first."""
    instances: dict[int, Fork] = field(default_factory=dict)
    """Processes that have an instance."""
    ended: dict[int, Fork] = field(default_factory=dict)
    """Processes of instances that have ended, until the template has reaped them."""
    order_at: float = 0.0
    """When to order spares that no instance waits for; 0: nothing is to be ordered."""
    no_spares_before: float = 0.0
    """Until then no spare is ordered ahead, because one could not be created, or died."""
    has_raised: bool = False
    """Whether the project's code raised when it was loaded."""
    lacks_namespaces: bool = False
    """Whether the operator requires namespaces, and the kernel allows none."""
    env_reads: list[str] = field(default_factory=list)
    """If the code failed to load: the variables that it had read."""
    cache_locks: list[FileLock] = field(default_factory=list)
    """Locks that keep the project and its virtual environment in the node's caches."""

    @property
    def log(self) -> str:
        """Return the name of its log."""
        return _log_name(self.key)

    @property
    def is_isolated(self) -> bool:
        """Whether its instances have namespaces."""
        return self.isolation is not None and self.isolation["kind"] == "namespaces"

    @property
    def forks(self) -> list[Fork]:
        """Return its processes that may run."""
        return [*self.ordered.values(), *self.spares.values(), *self.instances.values()]

    def wanted(self, now: float) -> int:
        """Return how many spares to order."""
        if self.ready is None:
            return 0
        ahead = SPARES if now >= self.no_spares_before else 0
        wanted = len(self.queued) + ahead - len(self.spares) - len(self.ordered)
        return min(wanted, MAX_ORDERED - len(self.ordered))

    def take_spare(self) -> Fork:
        """Return the oldest spare."""
        return self.spares.pop(next(iter(self.spares)))


class Templates:
    """The templates of a launcher: started on request, ended when they hang or are idle.

    Args:
        directory: The launcher's directory.
        selector: The launcher's selector.
        peers: The hosts that request templates.
        logs: The logs for the output of templates.
        clock: Returns seconds since the epoch.
        on_spare: Called with a template that has a new spare.
        on_refused: Called with ``(template, why)`` when it could not fork a spare.
        on_boot: Called with ``(template, instance id, error)`` when an instance has started, or
            with an error when it could not.
        on_exit: Called with ``(template, fork)`` when the process of an instance has ended.
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
        on_spare: Callable[[TemplateProcess], None],
        on_refused: Callable[[TemplateProcess, str], None],
        on_boot: Callable[[TemplateProcess, str, str], None],
        on_exit: Callable[[TemplateProcess, Fork], None],
        on_end: Callable[[str, str], None],
        in_use: Callable[[], set[str]],
    ) -> None:
        self._directory = directory
        self._selector = selector
        self._peers = peers
        self._logs = logs
        self._clock = clock
        self._on_spare = on_spare
        self._on_refused = on_refused
        self._on_boot = on_boot
        self._on_exit = on_exit
        self._on_end = on_end
        self._in_use = in_use
        self._templates: dict[str, TemplateProcess] = {}
        self._groups: dict[str, SandboxGroups | CgroupUnavailable] = {}
        """Control groups, by the directory that was delegated."""
        self._probed: str | None = None
        """Why this node cannot isolate; empty if it can, None before it was tried."""

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
                    self.order(template)
                else:
                    wait_s = min(wait_s, template.order_at - now)
        return wait_s

    def order_soon(self, template: TemplateProcess) -> None:
        """Order spares: at once if an instance waits or no spare is left, else a little later."""
        if template.queued or not template.spares:
            self.order(template)
        elif not template.order_at:
            template.order_at = self._clock() + SPARE_DELAY_S

    def order(self, template: TemplateProcess) -> None:
        """Order as many spares as are needed now and soon."""
        template.order_at = 0.0
        wanted = template.wanted(self._clock())
        pairs: list[tuple[Fork, socket.socket]] = []
        try:
            for _ in range(wanted):
                ours, theirs = new_channel()
                template.forked += 1
                pairs.append((Fork(template.forked, ours), theirs))
        except OSError as exc:
            if not pairs:
                why = f"the launcher reached its limit of open files: {exc}"
                self._on_refused(template, why)
        if not pairs:
            return
        order = {"spares": [f.number for f, _ in pairs], "prefault": not template.queued}
        is_sent = False
        with contextlib.suppress(OSError):  # a full socket: the next sweep repeats the order
            fds = [theirs.fileno() for _, theirs in pairs]
            socket.send_fds(template.control, [json.dumps(order).encode()], fds)
            is_sent = True
        for fork, theirs in pairs:
            theirs.close()
            if is_sent:
                template.ordered[fork.number] = fork
                self._listen(template, fork)
            else:
                fork.channel.close()

    def sweep(self, now: float) -> None:
        """End the templates that hang, load for too long or are idle."""
        in_use = self._in_use()
        for groups in self._groups.values():
            if isinstance(groups, SandboxGroups):
                groups.sweep()
        for template in self.all():
            self.order(template)
            if self._hangs(template):
                self._end(template, "it hung: it did not reap a process that had ended")
                continue
            if template.ready is None and now - template.launched_at > TEMPLATE_DEADLINE_S:
                self._end(template, f"not loaded after {TEMPLATE_DEADLINE_S:g} s")
                continue
            idle = template.key not in in_use and template.ready is not None
            if idle and now - template.used_at > IDLE_TEMPLATE_S:
                self._end(template, "idle")

    def _hangs(self, template: TemplateProcess) -> bool:
        """Report the ends that nobody explains; return whether the template hangs."""
        for fork in template.ended.values():
            fork.sweeps += 1
            if fork.sweeps == PATIENT_SWEEPS:
                self._on_exit(template, fork)
        return any(fork.sweeps > SILENT_SWEEPS for fork in template.ended.values())

    def kill(self) -> None:
        """End all templates; their forks end with them."""
        for template in self.all():
            template.process.kill()
        for template in self.all():
            template.process.wait()
        for groups in self._groups.values():
            if isinstance(groups, SandboxGroups):
                groups.close()

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
        groups = self._groups_of(setup)
        problem = str(groups) if isinstance(groups, CgroupUnavailable) else ""
        memory = {
            "has_cgroup": isinstance(groups, SandboxGroups),
            "cgroup_problem": problem,
        }
        first = {
            "jail": setup["jail"] | memory,
            "preload": setup["preload"],
            "python": setup["python"],
            "env": setup["env"],
            "isolated": setup["isolation"] != "none" and not self._probed,
            "reason": self._probed or "switched off by AENV_ISOLATION=none",
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
        locks = (caches.hold(Path(path)) for path in setup["holds"])
        template.cache_locks = [lock for lock in locks if lock is not None]
        self._selector.register(
            template.control, selectors.EVENT_READ, lambda *_: self._on_readable(template)
        )
        return template

    def _groups_of(self, setup: dict[str, Any]) -> SandboxGroups | CgroupUnavailable | None:
        """Return the control groups for a template's instances; None: none were delegated."""
        delegated = setup["cgroup"]
        if not delegated:
            return None
        if delegated not in self._groups:
            try:
                self._groups[delegated] = SandboxGroups(Path(delegated), self._directory.name)
            except CgroupUnavailable as exc:
                self._groups[delegated] = exc
        return self._groups[delegated]

    def _enter_group(self, template: TemplateProcess, fork: Fork) -> None:
        """Limit the memory of a spare by a control group, if one was delegated.

        Raises:
            OSError: The kernel refused it.
        """
        groups = self._groups_of(template.setup)
        if not isinstance(groups, SandboxGroups):
            return
        limit = template.setup["jail"]["memory_bytes"]
        if limit is None:
            node = read_node()
            limit = int(DEFAULT_LIMIT_SHARE * node.total_bytes) if node is not None else sys.maxsize
        name = f"{short_name(template.key)}-{template.process.pid}-{fork.number}"
        fork.group = groups.add(name, fork.pid, memory_bytes=limit, processes=MAX_PROCESSES)

    def _make_room(self) -> None:
        """If there are too many templates, end the one that was unused for longest."""
        in_use = self._in_use()
        idle = [t for t in self._templates.values() if t.key not in in_use and t.ready]
        if len(self._templates) >= MAX_TEMPLATES and idle:
            self._end(min(idle, key=lambda t: t.used_at), "made room")

    def _on_readable(self, template: TemplateProcess) -> None:
        for _ in range(_PACKETS_AT_A_TIME):
            try:
                data = template.control.recv(PACKET_BYTES)  # drops any descriptors
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._end(template, _DIED)
                return
            try:
                self._on_report(template, data)
            except ValueError as exc:
                self._end(template, f"its template process sent an invalid message: {exc}")
            if template.control.fileno() < 0:
                return

    def _on_report(self, template: TemplateProcess, data: bytes) -> None:
        """Act on a report of a template.

        Raises:
            ValueError: It is not a valid report, or it comes at the wrong time.
        """
        is_early = template.isolation is None
        match read_template_report(data):
            case Isolated(isolation) if is_early:
                template.isolation = isolation
            case JailRefused(why) if is_early:
                self._restart_without_jail(template, why)
            case Failed(why, env_reads) if template.ready is None:
                template.env_reads, template.has_raised = env_reads, True
                self._end(template, why)
            case TemplateReady(bare_reason, env_reads) if not is_early and template.ready is None:
                template.ready = {
                    "isolation": template.isolation,
                    "bare_reason": bare_reason,
                    "env_reads": env_reads,
                }
                self.order(template)
                for peer, seq in template.waiting:
                    self._peers.send(peer, {"seq": seq, "ready": template.ready})
                template.waiting.clear()
            case Exited(number, status):
                self._on_status(template, number, status)
            case other:
                raise ValueError(f"not expected now: {type(other).__name__}")

    def _on_status(self, template: TemplateProcess, number: int, status: int) -> None:
        """Note why a process ended; the report may come before the kernel's or after it."""
        fork = template.ended.pop(number, None)
        if fork is not None:
            fork.status = status
            if fork.sweeps < PATIENT_SWEEPS:
                self._on_exit(template, fork)
            return
        fork = template.instances.get(number) or template.spares.get(number)
        if fork is not None:
            fork.status = status
            if fork.pidfd < 0:  # an old kernel, which cannot tell
                self._on_fork_end(template, fork)

    def _restart_without_jail(self, template: TemplateProcess, why: str) -> None:
        """Start a template again without namespaces if this node has none for any project.

        A project could ask for a jail that cannot be built: then only its start fails.
        """
        if template.setup["isolation"] == "required":
            template.lacks_namespaces = True
            self._end(template, f"namespaces are required, but the kernel allows none: {why}")
            return
        if self._probed is None:
            self._probed = self._probe(template.setup)
        if not self._probed:
            self._end(template, f"its sandbox cannot be built: {why}")
            return
        waiting, template.waiting = template.waiting, []
        self._end(template, why)
        for peer, seq in waiting:
            self.request(peer, seq, template.key, template.setup)

    def _probe(self, setup: dict[str, Any]) -> str:
        """Return why this node cannot isolate a project that asks for nothing; empty if it can."""
        empty = {"project": str(self._directory / "root"), "network": setup["jail"]["network"]}
        first = {
            "jail": empty, "preload": False, "isolated": True, "reason": "",
            "python": [sys.executable], "env": {"envNAME": "probe"},
            "scratch": str(self._directory / "root"),
        }  # fmt: skip
        try:
            probe = _start("probe", setup, first, subprocess.DEVNULL, self._clock())
        except OSError as exc:
            return str(exc)
        probe.control.settimeout(PROBE_DEADLINE_S)
        try:
            report = read_template_report(probe.control.recv(PACKET_BYTES))
        except (OSError, ValueError) as exc:
            return f"the attempt failed: {exc}"
        finally:
            probe.control.close()
            probe.process.kill()
            probe.process.wait()
        return report.why if isinstance(report, JailRefused | Failed) else ""

    # --- forks --------------------------------------------------------------------------------

    def _listen(self, template: TemplateProcess, fork: Fork) -> None:
        self._selector.register(
            fork.channel, selectors.EVENT_READ, lambda *_: self._on_channel(template, fork)
        )

    def _close_channel(self, fork: Fork) -> None:
        if fork.channel.fileno() >= 0:
            self._selector.unregister(fork.channel)
            fork.channel.close()

    def _on_channel(self, template: TemplateProcess, fork: Fork) -> None:
        try:
            data, pid = receive_from_fork(fork.channel)
        except BlockingIOError:
            return
        except OSError:
            data, pid = b"", 0
        if not data:
            self._close_channel(fork)
            template.spares.pop(fork.number, None)
            if template.ordered.pop(fork.number, None) is not None:
                self._on_refused(template, "its process ended at once")
            return
        try:
            self._on_fork_report(template, fork, data, pid)
        except ValueError as exc:
            self._end(template, f"a process of its template sent an invalid message: {exc}")

    def _on_fork_report(self, template: TemplateProcess, fork: Fork, data: bytes, pid: int) -> None:
        """Act on a report of a fork.

        Raises:
            ValueError: It is not a valid report, or it comes at the wrong time.
        """
        is_ordered = fork.number in template.ordered
        match read_fork_report(data):
            case SpareReady() if is_ordered:
                del template.ordered[fork.number]
                if self._watch(template, fork, pid):
                    template.spares[fork.number] = fork
                    self._on_spare(template)
                else:
                    self._forget(fork)  # without a channel it ends
                    self._on_refused(template, "it ended at once, or there are too many open files")
            case NoSpare(why) if is_ordered:
                del template.ordered[fork.number]
                self._close_channel(fork)
                self._on_refused(template, why)
            case Booted(error) if fork.instance:
                self._close_channel(fork)
                if not error:
                    self._limit(template, fork)
                self._on_boot(template, fork.instance, error)
            case other:
                raise ValueError(f"not expected now: {type(other).__name__}")

    def _limit(self, template: TemplateProcess, fork: Fork) -> None:
        """Limit an instance that has booted: code of the template can leave its limits out.

        Not earlier: a user namespace that it creates under a limit shares that limit with all forks
        of the template.
        """
        memory_bytes = template.setup["jail"]["memory_bytes"]
        with contextlib.suppress(ProcessLookupError):  # its end is reported next
            if not fork.has_ended():  # then another process may have got its id
                limit_resources(fork.pid, memory_bytes, jailed=template.is_isolated)

    def _watch(self, template: TemplateProcess, fork: Fork, pid: int) -> bool:
        """Watch a process for its end; return whether it still runs.

        Raises:
            ValueError: It is not a process of the template.
        """
        try:
            fork.pid, fork.pidfd = pid, open_process(pid)
            # Another process may have got the id of one that has ended: it has another session.
            if template.is_isolated and os.getsid(pid) != template.process.pid:
                raise ValueError(f"process {pid} is not in its session")
            self._enter_group(template, fork)
        except OSError:  # it has ended, or this process reached its limit of open files
            return False
        if fork.pidfd >= 0:
            self._selector.register(
                fork.pidfd, selectors.EVENT_READ, lambda *_: self._on_fork_end(template, fork)
            )
        return True

    def _on_fork_end(self, template: TemplateProcess, fork: Fork) -> None:
        """Act on the end of a process, which the kernel has reported."""
        if fork.channel.fileno() >= 0:
            self._on_channel(template, fork)  # its last report, which may be why it ended
        status = fork.kernel_status()
        self._forget(fork)
        fork.is_gone = True
        template.spares.pop(fork.number, None)
        if template.instances.pop(fork.number, None) is None:
            template.no_spares_before = self._clock() + SPARE_PAUSE_S
            return
        if status is not None:
            fork.status = status
        if status is not None or fork.status is None:
            template.ended[fork.number] = fork
        if fork.status is not None:
            self._on_exit(template, fork)

    def discard(self, fork: Fork) -> None:
        """End a process that could not become an instance, and free its descriptors."""
        fork.kill()
        self._forget(fork)

    def _forget(self, fork: Fork) -> None:
        self._close_channel(fork)
        if fork.group is not None:
            fork.ran_out_of_memory = fork.group.leave()
            fork.group = None
        if fork.pidfd >= 0:
            with contextlib.suppress(KeyError):
                self._selector.unregister(fork.pidfd)
            os.close(fork.pidfd)
            fork.pidfd = -1

    # --- ends ---------------------------------------------------------------------------------

    def end(self, key: str, why: str) -> None:
        """End a template, and its instances with it."""
        self._end(self._templates[key], why)

    def _end(self, template: TemplateProcess, why: str) -> None:
        if self._templates.get(template.key) is template:
            del self._templates[template.key]
        if template.control.fileno() >= 0:
            self._selector.unregister(template.control)
            template.control.close()
        for fork in template.forks:
            self._forget(fork)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # The socket closes a moment before the exit code, which says more, is available.
            template.process.wait(_EXIT_CODE_S if why is _DIED else 0)
        is_killed_here = template.process.poll() is None
        template.process.kill()
        status = template.process.wait()
        for lock in template.cache_locks:
            lock.close()
        output = self._logs.close(template.log)
        if why is _DIED and not is_killed_here:
            why = f"its template process ended: {cause_of(status)}"
        elif why is not _DIED:
            output = ""
        failed = {
            "failed": f"{why}\n{output}".strip(),
            "env_reads": template.env_reads,
            "raised": template.has_raised,
            "lacks_namespaces": template.lacks_namespaces,
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
        key: The name of the template.
        setup: Contains ``runtime_path``, where the jailer finds this package.
        first: The first message to it.
        output: Descriptor of its log.
        now: Seconds since the epoch.

    Raises:
        OSError: The node is full.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES)
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "aenv_ray.runtime.fork.jailer", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=_JAILER_VARIABLES | {"PYTHONPATH": setup["runtime_path"]},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
    except (OSError, ValueError):
        ours.close()
        raise
    with contextlib.suppress(OSError):  # it died at once: reading from it reports that
        ours.send(json.dumps({"setup": first}).encode())
    ours.setblocking(False)
    return TemplateProcess(key, setup, process, ours, launched_at=now, used_at=now)
