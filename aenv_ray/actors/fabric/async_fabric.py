"""The fabric for event loops: create, find, list and release instances without blocking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from aenv_ray.actors.calls.handle import EnvHandle
from aenv_ray.actors.controller.draining import NodeState
from aenv_ray.actors.fabric.create_protocol import CreateProtocol, OnQueue
from aenv_ray.actors.fabric.fabric import Fabric
from aenv_ray.actors.fabric.waits import AsyncWaits
from aenv_ray.actors.host.remote_host import RemoteHost
from aenv_ray.actors.ray_shell.ray_api import wait_async
from aenv_ray.bounded_cache import BoundedCache
from aenv_ray.errors import FabricUnavailable
from aenv_ray.models import ActorDensity, InstanceInfo, InstanceSpec
from aenv_ray.project.project import Project
from aenv_ray.units import counted

_MAX_HANDLES: Final = 20_000
GATEWAY_QUEUE_S: Final = 240.0
"""Longest wait of a create for room in a full cluster; shorter than its lease."""
_CONTROL_S: Final = 90.0
"""A controller that died is restarted within this time."""


class CreatedInstance(NamedTuple):
    """A new instance."""

    handle: EnvHandle
    """A handle under the requested id."""
    info: InstanceInfo


class AsyncFabric:
    """The fabric for an event loop. No method occupies a thread while a sandbox starts."""

    def __init__(self, fabric: Fabric) -> None:
        self._controller = fabric.controller
        self._protocol = CreateProtocol(fabric.controller, AsyncWaits(), quotas=fabric.quotas)
        self._handles: BoundedCache[str, EnvHandle] = BoundedCache(_MAX_HANDLES)

    async def create(
        self,
        source: Project,
        specs: Sequence[InstanceSpec],
        density: ActorDensity,
        *,
        queue_s: float = GATEWAY_QUEUE_S,
        subjects: frozenset[str] = frozenset(),
        on_queue: OnQueue = lambda _: None,
    ) -> list[CreatedInstance]:
        """Create instances with the ids of their specs, all or none.

        It waits for room in a full cluster for `queue_s`, but no longer than `GATEWAY_QUEUE_S`.

        If cancelled, instances that were already created are released. `subjects` and `on_queue`
        are as for `CreateProtocol.create`.

        Raises:
            AenvError: As `aenv_ray.create`; no instance remains.
        """
        waits_s = min(queue_s, GATEWAY_QUEUE_S)
        created = await self._protocol.create(
            source,
            specs,
            density,
            waits_s,
            subjects=subjects,
            may_rename=False,
            on_queue=on_queue,
        )
        by_id = {one.spec.instance_id: one for one in created}
        made = []
        for spec in specs:
            one = by_id[spec.instance_id]
            handle = EnvHandle(spec.instance_id, spec.reference, one.host, self._controller)
            self._handles.put(handle.instance_id, handle)
            made.append(CreatedInstance(handle, one.info))
        return made

    async def handle(self, instance_id: str) -> EnvHandle:
        """Return a handle to an instance. Calls to an ended instance raise the cause of its end.

        Raises:
            InstanceNotFound: No host knows the instance.
            FabricUnavailable: The fabric does not answer.
        """
        known = self._handles.get(instance_id)
        if known is not None:
            return known
        host, info = await self._locate(instance_id)
        # The creator knows an instance from a warm pool by the id that it asked for.
        handle = EnvHandle(info.requested_id or info.id, info.reference, host, self._controller)
        self._handles.put(handle.instance_id, handle)
        return handle

    async def _locate(self, instance_id: str) -> tuple[RemoteHost, InstanceInfo]:
        reference = self._controller.locate.remote(instance_id)
        return await wait_async(reference, f"finding {instance_id}", _CONTROL_S)

    async def info(self, instance_id: str) -> InstanceInfo:
        """Return the state of an instance, also for some time after its end.

        Raises:
            InstanceNotFound: No host knows the instance.
            FabricUnavailable: The fabric does not answer.
        """
        known = self._handles.get(instance_id)
        if known is not None:
            try:
                info: InstanceInfo = await wait_async(known.info.remote(), "info", _CONTROL_S)
            except FabricUnavailable:
                self.forget(instance_id)  # its host is gone
            else:
                return info
        return (await self._locate(instance_id))[1]

    def forget(self, instance_id: str) -> None:
        """Look the instance up again next time, because its host is gone."""
        self._handles.pop(instance_id)

    async def release(self, instance_ids: Sequence[str]) -> None:
        """End instances; works in every state, any number of times."""
        reference = self._controller.release.remote(list(instance_ids))
        for instance_id in instance_ids:
            self.forget(instance_id)
        await wait_async(
            reference, f"releasing {counted(len(instance_ids), 'instance')}", _CONTROL_S
        )

    async def list_instances(self) -> list[InstanceInfo]:
        """Return all live instances of the cluster.

        Raises:
            FabricUnavailable: The fabric does not answer.
        """
        reference = self._controller.list_instances.remote()
        return await wait_async(reference, "listing instances", _CONTROL_S)

    async def check_engines(self, engines: Sequence[str]) -> None:
        """Check that some node can run one of these engines, or that one may join.

        Raises:
            FabricUnavailable: None can; the message names the engines that the nodes have. Or no
                node has a host.
        """
        await self._protocol.shared_hosts.look(0, engines)

    async def pools(self) -> dict[str, int]:
        """Return the number of ready sandboxes in warm pools, by environment reference.

        Raises:
            FabricUnavailable: No host answers.
        """
        reference = self._controller.pools.remote()
        return await wait_async(reference, "counting warm pools", _CONTROL_S)

    async def nodes(self) -> list[NodeState]:
        """Return the state of each live node.

        Raises:
            FabricUnavailable: The fabric does not answer.
        """
        return await wait_async(self._controller.nodes.remote(), "the nodes", _CONTROL_S)
