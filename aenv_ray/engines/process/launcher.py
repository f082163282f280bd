"""The node's launcher: a small process that owns the sandboxes of the process engine.

``python -m aenv_ray.engines.process.launcher DIR [GRACE_S]`` runs in its own session, so that
neither the death of a host actor nor Ray killing a worker's process group reaches it. It is
single-threaded, imports little, and decides only deadlines. Hosts connect to its Unix socket and
send one JSON object a line:

    {"op": "hello", "host": id, "owner_pid": n}    claim the instances of that host
    {"op": "template", "key": k, "setup": …}       start the template unless it runs
    {"op": "start", "items": […]}                  fork instances
    {"op": "stop", "ids": […]}                     end instances
    {"op": "deadline", "id": i, "deadline": t}     move a deadline
    {"op": "list"}                                 list what runs
    {"op": "find", "id": i}                        look up one instance

Every message carries a ``"seq"``, which its answers repeat (one answer, or one for each item or
id). ``{"event": "exited", …}`` is sent when an instance of the host ends.

Guarantees (invariant 3): an instance ends at its deadline; when its host stays away for
`ADOPTION_GRACE_S`; when the owner of the launcher (the raylet) is gone; and when the launcher
itself dies, because its templates die with it and their forks with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import Any, Final

from aenv_ray.clock import Clock, SystemClock
from aenv_ray.daemon import detach, raise_file_limit
from aenv_ray.engines.node.directory import LOCK, remove_stale, remove_tree, short_name, vacate
from aenv_ray.engines.node.memory import node_oom_kills
from aenv_ray.engines.process.forks import Fork, InstanceProcess, cause_of, inside_of
from aenv_ray.engines.process.logs import Logs
from aenv_ray.engines.process.peers import Peer, Peers
from aenv_ray.engines.process.resource_watch import ResourceWatch, Watched
from aenv_ray.engines.process.templates import (
    SPARE_PAUSE_S,
    TemplateProcess,
    Templates,
)
from aenv_ray.errors import InsideCause
from aenv_ray.files import FileLock

ADOPTION_GRACE_S: Final = 30.0
"""A restarted host actor is back within a second or two; Ray gives a worker a minute to start."""
IDLE_EXIT_S: Final = 60.0
"""Without hosts and instances, the launcher exits after this long."""
BOOT_DEADLINE_S: Final = 60.0
"""A forked instance that has not reported success within this is ended."""
MAX_DEAD_SPARES: Final = 3
"""A start fails when this many processes died before they became the instance."""
SWEEP_S: Final = 0.5
MAX_UNREPORTED: Final = 4096
"""Maximum number of ends that are remembered for hosts that are away."""
TTL_PASSED: Final = "its TTL passed"
HOST_GONE: Final = "its host is gone"
_LOCK_DEADLINE_S: Final = 0.2
"""A process that checks whether the lock is held holds it for a moment."""


class InstanceFiles:
    """A launcher's files for its instances: sockets, logs, work directories.

    Args:
        directory: The launcher's directory.
    """

    def __init__(self, directory: Path) -> None:
        self._sockets = directory / "s"
        self._logs = directory / "log"
        self._work = directory / "work"
        self._root = directory / "root"

    def prepare(self) -> None:
        """Create the directories."""
        for path in (self._sockets, self._logs, self._work, self._root):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def clear(self) -> None:
        """Remove the files of an earlier launcher that was killed; its instances died with it."""
        for path in (self._sockets, self._logs, self._work):
            for entry in path.iterdir():
                if entry.is_dir():
                    remove_tree(entry)
                else:
                    entry.unlink(missing_ok=True)

    def listen(self, instance_id: str) -> socket.socket:
        """Return a listening socket for an instance; clients can connect at once."""
        path = self._sockets / short_name(instance_id)
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(path))
            listener.listen(16)
        except OSError:
            listener.close()
            raise
        return listener

    def make_work_dir(self, instance_id: str) -> Path:
        """Create the work directory of an instance without namespaces."""
        path = self._work / short_name(instance_id)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def clean(self, instance_id: str) -> None:
        """Remove an instance's socket and work directory."""
        name = short_name(instance_id)
        (self._sockets / name).unlink(missing_ok=True)
        work = self._work / name
        if work.exists():
            remove_tree(work)


