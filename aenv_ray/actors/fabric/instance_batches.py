"""Independent instances of one project, created and released in batches, for an event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aenv_ray.actors.calls.handle import EnvHandle
from aenv_ray.actors.fabric.create_options import CreateOptions, OwnOptions
from aenv_ray.actors.fabric.create_protocol import (
    Created,
    CreateListener,
    CreateProtocol,
    OnQueue,
)
from aenv_ray.actors.fabric.fabric import LOOK_S, Fabric
from aenv_ray.actors.fabric.quota_client import quota_subjects
from aenv_ray.actors.fabric.shutdown_gate import ShutdownGate
from aenv_ray.actors.fabric.waits import NOTICE_AFTER_S, AsyncWaits, OnWait, WaitNotices
from aenv_ray.actors.ray_shell import operator_policy, ray_api
from aenv_ray.config import settings
from aenv_ray.errors import FabricUnavailable
from aenv_ray.models import ActorDensity, InstanceSpec
from aenv_ray.project.project import Project
from aenv_ray.units import counted

if TYPE_CHECKING:
    from ray import ObjectRef

T = TypeVar("T")

RELEASE_S: Final = 60.0
"""Longest wait for a release; if it fails, the instances end at their deadlines."""


class GatedWaits(AsyncWaits):
    """Waits that raise once the connection is shut down, instead of using Ray again."""

    def __init__(self, gate: ShutdownGate) -> None:
        super().__init__()
        self._gate = gate

    async def result(  # noqa: D102
        self, reference: ObjectRef[T], what: str, deadline_s: float, on_wait: OnWait | None = None
    ) -> T:
        with self._gate:
            answer = asyncio.ensure_future(super().result(reference, what, deadline_s))
            waited_s = 0.0
            try:
                while not (await asyncio.wait([answer], timeout=LOOK_S))[0]:
                    self._gate.check()
                    waited_s += LOOK_S
                    if on_wait is not None and waited_s % NOTICE_AFTER_S == 0:
                        await self.run(functools.partial(on_wait, waited_s))
                return answer.result()
            finally:
                answer.cancel()


def _protocol_of_loop(fabric: Fabric) -> CreateProtocol:
    """Return the protocol of the running loop, which all its batches use: it knows the hosts."""
    loop = asyncio.get_running_loop()
    for other in [other for other in list(fabric.protocols) if other.is_closed()]:
        fabric.protocols.pop(other, None)
    found = fabric.protocols.get(loop)
    if found is None:
        found = fabric.protocols[loop] = CreateProtocol(
            fabric.controller,
            GatedWaits(fabric.gate),
            WaitNotices(is_silent=lambda: fabric.head_watch.is_missed),
            ray_api.session_scope() if settings().local_door else "",
            fabric.quotas,
        )
    return found


class InstanceBatches:
    """Creates and releases independent instances of one project. Use it on one event loop.

    Args:
        fabric: The connection.
        source: The project.
        options: Options of the instances.
        labels: Added to those in `options`; no quota counts them.
    """

    def __init__(
        self, fabric: Fabric, source: Project, options: CreateOptions, labels: Mapping[str, str]
    ) -> None:
        self._fabric = fabric
        self.source = source
        self._options = options
        self._subjects = quota_subjects(options)
        self._labels = dict(labels)
        self._protocol = _protocol_of_loop(fabric)
        self._waits = self._protocol.waits
        self._job_id = ray_api.job_id()

    def is_connected(self) -> bool:
        """Whether the connection is open; after its end, nothing can be created."""
        return not self._fabric.gate.is_closed

    async def create(self, count: int, listener: CreateListener) -> None:
        """Create instances; each is reported once it runs or has failed.

        If it is cancelled, the instances that were not reported are released.
        """
        specs, options = await self._specs(count), self._options
        await self._protocol.create_each(
            self.source, specs, options.actor, options.queue_s, listener, self._subjects
        )

    async def create_group(
        self, count: int, own: OwnOptions | None = None, on_queue: OnQueue = lambda _: None
    ) -> list[Created]:
        """Create instances, all or none.

        Args:
            count: How many.
            own: Options of these instances that replace the common ones.
            on_queue: See `CreateProtocol.create`.

        Raises:
            AenvError: As `aenv_ray.create_many`; nothing is left behind.
        """
        specs, options = await self._specs(count, own), self._options
        await self._protocol.check_size(count, options.actor, specs[0].places)
        return await self._protocol.create(
            self.source,
            specs,
            options.actor,
            options.queue_s,
            subjects=self._subjects,
            on_queue=on_queue,
        )

    async def _specs(self, count: int, own: OwnOptions | None = None) -> list[InstanceSpec]:
        policy = await self._waits.run(operator_policy.current)
        near = self._options.near
        if near is not None:
            self._options.near_node = await self._waits.run(lambda: ray_api.node_of(near))
        specs = self._options.specs(self.source, count, job_id=self._job_id, policy=policy)
        if own is not None:
            specs = [own.given_to(spec) for spec in specs]
        if not self._labels:
            return specs
        labels = self._options.labels | self._labels
        return [spec.model_copy(update={"labels": labels}) for spec in specs]

    def handle(self, created: Created) -> EnvHandle:
        """Return a handle to an instance."""
        host, controller = created.host, self._fabric.controller
        return EnvHandle(created.info.id, created.spec.reference, host, controller)

    async def release(self, instances: Sequence[Created]) -> None:
        """End instances, in any state, with one request to each host.

        Raises:
            AenvError: A request failed; the instances end at their deadlines.
        """
        if self._options.actor is ActorDensity.DEDICATED:
            await self._release_anywhere(instances)
            return
        by_host: dict[Any, list[Created]] = {}
        for one in instances:
            by_host.setdefault(one.host, []).append(one)
        async with asyncio.TaskGroup() as group:
            for same in by_host.values():
                group.create_task(self._release_on(same))

    async def _release_on(self, instances: Sequence[Created]) -> None:
        """End instances of one shared host; the controller does it if that host is gone."""
        reference = instances[0].host.release.remote([one.info.id for one in instances])
        what = f"releasing {counted(len(instances), 'instance')}"
        try:
            await self._waits.result(reference, what, RELEASE_S)
        except FabricUnavailable:
            await self._release_anywhere(instances)

    async def _release_anywhere(self, instances: Sequence[Created]) -> None:
        reference = self._fabric.controller.release.remote([one.info.id for one in instances])
        what = f"releasing {counted(len(instances), 'instance')}"
        await self._waits.result(reference, what, RELEASE_S)
