"""`Instances` over Ray: placement in a few threads, everything that takes time awaited."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from aenv_ray.actors.calls.handle import EnvHandle
from aenv_ray.actors.calls.wire import decode_outcomes
from aenv_ray.actors.fabric.fabric import CREATE_DEADLINE_S, Fabric, of_group
from aenv_ray.actors.fabric.shared_hosts import Share
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.errors import AenvError, CapacityExceeded, FabricUnavailable
from aenv_ray.models import ActorDensity, InstanceInfo, InstanceSpec
from aenv_ray.project.project import Project
from aenv_ray.serve.gateway.instances import Instances, Made

_PLACERS: Final = 8
"""Threads that place groups: each is busy for milliseconds, or while a first host starts."""
_MOST_HANDLES: Final = 20_000
_QUEUE_S: Final = 240.0
"""How long a create waits for room in a full cluster: below what its lease lasts."""
_CONTROL_S: Final = 90.0
"""A controller that died is back before."""


class RayInstances(Instances):
    """The fabric of the Ray cluster that this process is connected to."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._threads = ThreadPoolExecutor(_PLACERS, thread_name_prefix="aenv-place")
        self._handles: OrderedDict[str, EnvHandle] = OrderedDict()

    async def create(  # noqa: D102
        self, source: Project, specs: Sequence[InstanceSpec], density: ActorDensity
    ) -> list[Made]:
        tried = [spec.instance_id for spec in specs]
        begin = self._shared if density is ActorDensity.SHARED else self._dedicated
        try:
            outcomes = await begin(source, list(specs))
            failures = [error for _, error in outcomes if isinstance(error, AenvError)]
            if failures:
                raise of_group(failures[0], len(failures), len(specs))
        except BaseException:
            # Cancelled or half done: whatever came to be must not live on.
            if ray_api.is_connected():
                self._fabric.controller.release.remote(tried)
            raise
        made = []
        for spec, (host, info) in zip(specs, outcomes, strict=True):
            handle = EnvHandle(spec.instance_id, spec.reference, host, self._fabric.controller)
            self._keep(handle)
            made.append(Made(handle, info))
        return made

    async def _shared(self, source: Project, specs: list[InstanceSpec]) -> list[tuple[Any, Any]]:
        loop = asyncio.get_running_loop()
        try:
            begun, refusals = await loop.run_in_executor(
                self._threads, self._fabric.shared.begin, source, specs
            )
        except CapacityExceeded:
            shares = await self._places(specs)
            begun, refusals = await loop.run_in_executor(
                self._threads, self._fabric.shared.begin_on, source, shares
            )
        outcomes: dict[str, tuple[Any, Any]] = {}
        for share, reference in begun:
            try:
                answer = await _answer(reference, f"creating on {share.name}", CREATE_DEADLINE_S)
            except (CapacityExceeded, FabricUnavailable) as exc:
                refusals[share.name] = exc
                continue
            for spec, outcome in zip(share.specs, decode_outcomes(answer), strict=True):
                outcomes[spec.instance_id] = (share.host, outcome)
        for name, refusal in refusals.items():
            # Another try, by whoever asked for this one, must not go by what was known.
            await loop.run_in_executor(self._threads, self._fabric.shared.look)
            raise type(refusal)(f"{name}: {refusal.message}", hint=refusal.hint)
        return [outcomes[spec.instance_id] for spec in specs]

    async def _places(self, specs: list[InstanceSpec]) -> list[Share]:
        """Return places for instances, once it is their turn and there is room."""
        by_id = {spec.instance_id: spec for spec in specs}
        asked = self._fabric.controller.places.remote(
            list(by_id), specs[0].owner or "", specs[0].job_id, _QUEUE_S
        )
        places = await _answer(asked, f"room for {len(specs)} instances", _QUEUE_S + _CONTROL_S)
        return [Share(name, host, [by_id[i] for i in ids]) for name, host, ids in places]

    async def _dedicated(self, source: Project, specs: list[InstanceSpec]) -> list[tuple[Any, Any]]:
        archive = await asyncio.get_running_loop().run_in_executor(self._threads, source.archive)
        reference = self._fabric.controller.create_dedicated.remote(specs, archive, _QUEUE_S)
        what = f"creating {len(specs)} of {source.reference}"
        return list(await _answer(reference, what, CREATE_DEADLINE_S + _QUEUE_S))

    async def handle(self, instance_id: str) -> EnvHandle:  # noqa: D102
        known = self._handles.get(instance_id)
        if known is not None:
            return known
        host, info = await self._locate(instance_id)  # of one that ended, its host says why
        handle = EnvHandle(_id_of(info), info.reference, host, self._fabric.controller)
        self._keep(handle)
        return handle

    async def _locate(self, instance_id: str) -> tuple[Any, InstanceInfo]:
        reference = self._fabric.controller.locate.remote(instance_id)
        found: tuple[Any, InstanceInfo] = await _answer(
            reference, f"finding {instance_id}", _CONTROL_S
        )
        return found

    async def info(self, instance_id: str) -> InstanceInfo:  # noqa: D102
        known = self._handles.get(instance_id)
        if known is not None:
            try:
                info: InstanceInfo = await _answer(known.info.remote(), "info", _CONTROL_S)
            except FabricUnavailable:
                self.forget(instance_id)  # its host is gone
            else:
                return info
        return (await self._locate(instance_id))[1]

    def _keep(self, handle: EnvHandle) -> None:
        self._handles[handle.instance_id] = handle
        while len(self._handles) > _MOST_HANDLES:
            self._handles.popitem(last=False)

    def forget(self, instance_id: str) -> None:  # noqa: D102
        self._handles.pop(instance_id, None)

    async def release(self, instance_ids: Sequence[str]) -> None:  # noqa: D102
        reference = self._fabric.controller.release.remote(list(instance_ids))
        for instance_id in instance_ids:
            self.forget(instance_id)
        await _answer(reference, f"releasing {len(instance_ids)} instances", _CONTROL_S)

    async def list_instances(self) -> list[InstanceInfo]:  # noqa: D102
        reference = self._fabric.controller.list_instances.remote()
        return list(await _answer(reference, "listing instances", _CONTROL_S))

    async def pools(self) -> dict[str, int]:  # noqa: D102
        reference = self._fabric.controller.pools.remote()
        return dict(await _answer(reference, "counting what is ready", _CONTROL_S))


def _id_of(info: InstanceInfo) -> Any:
    """Return the id by which its creator knows an instance."""
    return info.requested_id or info.id


async def _answer(reference: Any, what: str, deadline_s: float) -> Any:
    """Return what an actor answers.

    Raises:
        FabricUnavailable: It is gone, or `deadline_s` passed.
        AenvError: What it raised.
    """
    with ray_api.translated(what):
        try:
            async with asyncio.timeout(deadline_s):
                return await reference
        except TimeoutError as exc:
            if isinstance(exc, AenvError):
                raise
            raise FabricUnavailable(f"{what} did not answer within {deadline_s:g} s") from exc
