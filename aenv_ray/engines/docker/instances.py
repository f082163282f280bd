"""The instances of one host: which run, and why the others ended.

The daemon's event stream reports that a container ended; the daemon is then asked why, the sandbox
is told, and what is left of the instance is removed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from aenv_ray import logs
from aenv_ray.background_tasks import Tasks
from aenv_ray.engines.base import EndCause, start_failed
from aenv_ray.engines.docker.containers import DAEMON_AWAY, EXPECTED, REMOVED, Containers
from aenv_ray.engines.docker.link import Link
from aenv_ray.engines.door import DoorSandbox
from aenv_ray.engines.node import docker_labels
from aenv_ray.engines.node.docker_client import DaemonRefused
from aenv_ray.engines.node.memory import node_oom_kills
from aenv_ray.errors import FabricUnavailable
from aenv_ray.ids import InstanceId

logger = logging.getLogger(__name__)

BOOT_DEADLINE_S: Final = 60.0
"""A container that does not report within this is ended."""
LAST_REPORT_S: Final = 2.0
"""How long to read the report of a container that has ended: it was sent before the end."""
CAUSE_WAIT_S: Final = 10.0
"""A daemon under load reports late why a container ended."""
SIDECAR: Final = "its sidecar: "
"""Prefix of the cause of an end that began in the sidecar."""
_CLOSE_S: Final = 10.0
_OOM_NOTES: Final = 6
"""A busy node reports an end some seconds late; kills before that have not caused it."""
_SEEN: Final = "{}"
"""Template of the cause of an end that the daemon reported when it happened."""


@dataclass
class DockerInstance:
    """An instance of this host: its main container and perhaps a sidecar."""

    id: InstanceId
    name: str
    """The name of the main container."""
    ended: asyncio.Future[EndCause]
    """Done when it ended, with the cause."""
    ids: dict[str, str] = field(default_factory=dict)
    """The daemon's ids of its containers, by name: an earlier one may have had the same name."""
    started: set[str] = field(default_factory=set)
    """Names of its containers that have been started: one that does not run now has ended."""
    links: dict[str, Link] = field(default_factory=dict)
    """The connections to its containers, by name."""
    sandbox: DoorSandbox | None = None
    has_sidecar: bool = False
    sidecar: DoorSandbox | None = None
    log: str = ""
    out_of_memory: set[str] = field(default_factory=set)
    """Names of its containers for which the daemon reported an out-of-memory kill."""
    killed: set[str] = field(default_factory=set)
    """Names of its containers to which the daemon has sent a signal."""
    removal: asyncio.Task[None] | None = None
    """Finds out why it ended, and removes it."""

    @property
    def sandboxes(self) -> list[DoorSandbox]:
        """The sandboxes of its containers that are connected."""
        return [one for one in (self.sandbox, self.sidecar) if one is not None]


async def await_boot(
    instance: DockerInstance, link: Link, last_log: Callable[[], Awaitable[str]], prefix: str = ""
) -> None:
    """Wait until a container of an instance reports that it is ready.

    Raises:
        SandboxStartFailed: It reported a failure, died, or did not report in time.
    """
    report = asyncio.create_task(link.read_boot_report())
    try:
        async with asyncio.timeout(BOOT_DEADLINE_S):
            futures: set[asyncio.Future[Any]] = {report, instance.ended}
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            # The end can be known first: the daemon reports it on another connection.
            await asyncio.wait([report], timeout=LAST_REPORT_S)
            message = report.result() if report.done() else {}
            if "ready" in message:
                return
            # A container that closes the link without a report is dying; the daemon knows how.
            why = message.get("failed") or await asyncio.shield(instance.ended)
    except ValueError as exc:
        why = EndCause(f"it did not report whether it is ready: {exc}")
    except TimeoutError:
        late = EndCause(f"it was not ready after {BOOT_DEADLINE_S:g} s")
        why = late.with_log(await last_log())
    except OSError as exc:
        try:
            async with asyncio.timeout(CAUSE_WAIT_S):
                why = await asyncio.shield(instance.ended)
        except TimeoutError:
            why = EndCause(f"it does not answer ({exc})").with_log(await last_log())
    finally:
        report.cancel()
        await asyncio.wait([report])
    raise start_failed(instance.id, f"{prefix}{why}")


