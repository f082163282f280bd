"""What a host knows of its containers: which it has, and what became of them.

The daemon's event stream tells that one ended; why is asked of the daemon, and told to whoever
waits. What ended is removed, whoever asked for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final

from aenv_ray.engines.docker import janitor as docker_janitor
from aenv_ray.engines.docker.containers import DAEMON_AWAY, REMOVED, Containers
from aenv_ray.engines.docker.files import DockerFiles, second_name
from aenv_ray.engines.docker.instance import Instance, with_log
from aenv_ray.engines.docker.sidecar import SECOND
from aenv_ray.engines.node import docker_labels
from aenv_ray.engines.node.docker_client import DaemonRefused
from aenv_ray.errors import FabricUnavailable
from aenv_ray.ids import InstanceId

logger = logging.getLogger(__name__)

_CLOSE_S: Final = 10.0
_EXPECTED: Final = (docker_janitor.TTL_PASSED, docker_janitor.HOST_GONE)
"""Ends that no log explains."""


class Instances:
    """The instances of one host that run, and the ends of those that do not any more.

    Args:
        containers: Of this host.
        files: Of its node.
    """

    def __init__(self, containers: Containers, files: DockerFiles) -> None:
        self._containers = containers
        self._files = files
        self._instances: dict[str, Instance] = {}
        self._removals: set[asyncio.Task[None]] = set()

    # --- which there are ------------------------------------------------------------------------

    def find(self, instance_id: InstanceId) -> Instance | None:
        """Return one that runs, or is being started."""
        return self._instances.get(instance_id)

    def track(self, instance_id: InstanceId, name: str) -> Instance:
        """Take in a new one."""
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        instance = self._instances[instance_id] = Instance(instance_id, name, ended)
        return instance

    def untrack(self, instance: Instance) -> None:
        """Forget one."""
        if self._instances.get(instance.id) is instance:
            del self._instances[instance.id]

    # --- how they end ---------------------------------------------------------------------------

    def on_event(self, event: dict[str, Any]) -> None:
        """Take in what the daemon tells."""
        attributes = event["Actor"]["Attributes"]
        of_first = attributes.get(docker_labels.INSTANCE_LABEL, "")
        instance = self._instances.get(of_first or attributes.get(docker_labels.SIDECAR_LABEL, ""))
        own = {"": ""} if instance is None else {
            instance.container_id: instance.name,
            instance.second_id: second_name(instance.name),
        }  # fmt: skip
        name = own.get(event["Actor"]["ID"])
        if instance is None or name is None:
            return
        match event["Action"]:
            case "oom":
                instance.out_of_memory.add(name)
            case "die":
                self._bury(instance, name)
            case "destroy" if not instance.ended.done() and instance.burial is None:
                self.finish(instance, _named(instance, name, self._files.cause(name) or REMOVED))
                if instance.has_second:
                    self._in_background(self.discard(instance))

    async def find_ended(self) -> None:
        """End what ended while the daemon, or its events, were away."""
        labels = (docker_labels.INSTANCE_LABEL, docker_labels.SIDECAR_LABEL)
        rows = {
            row["Names"][0].lstrip("/"): row
            for label in labels
            for row in await self._containers.rows(label, running_only=False)
        }
        for instance in list(self._instances.values()):
            for name in instance.started:  # of another, whoever starts it finds out
                row = rows.get(name)
                if row is None:
                    cause = DAEMON_AWAY.format("its container was removed")
                    self.finish(instance, _named(instance, name, cause))
                    if instance.has_second:
                        self._in_background(self.discard(instance))
                elif row["State"] != "running":
                    self._bury(instance, name, DAEMON_AWAY)

    async def remove_surely(self, instance: Instance) -> None:
        """Remove what failed to start, also when this task is being cancelled."""
        await asyncio.shield(self._in_background(self.discard(instance)))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do what must be done whoever waits for it; `settle` lets it finish."""
        task = asyncio.create_task(work)
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)
        return task

    async def discard(self, instance: Instance) -> None:
        """Remove what there is of one; the janitor removes what the daemon would not."""
        try:
            await self._containers.remove_all(instance.name, has_second=instance.has_second)
        except FabricUnavailable as exc:
            logger.warning("%s is left to the janitor: %s", instance.name, exc)
            return
        self._files.clean(instance.name)

    def _bury(self, instance: Instance, name: str, around: str = "{}") -> None:
        """Find out why a container of an instance died, tell, and remove what there is of it."""
        if instance.burial is None and not instance.ended.done():
            instance.burial = self._in_background(self._inquire(instance, name, around))

    async def _inquire(self, instance: Instance, name: str, around: str) -> None:
        try:
            details = await self._containers.details(name)
            cause = self._containers.cause(name, details, instance.out_of_memory)
            if details["State"]["Status"] != "removing":
                instance.log = await self._containers.log(name)
        except (DaemonRefused, FabricUnavailable):
            cause = self._files.cause(name) or REMOVED
        if self._files.cause(name) is None:  # else it is the janitor's word
            cause = around.format(cause)
        self.finish(instance, _named(instance, name, cause))
        await self._containers.let_readers_finish(name)
        await self.discard(instance)

    def finish(self, instance: Instance, cause: str) -> None:
        """Tell that a sandbox ended; the first cause stays."""
        if instance.ended.done():
            return
        if cause not in _EXPECTED:
            cause = with_log(cause, instance.log)
        instance.ended.set_result(cause)
        self.untrack(instance)
        for sandbox in (instance.sandbox, instance.second):
            if sandbox is not None:
                sandbox.end(cause)

    def forsake(self, instance: Instance, cause: str) -> None:
        """End what cannot be reached any more, though it may run still."""
        if not instance.ended.done():
            self.finish(instance, cause)
            self._in_background(self.discard(instance))

    async def settle(self) -> None:
        """Let removals finish, and forget everything; what runs goes on."""
        if self._removals:
            await asyncio.wait(self._removals, timeout=_CLOSE_S)  # the janitor does the rest
        for instance in list(self._instances.values()):
            for sandbox in (instance.sandbox, instance.second):
                if sandbox is not None:
                    await sandbox.close()
        self._instances.clear()


def _named(instance: Instance, name: str, cause: str) -> str:
    """Return a cause of which it is said when it is that of the second container."""
    return cause if name == instance.name or cause in _EXPECTED else SECOND + cause
