"""The node's launcher: a small process that owns the process engine's sandboxes.

``python -m aenv_ray.engines.process.launcher DIR [GRACE_S]`` runs in a session of its own, so that
neither the death of a host actor nor Ray's killing of a worker's process group reaches it. It is
single-threaded, imports little, and decides nothing but deadlines. Whoever starts sandboxes
connects to its Unix socket and sends one JSON object a line:

    {"op": "hello", "host": id, "owner_pid": n}    claim the instances of that host
    {"op": "template", "key": k, "setup": …}       make sure the template is there
    {"op": "start", "items": […]}                  fork instances
    {"op": "stop", "ids": […]}                     end instances
    {"op": "deadline", "id": i, "deadline": t}     move a deadline
    {"op": "list"}                                 what runs
    {"op": "find", "id": i}                        whether one runs

Every message carries ``"seq"`` and gets one answer with it; ``{"event": "exited", …}`` comes
unasked.

What it guarantees (design D8, invariant 3): an instance ends at its deadline; when its host stays
away for `ADOPTION_GRACE_S`; when the process that owns this launcher (the raylet) is gone; and when
the launcher itself dies, for its templates die with it and everything dies with them.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import Any, Final

from aenv_ray.clock import Clock, SystemClock
from aenv_ray.engines.node.directory import remove_stale, vacate
from aenv_ray.engines.process.launcher_daemon import (
    become_daemon,
    become_subreaper,
    kill_stragglers,
    take_lock,
)
from aenv_ray.engines.process.launcher_files import InstanceFiles
from aenv_ray.engines.process.launcher_logs import Logs
from aenv_ray.engines.process.launcher_peers import Peer, Peers
from aenv_ray.engines.process.launcher_records import Instance, Template, cause_of
from aenv_ray.engines.process.launcher_templates import Templates

ADOPTION_GRACE_S: Final = 30.0
"""A restarted host actor is back within a second or two; Ray gives a worker a minute to start."""
IDLE_EXIT_S: Final = 60.0
"""With no host connected and nothing running, the launcher ends after this long."""
BOOT_DEADLINE_S: Final = 60.0
"""A forked instance says that it is up within this, or is ended."""
MAX_DEAD_SPARES: Final = 3
"""So many processes may die before they become an instance; then its start has failed."""
SPARE_PAUSE_S: Final = 5.0
"""No spare is ordered ahead for this long after one could not be made, or died."""
SWEEP_S: Final = 0.5


class Launcher:
    """The event loop.

    Args:
        directory: Where its socket, the instances' sockets and their logs are.
        clock: Wall-clock seconds; deadlines are compared across processes.
        grace_s: How long instances wait for a host that went away.
    """

    def __init__(
        self, directory: Path, clock: Clock | None = None, grace_s: float = ADOPTION_GRACE_S
    ) -> None:
        self._directory = directory
        self._grace_s = grace_s
        self._clock = (clock or SystemClock()).now
        self._selector = selectors.DefaultSelector()
        self._instances: dict[str, Instance] = {}
        self._files = InstanceFiles(directory)
        self._logs = Logs(self._selector, directory / "log")
        self._peers = Peers(self._selector, self._on_message, self._on_away)
        self._templates = Templates(
            directory, self._selector, self._peers, self._logs, self._clock,
            on_spare=self._on_spare, on_message=self._on_report,
            on_end=self._on_template_end, in_use=self._used_templates,
        )  # fmt: skip
        self._away: dict[str, float] = {}
        self._owner = -1
        self._quiet_since = self._clock()
        self._stopping = False

    def run(self) -> None:
        """Serve until there is nobody left to serve."""
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
                    # What an earlier event of this batch closed has no business here any more.
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
                self._templates.want(peer, seq, message["key"], message["setup"])
            case "start":
                for item in message["items"]:
                    self._start(peer, seq, item)
                for template in map(self._templates.get, {i["template"] for i in message["items"]}):
                    if template is not None:
                        template.order_soon(self._clock())
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
                self._peers.send(peer, {"seq": seq, "instance": row})

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
                pass  # a kernel without them: host and deadline still end what runs here
        self._peers.send(peer, {"seq": seq, "pid": os.getpid()})

    def _owner_gone(self, *_: object) -> None:
        self._stopping = True

    def _row(self, instance: Instance) -> dict[str, Any]:
        return {
            "id": instance.id, "host": instance.host, "status": instance.status,
            "deadline": instance.deadline, "mode": instance.item["mode"],
            "isolation": self._isolation_of(instance),
        }  # fmt: skip

    def _isolation_of(self, instance: Instance) -> dict[str, Any]:
        template = self._templates.get(instance.template)
        return template.ready["isolation"] if template is not None and template.ready else {}

    # --- templates ----------------------------------------------------------------------------

    def _on_spare(self, template: Template, number: int, channel: socket.socket) -> None:
        template.ordered = max(0, template.ordered - 1)
        template.spares[number] = channel
        self._pump(template)

    def _on_report(self, template: Template, message: dict[str, Any]) -> None:
        if "booted" in message or "boot_failed" in message:
            instance = self._instances.get(message.get("booted") or message["boot_failed"])
            if instance is None or instance.template != template.key:  # its own ones only
                return
            if "booted" in message:
                self._booted(instance.id, "")
            else:
                # Its host is told when it is gone: a start that failed has left nothing behind.
                instance.status, instance.cause = "failed", message["error"]
                self._stop(instance.id, instance.cause)
        elif "no_spare" in message:
            template.ordered = max(0, template.ordered - 1)
            template.no_spares_before = self._clock() + SPARE_PAUSE_S
            if template.queued:
                self._could_not(template.queued.popleft(), f"fork: {message['no_spare']}")
        elif "exited" in message:
            self._process_exited(template, message["exited"], cause_of(message["status"]))

    def _process_exited(self, template: Template, number: int, cause: str) -> None:
        instance = self._instances.get(template.instances.pop(number, ""))
        if instance is not None and self._was_never_more_than_a_spare(template, instance):
            instance.dead_spares += 1
            self._logs.discard(instance.log)
            template.queued.appendleft(instance)
            self._pump(template)
            template.order(self._clock())
        elif instance is not None:
            if instance.status == "starting":
                cause = f"{cause}\n{self._logs.tail(template.log)}".strip()
            self._exited(instance.id, cause)
        elif number in template.spares:
            template.spares.pop(number).close()
            template.no_spares_before = self._clock() + SPARE_PAUSE_S

    @staticmethod
    def _was_never_more_than_a_spare(template: Template, instance: Instance) -> bool:
        """Whether its process died before any code of the environment could run in it."""
        is_starting = instance.status == "starting" and not instance.cause
        is_loaded = bool(template.setup["preload"])
        return is_starting and is_loaded and instance.dead_spares < MAX_DEAD_SPARES

    def _on_template_end(self, key: str, why: str) -> None:
        for instance in [i for i in self._instances.values() if i.template == key]:
            if instance.status == "starting":
                self._booted(instance.id, why)
            self._exited(instance.id, why)

    def _used_templates(self) -> set[str]:
        return {instance.template for instance in self._instances.values()}

    # --- instances ----------------------------------------------------------------------------

    def _start(self, peer: Peer, seq: int, item: dict[str, Any]) -> None:
        instance = Instance(
            id=item["id"], host=peer.host, template=item["template"], deadline=item["deadline"],
            item=item, boot_by=self._clock() + BOOT_DEADLINE_S, reply=(peer, seq),
        )  # fmt: skip
        if item["id"] in self._instances:
            self._peers.send(peer, {"seq": seq, "id": item["id"], "failed": "it runs already"})
            return
        template = self._templates.get(item["template"])
        if template is None or template.ready is None:
            self._peers.send(peer, {"seq": seq, "id": item["id"], "no_template": item["template"]})
            return
        self._instances[instance.id] = instance
        template.used_at = self._clock()
        template.queued.append(instance)
        self._pump(template)

    def _pump(self, template: Template) -> None:
        """Give waiting instances to waiting processes."""
        while template.queued and template.spares:
            number, channel = template.take_spare()
            instance = template.queued[0]
            try:
                with channel:
                    self._assign(template, instance, channel)
            except (BrokenPipeError, ConnectionResetError):
                continue  # the process died while it waited: the next one
            except OSError as exc:
                self._could_not(
                    template.queued.popleft(), f"the launcher could not start it: {exc}"
                )
                continue
            template.queued.popleft()
            instance.process = number
            template.instances[number] = instance.id

    def _assign(self, template: Template, instance: Instance, channel: socket.socket) -> None:
        assert template.ready is not None
        jailed = template.ready["isolation"]["kind"] == "namespaces"
        work_dir = "" if jailed else str(self._files.make_work_dir(instance.id))
        output = self._logs.open(instance.log)
        try:
            with self._files.listen(instance.id) as listener:
                instance.assign(channel, work_dir, listener, output)
        except OSError:
            self._logs.discard(instance.log)  # another try makes another
            raise
        finally:
            os.close(output)

    def _could_not(self, instance: Instance, why: str) -> None:
        self._booted(instance.id, why)
        self._exited(instance.id, why)

    def _booted(self, instance_id: str, error: str) -> None:
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

    def _stop(self, instance_id: str, cause: str, stopper: tuple[Peer, int] | None = None) -> None:
        instance = self._instances.get(instance_id)
        if instance is None:
            if stopper:
                self._peers.send(
                    stopper[0], {"seq": stopper[1], "id": instance_id, "stopped": True}
                )
            return
        instance.cause = instance.cause or cause
        if stopper:
            instance.stoppers.append(stopper)
        template = self._templates.get(instance.template)
        if template is None:
            self._exited(instance_id, cause)
        elif instance in template.queued:
            template.queued.remove(instance)
            self._exited(instance_id, cause)
        else:
            template.end(instance.process)

    def _exited(self, instance_id: str, cause: str) -> None:
        instance = self._instances.get(instance_id)
        if instance is None:
            return
        cause = instance.cause or cause
        is_told = instance.status == "failed"  # the project's own words
        self._booted(instance_id, cause if is_told else f"it ended while it started: {cause}")
        del self._instances[instance_id]
        tail = ""
        if instance.stoppers:
            self._logs.discard(instance.log)
        else:
            tail = self._logs.close(instance.log)
        self._files.clean(instance.id)
        for peer, seq in instance.stoppers:
            self._peers.send(peer, {"seq": seq, "id": instance_id, "stopped": True})
        for peer in self._peers.of(instance.host):
            report = {"event": "exited", "id": instance_id, "cause": cause, "log": tail}
            self._peers.send(peer, report)

    # --- the sweep ----------------------------------------------------------------------------

    def _sweep(self) -> None:
        now = self._clock()
        for instance in list(self._instances.values()):
            away_since = self._away.get(instance.host)
            if instance.deadline <= now:
                self._stop(instance.id, "its TTL passed")
            elif instance.status == "starting" and instance.boot_by <= now:
                why = f"it was not up after {BOOT_DEADLINE_S:g} s"
                words = self._logs.tail(instance.log).strip()
                self._booted(instance.id, f"{why}; the end of its log:\n{words}" if words else why)
                self._stop(instance.id, "it did not come up")
            elif away_since is not None and now - away_since > self._grace_s:
                self._stop(instance.id, "its host is gone")
            elif instance.stoppers or instance.status == "failed":
                self._stop(instance.id, instance.cause)
        self._templates.sweep(now)
        kill_stragglers({t.process.pid for t in self._templates.present()})
        if self._peers.present or self._instances:
            self._quiet_since = now
        elif now - self._quiet_since > IDLE_EXIT_S:
            self._stopping = True


def main() -> None:
    """Run the launcher of a directory; a second one there ends at once."""
    directory = Path(sys.argv[1])
    grace_s = float(sys.argv[2]) if len(sys.argv) > 2 else ADOPTION_GRACE_S
    InstanceFiles(directory).prepare()
    directory.chmod(0o711)  # a jail's builder runs as nobody when the launcher is root
    become_daemon(directory)
    if not take_lock(directory):
        return
    become_subreaper()
    InstanceFiles(directory).clear()
    remove_stale(directory.parent)
    Launcher(directory, grace_s=grace_s).run()
    vacate(directory)


if __name__ == "__main__":
    main()