class DockerInstances:
    """The instances of one host that run or start, and the removal of those that ended."""

    def __init__(self, containers: Containers) -> None:
        self._containers = containers
        self._files = containers.host.files
        self._instances: dict[str, DockerInstance] = {}
        self._removals = Tasks()
        self._oom_kills = deque([node_oom_kills()], maxlen=_OOM_NOTES)
        """How many processes the kernel had killed at the last calls of `note_oom_kills`."""

    # --- the table ------------------------------------------------------------------------------

    def find(self, instance_id: InstanceId) -> DockerInstance | None:
        """Return an instance that runs or starts; None if there is none of that id."""
        return self._instances.get(instance_id)

    def track(self, instance_id: InstanceId, name: str) -> DockerInstance:
        """Add a new instance."""
        ended: asyncio.Future[EndCause] = asyncio.get_running_loop().create_future()
        instance = self._instances[instance_id] = DockerInstance(instance_id, name, ended)
        return instance

    def untrack(self, instance: DockerInstance) -> None:
        """Remove an instance from the table."""
        if self._instances.get(instance.id) is instance:
            del self._instances[instance.id]

    # --- ends -----------------------------------------------------------------------------------

    def on_event(self, event: dict[str, Any]) -> None:
        """Handle an event of the daemon."""
        attributes = event["Actor"]["Attributes"]
        owner = attributes.get(docker_labels.INSTANCE_LABEL, "")
        instance = self._instances.get(owner or attributes.get(docker_labels.SIDECAR_LABEL, ""))
        ids = {} if instance is None else instance.ids
        name = next((name for name, id_ in ids.items() if id_ == event["Actor"]["ID"]), None)
        if instance is None or name is None:
            return
        match event["Action"]:
            case "oom":
                instance.out_of_memory.add(name)
            case "kill":
                instance.killed.add(name)
            case "die":
                self._remove_ended(instance, name)
            case "destroy" if not instance.ended.done() and instance.removal is None:
                cause = self._containers.recorded_cause(name) or EndCause(REMOVED)
                self._finish_removed(instance, name, cause)

    async def find_ended(self) -> None:
        """Handle what ended while the daemon, or its events, were away."""
        labels = (docker_labels.INSTANCE_LABEL, docker_labels.SIDECAR_LABEL)
        rows = {
            row["Names"][0].lstrip("/"): row
            for label in labels
            for row in await self._containers.rows(label, running_only=False)
        }
        for instance in list(self._instances.values()):
            for name in instance.started:  # for others, the request that starts them fails
                row = rows.get(name)
                if row is None:
                    cause = EndCause(DAEMON_AWAY.format("its container was removed"))
                    self._finish_removed(instance, name, cause)
                elif row["State"] != "running":
                    self._remove_ended(instance, name, DAEMON_AWAY)

    def _finish_removed(self, instance: DockerInstance, name: str, cause: EndCause) -> None:
        self.finish(instance, _prefixed(instance, name, cause))
        if instance.has_sidecar:
            self._removals.spawn(self.discard(instance))

    async def remove_failed(self, instance: DockerInstance) -> None:
        """Remove an instance that failed to start, even if this task is cancelled."""
        await asyncio.shield(self._removals.spawn(self.discard(instance)))

    async def discard(self, instance: DockerInstance) -> None:
        """Remove containers and files; the janitor removes what the daemon fails to."""
        try:
            await self._containers.remove_all(instance.name, has_sidecar=instance.has_sidecar)
        except FabricUnavailable as exc:
            extra = logs.of_instance(instance.id)
            logger.warning("%s is left to the janitor: %s", instance.name, exc, extra=extra)
            return
        self._files.clean(instance.name)

    def _remove_ended(self, instance: DockerInstance, name: str, template: str = _SEEN) -> None:
        """Find out why a container died, tell the sandbox, and remove the instance."""
        if instance.removal is None and not instance.ended.done():
            instance.removal = self._removals.spawn(
                self._explain_and_remove(instance, name, template)
            )

    async def _explain_and_remove(self, instance: DockerInstance, name: str, template: str) -> None:
        is_seen, may_lack_memory = template == _SEEN, self._may_node_lack_memory(instance)
        try:
            details = await self._containers.details(name)
        except DaemonRefused:
            cause = self._containers.recorded_cause(name) or EndCause(REMOVED)
        except FabricUnavailable as exc:
            unknown = EndCause(f"it ended, and why is not known: {exc}")
            cause = self._containers.recorded_cause(name) or unknown
        else:
            cause = self._containers.cause(
                name,
                details,
                instance.out_of_memory,
                is_seen=is_seen,
                may_be_killed=not is_seen or name in instance.killed,
                may_lack_memory=may_lack_memory,
            )
            if details["State"]["Status"] != "removing":
                instance.log = await self._containers.last_log(name)
        if self._containers.recorded_cause(name) is None:  # otherwise the janitor ended it
            cause = replace(cause, text=template.format(cause))
        self.finish(instance, _prefixed(instance, name, cause))
        await self._containers.wait_for_readers(name)
        await self.discard(instance)

    def note_oom_kills(self) -> None:
        """Note how many processes the node's kernel has killed; called every few seconds."""
        self._oom_kills.append(node_oom_kills())

    def _may_node_lack_memory(self, instance: DockerInstance) -> bool:
        """Return whether the kernel has lately killed a process that may be of no instance's limit.

        An agent can make the kernel kill a process of its own containers at any time.
        """
        return not instance.out_of_memory and node_oom_kills() != self._oom_kills[0]

    def finish(self, instance: DockerInstance, cause: EndCause) -> None:
        """Record that an instance ended and tell its sandboxes; the first cause counts."""
        if instance.ended.done():
            return
        if cause.text not in EXPECTED:
            cause = cause.with_log(instance.log)
        instance.ended.set_result(cause)
        self.untrack(instance)
        for sandbox in instance.sandboxes:
            sandbox.end(cause)

    def abandon(self, instance: DockerInstance, cause: EndCause) -> None:
        """End an instance that cannot be reached any more, although it may still run."""
        if not instance.ended.done():
            self.finish(instance, cause)
            self._removals.spawn(self.discard(instance))

    async def settle(self) -> None:
        """Wait for removals and disconnect from the instances that run; they keep running."""
        await self._removals.settle(_CLOSE_S)  # the janitor does the rest
        for instance in list(self._instances.values()):
            for sandbox in instance.sandboxes:
                await sandbox.close()
        self._instances.clear()


def _prefixed(instance: DockerInstance, name: str, cause: EndCause) -> EndCause:
    """Return a cause, prefixed if it is that of the sidecar."""
    return cause if name == instance.name or cause.text in EXPECTED else of_sidecar(cause)


def of_sidecar(cause: EndCause) -> EndCause:
    """Return a cause that names the sidecar."""
    return replace(cause, text=f"{SIDECAR}{cause}")