class Launcher:
    """The event loop.

    Args:
        directory: Directory for its socket, and for the sockets and logs of instances.
        clock: Wall-clock seconds; deadlines are compared across processes.
        grace_s: How long instances outlive the connection of their host.
    """

    def __init__(
        self, directory: Path, clock: Clock | None = None, grace_s: float = ADOPTION_GRACE_S
    ) -> None:
        self._directory = directory
        self._grace_s = grace_s
        self._clock = (clock or SystemClock()).now
        self._selector = selectors.DefaultSelector()
        self._instances: dict[str, InstanceProcess] = {}
        self._files = InstanceFiles(directory)
        self._logs = Logs(self._selector, directory / "log")
        self._peers = Peers(self._selector, self._on_message, self._on_away)
        self._templates = Templates(
            directory, self._selector, self._peers, self._logs, self._clock,
            on_spare=self._on_spare, on_refused=self._on_refused, on_boot=self._on_boot,
            on_exit=self._on_exit, on_end=self._on_template_end, in_use=self._used_templates,
        )  # fmt: skip
        self._resources = ResourceWatch(self._watched)
        self._away: dict[str, float] = {}
        self._unreported: dict[str, dict[str, Any]] = {}
        """The ends of instances whose host was away, by id."""
        self._owner = -1
        self._quiet_since = self._clock()
        self._stopping = False

    def run(self) -> None:
        """Serve until idle, terminated, or without owner."""
        listener = socket.socket(socket.AF_UNIX)
        path = self._directory / "launcher.sock"
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen(256)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._peers.accept)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._terminate)
        next_sweep = 0.0
        try:
            while not self._stopping:
                for key, events in self._selector.select(self._templates.order_due(SWEEP_S)):
                    # An earlier event of this batch may have closed it.
                    if self._selector.get_map().get(key.fd) is key:
                        key.data(key.fileobj, events)
                if self._clock() >= next_sweep:
                    self._sweep()
                    next_sweep = self._clock() + SWEEP_S
        finally:
            self._close(path)

    def _terminate(self, *_: object) -> None:
        self._stopping = True

    def _close(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._templates.kill()
        kill_stragglers()
        for instance in list(self._instances.values()):
            self._files.clean(instance.id)

    # --- peers --------------------------------------------------------------------------------

    def _on_away(self, host: str) -> None:
        self._away[host] = self._clock()

    def _on_message(self, peer: Peer, message: dict[str, Any]) -> None:
        seq = message["seq"]
        match message["op"]:
            case "hello":
                self._hello(peer, seq, message)
            case "template":
                self._templates.request(peer, seq, message["key"], message["setup"])
            case "start":
                for item in message["items"]:
                    self._start(peer, seq, item)
                for template in map(self._templates.get, {i["template"] for i in message["items"]}):
                    if template is not None:
                        self._templates.order_soon(template)
            case "stop":
                for instance_id in message["ids"]:
                    self._stop(instance_id, "released", (peer, seq))
            case "deadline":
                instance = self._instances.get(message["id"])
                if instance is not None:
                    instance.deadline = message["deadline"]
                self._peers.send(peer, {"seq": seq, "known": instance is not None})
            case "list":
                rows = [self._row(instance) for instance in self._instances.values()]
                self._peers.send(peer, {"seq": seq, "instances": rows})
            case "find":
                instance = self._instances.get(message["id"])
                row = None if instance is None else self._row(instance)
                ended = self._unreported.get(message["id"])
                if instance is not None and instance.cause:  # its process is being ended
                    ended = {"cause": instance.cause, "inside": instance.inside, "log": ""}
                self._peers.send(peer, {"seq": seq, "instance": row, "ended": ended})

    def _hello(self, peer: Peer, seq: int, message: dict[str, Any]) -> None:
        peer.host = message["host"]
        self._away.pop(peer.host, None)
        if self._owner < 0 and message.get("owner_pid") and hasattr(os, "pidfd_open"):
            try:
                self._owner = os.pidfd_open(message["owner_pid"])
                self._selector.register(self._owner, selectors.EVENT_READ, self._owner_gone)
            except ProcessLookupError:
                self._owner_gone()
            except OSError:
                pass  # a kernel without pidfds: instances still end with their host or deadline
        self._peers.send(peer, {"seq": seq, "pid": os.getpid()})

    def _owner_gone(self, *_: object) -> None:
        self._stopping = True

    def _row(self, instance: InstanceProcess) -> dict[str, Any]:
        return {
            "id": instance.id, "host": instance.host, "status": instance.status,
            "deadline": instance.deadline, "mode": instance.item["mode"],
            "isolation": self._isolation_of(instance),
        }  # fmt: skip

    def _isolation_of(self, instance: InstanceProcess) -> dict[str, Any]:
        template = self._templates.get(instance.template)
        return template.ready["isolation"] if template is not None and template.ready else {}

    # --- templates ----------------------------------------------------------------------------

    def _on_spare(self, template: TemplateProcess) -> None:
        self._assign_spares(template)
        if template.queued:
            self._templates.order(template)

    def _on_refused(self, template: TemplateProcess, why: str) -> None:
        template.no_spares_before = self._clock() + SPARE_PAUSE_S
        if template.queued:
            self._fail_start(template.queued.popleft(), f"fork: {why}")

    def _on_boot(self, template: TemplateProcess, instance_id: str, error: str) -> None:
        instance = self._instances.get(instance_id)
        if instance is None or instance.template != template.key:
            return  # it has ended meanwhile
        if not error:
            self._answer_start(instance.id, "")
        else:
            # The host is told once it is gone: a failed start leaves nothing behind.
            instance.status, instance.cause = "failed", error
            self._stop(instance.id, instance.cause)

    def _on_exit(self, template: TemplateProcess, fork: Fork) -> None:
        instance = self._instances.get(fork.instance)
        if instance is None or instance.fork is not fork:
            return
        if fork.status == -signal.SIGKILL and template.process.poll() is not None:
            return  # the kernel killed it with its template, whose end comes next, with the cause
        if self._died_as_a_spare(template, instance):
            instance.dead_spares += 1
            instance.fork = None
            self._logs.discard(instance.log)
            template.queued.appendleft(instance)
            self._assign_spares(template)
            self._templates.order(template)
            return
        cause = cause_of(fork.status)
        inside = inside_of(
            fork.status,
            isolated=template.is_isolated,
            oom_kills_before=instance.oom_kills,
        )
        if fork.ran_out_of_memory:
            cause, inside = f"it needed more memory than its limit ({cause})", InsideCause.MEMORY
        if instance.status == "starting":
            cause = f"{cause}\n{self._logs.tail(template.log)}".strip()
        self._exited(instance.id, cause, inside)

    @staticmethod
    def _died_as_a_spare(template: TemplateProcess, instance: InstanceProcess) -> bool:
        """Return whether its process died before any code of the environment could run in it."""
        is_starting = instance.status == "starting" and not instance.cause
        is_loaded = bool(template.setup["preload"])
        return is_starting and is_loaded and instance.dead_spares < MAX_DEAD_SPARES

    def _on_template_end(self, key: str, why: str) -> None:
        for instance in [i for i in self._instances.values() if i.template == key]:
            if instance.status == "starting":
                self._answer_start(instance.id, why)
            self._exited(instance.id, why)

    def _used_templates(self) -> set[str]:
        return {instance.template for instance in self._instances.values()}

    # --- instances ----------------------------------------------------------------------------

    def _start(self, peer: Peer, seq: int, item: dict[str, Any]) -> None:
        instance = InstanceProcess(
            id=item["id"], host=peer.host, template=item["template"], deadline=item["deadline"],
            item=item, boot_by=self._clock() + BOOT_DEADLINE_S, reply=(peer, seq),
        )  # fmt: skip
        if item["id"] in self._instances:
            self._peers.send(
                peer, {"seq": seq, "id": item["id"], "failed": "it is already running"}
            )
            return
        template = self._templates.get(item["template"])
        if template is None or template.ready is None:
            self._peers.send(peer, {"seq": seq, "id": item["id"], "no_template": item["template"]})
            return
        self._instances[instance.id] = instance
        self._unreported.pop(instance.id, None)  # of an earlier one with this id
        template.used_at = self._clock()
        template.queued.append(instance)
        self._assign_spares(template)

    def _assign_spares(self, template: TemplateProcess) -> None:
        """Assign waiting instances to spare processes."""
        while template.queued and template.spares:
            fork, instance = template.take_spare(), template.queued[0]
            try:
                self._assign(template, instance, fork)
            except (BrokenPipeError, ConnectionResetError):
                continue  # the spare died while it waited: take the next
            except OSError as exc:
                self._templates.discard(fork)  # cleaning up needs a descriptor
                self._fail_start(
                    template.queued.popleft(), f"the launcher could not start it: {exc}"
                )
                continue
            template.queued.popleft()
            template.instances[fork.number] = fork

    def _assign(self, template: TemplateProcess, instance: InstanceProcess, fork: Fork) -> None:
        work_dir = ""
        if not template.is_isolated:
            work_dir = str(self._files.make_work_dir(instance.id))
            instance.oom_kills = node_oom_kills()
        output = self._logs.open(instance.log)
        try:
            with self._files.listen(instance.id) as listener:
                instance.assign(fork, work_dir, listener, output)
        except OSError:
            self._logs.discard(instance.log)  # another attempt opens a new one
            raise
        finally:
            os.close(output)

    def _fail_start(self, instance: InstanceProcess, why: str) -> None:
        self._answer_start(instance.id, why)
        self._exited(instance.id, why)

    def _answer_start(self, instance_id: str, error: str) -> None:
        """Tell the host once whether an instance has started; an empty error means success."""
        instance = self._instances.get(instance_id)
        if instance is None or instance.reply is None:
            return
        (peer, seq), instance.reply = instance.reply, None
        if error:
            instance.cause = error
            instance.status = "failed"
            self._peers.send(peer, {"seq": seq, "id": instance_id, "failed": error})
        else:
            instance.status = "running"
            self._peers.send(peer, {"seq": seq, "id": instance_id, "started": True})

    def _stop(
        self,
        instance_id: str,
        cause: str,
        stopper: tuple[Peer, int] | None = None,
        inside: InsideCause | None = None,
    ) -> None:
        """End an instance; the first cause counts.

        Args:
            instance_id: The id of the instance.
            cause: Why, in words.
            stopper: Who asked for it, with the request's number.
            inside: The limit that it exceeded, if it is ended for that.
        """
        instance = self._instances.get(instance_id)
        if instance is None:
            if stopper:
                self._peers.send(
                    stopper[0], {"seq": stopper[1], "id": instance_id, "stopped": True}
                )
            return
        ended_by_itself = instance.fork is not None and instance.fork.has_ended()
        if not instance.cause and not ended_by_itself:
            instance.cause, instance.inside = cause, inside
        if stopper:
            instance.stoppers.append(stopper)
        template = self._templates.get(instance.template)
        if template is None:
            self._exited(instance_id, cause)
        elif instance in template.queued:
            template.queued.remove(instance)
            self._exited(instance_id, cause)
        elif instance.fork is not None:
            instance.fork.kill()

    def _exited(self, instance_id: str, cause: str, inside: InsideCause | None = None) -> None:
        instance = self._instances.get(instance_id)
        if instance is None:
            return
        was_ended = bool(instance.cause)
        if was_ended:
            cause, inside = instance.cause, instance.inside
        is_complete = instance.status == "failed"  # the project's own error message
        error = cause if is_complete else f"it ended while it started: {cause}"
        self._answer_start(instance_id, error)
        del self._instances[instance_id]
        tail = ""
        if was_ended and instance.stoppers:
            self._logs.discard(instance.log)
        else:
            tail = self._logs.close(instance.log)
        self._files.clean(instance.id)
        for peer, seq in instance.stoppers:
            self._peers.send(peer, {"seq": seq, "id": instance_id, "stopped": True})
        report = {
            "event": "exited", "id": instance_id, "cause": cause, "inside": inside, "log": tail,
        }  # fmt: skip
        peers = self._peers.of(instance.host)
        for peer in peers:
            self._peers.send(peer, report)
        if not peers and not instance.stoppers:
            self._unreported[instance_id] = report
            while len(self._unreported) > MAX_UNREPORTED:
                del self._unreported[next(iter(self._unreported))]

    # --- the sweep ----------------------------------------------------------------------------

    def _sweep(self) -> None:
        now = self._clock()
        for instance in list(self._instances.values()):
            away_since = self._away.get(instance.host)
            if instance.deadline <= now:
                self._stop(instance.id, TTL_PASSED)
            elif instance.status == "starting" and instance.boot_by <= now:
                why = f"it was not up after {BOOT_DEADLINE_S:g} s"
                output = self._logs.tail(instance.log).strip()
                self._answer_start(
                    instance.id, f"{why}; the end of its log:\n{output}" if output else why
                )
                self._stop(instance.id, "it did not come up")
            elif away_since is not None and now - away_since > self._grace_s:
                self._stop(instance.id, HOST_GONE)
            elif instance.stoppers or instance.status == "failed":
                self._stop(instance.id, instance.cause)
        for offence in self._resources.check():
            if self._templates.get(offence.id) is not None:
                self._templates.end(offence.id, f"its template was ended: {offence.cause}")
            else:
                self._stop(offence.id, offence.cause, inside=offence.inside)
        with_instances = {instance.host for instance in self._instances.values()}
        self._away = {host: at for host, at in self._away.items() if host in with_instances}
        self._templates.sweep(now)
        kill_stragglers({t.process.pid for t in self._templates.all()})
        if self._peers.is_any_connected or self._instances:
            self._quiet_since = now
        elif now - self._quiet_since > IDLE_EXIT_S:
            self._stopping = True

    def _watched(self) -> list[Watched]:
        """Return the instances that run and the templates, for `ResourceWatch`."""
        found = []
        for template in self._templates.all():
            memory = template.setup["jail"]["memory_bytes"]
            own = frozenset(fork.pid for fork in template.instances.values())
            pid = template.process.pid
            found.append(Watched(template.key, pid, memory, is_isolated=False, without=own))
        for instance in self._instances.values():
            used = self._templates.get(instance.template)
            if instance.fork is not None and used is not None:
                memory = used.setup["jail"]["memory_bytes"]
                found.append(Watched(instance.id, instance.fork.pid, memory, used.is_isolated))
        return found


# --- the process ----------------------------------------------------------------------------------


def _become_subreaper() -> None:
    """Adopt the orphans of dead templates, so that they can be ended; Linux only."""
    if sys.platform == "linux":
        # prctl(PR_SET_CHILD_SUBREAPER, 1); importing `aenv_ray.runtime` would load pydantic.
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def kill_stragglers(known: set[int] | None = None) -> None:
    """Kill and reap the children of this process, which are orphans of dead templates.

    Args:
        known: Pids to leave alone: the templates.
    """
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    with contextlib.suppress(OSError):
        for pid in map(int, listing.read_text().split()):
            if known is None or pid not in known:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def main() -> None:
    """Run the launcher of a directory; exit at once if it has one."""
    directory = Path(sys.argv[1])
    grace_s = float(sys.argv[2]) if len(sys.argv) > 2 else ADOPTION_GRACE_S
    files = InstanceFiles(directory)
    files.prepare()
    directory.chmod(0o711)  # when the launcher is root, a jail is built as nobody
    detach(directory / "launcher.log")
    raise_file_limit()
    try:
        FileLock.acquire(directory / LOCK, _LOCK_DEADLINE_S)  # held until this process ends
    except TimeoutError:
        return  # another launcher runs
    _become_subreaper()
    files.clear()
    remove_stale(directory.parent)
    Launcher(directory, grace_s=grace_s).run()
    vacate(directory)


if __name__ == "__main__":
    main()
