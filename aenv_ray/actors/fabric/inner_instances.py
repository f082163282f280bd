"""Instances that other instances call, created by their hosts.

Hosts must not import this package, which is above them. So the process that starts the controller
passes it `driver_api.connect_inner`, and the controller passes that on to each host, which calls it
when the first of its instances calls another environment. The imports are inside the functions,
because most hosts never need them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from aenv_ray import ids
from aenv_ray.actors.calls.json_calls import InstanceCalls
from aenv_ray.actors.host.environment_relay import OUTER_LABEL
from aenv_ray.actors.ray_shell import operator_policy, ray_api
from aenv_ray.actors.ray_shell.ray_api import wait_async
from aenv_ray.errors import EnvironmentNotFound
from aenv_ray.ids import InstanceId
from aenv_ray.models import InstanceSpec

if TYPE_CHECKING:
    from aenv_ray.actors.fabric.async_fabric import AsyncFabric
    from aenv_ray.actors.fabric.fabric import Fabric

_RENEW_S: Final = 60.0


class FabricInstances:
    """Creates inner instances as shared instances of the cluster."""

    def __init__(self, fabric: Fabric, instances: AsyncFabric) -> None:
        self._fabric = fabric
        self._instances = instances
        self.calls = InstanceCalls(instances.handle, instances.forget)

    async def create(
        self,
        reference: str,
        instance_id: InstanceId,
        outer: InstanceSpec,
        ttl_s: float,
        *,
        take: Callable[[int], None],
        on_queue: Callable[[bool], None],
    ) -> None:
        """See `InnerInstances.create`."""
        from aenv_ray.actors.fabric.create_options import RESERVED_LABELS, CreateOptions
        from aenv_ray.actors.fabric.quota_client import quota_subjects
        from aenv_ray.actors.fabric.references import resolve_environment
        from aenv_ray.models import ActorDensity

        await asyncio.to_thread(_check_use, reference, outer.owner)
        source = await asyncio.to_thread(resolve_environment, reference, lambda: self._fabric)
        # Labels of the fabric say what the outer instance is, such as a sandbox of a service.
        labels = {k: v for k, v in outer.labels.items() if not k.startswith(RESERVED_LABELS)}
        options = CreateOptions(
            actor="shared", ttl=ttl_s, owner=outer.owner,
            labels=labels, fabric_labels={OUTER_LABEL: outer.instance_id},
        )  # fmt: skip
        policy = await asyncio.to_thread(operator_policy.current)
        (made,) = options.specs(source, 1, job_id=outer.job_id, policy=policy)
        take(made.places)
        spec = made.model_copy(
            update={
                "instance_id": instance_id,
                "outer": (*outer.outer, outer.reference),
                "places": 0,  # the outermost instance includes it
                "near_node": ray_api.node_id(),  # where the outer one has kept slots for it
                "idle_timeout_s": None,  # it ends with the outer instance
            }
        )
        await self._instances.create(
            source,
            [spec],
            ActorDensity.SHARED,
            subjects=quota_subjects(options),
            on_queue=on_queue,
        )

    async def renew(self, instance_ids: Sequence[InstanceId], ttl_s: float) -> None:
        """See `InnerInstances.renew`."""
        for instance_id in instance_ids:
            handle = await self._instances.handle(instance_id)
            await wait_async(handle.renew.remote(ttl_s), f"renewing {instance_id}", _RENEW_S)

    async def release(self, instance_ids: Sequence[InstanceId]) -> None:
        """See `InnerInstances.release`."""
        await self._instances.release(instance_ids)


def _check_use(reference: str, owner: str | None) -> None:
    """Check that an owner may use an environment (invariant 15); instances of Ray code may use all.

    Raises:
        EnvironmentNotFound: It belongs to another owner, who has not granted its use.
    """
    from aenv_ray.hub.client import blocking
    from aenv_ray.hub.hub_actor import find_hub
    from aenv_ray.hub.records import Right

    name, _ = ids.split_reference(reference)
    if owner is None or _is_built_in(reference):
        return
    hub = find_hub()
    if hub is not None and not blocking(hub.name(name)).may(owner, Right.USE):
        raise EnvironmentNotFound(
            f"{name!r} is not published, or {owner} may not use it",
            hint=f"have its owner run: aenv grant {name} {owner} use",
        )


def _is_built_in(reference: str) -> bool:
    """Whether it is a built-in environment, rather than another version under its name."""
    from aenv_ray.project import project

    try:
        project.resolve(reference)
    except EnvironmentNotFound:
        return False
    return True
