"""Ends what host actors left on a node that are gone for good, as after `ray.kill` of one.

A dedicated host that Ray will not restart has nobody who takes its sandbox over. Where other hosts
are, or none, this runs as a Ray task on the node itself: it reads the node's own records and needs
no host there.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Final

from aenv_ray.actors.controller.placement import SHARED_PREFIX
from aenv_ray.actors.host.host_actor import make_engine_factory
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.config import settings
from aenv_ray.engines.node.directory import node_directory
from aenv_ray.errors import FabricUnavailable
from aenv_ray.hub.store import FileInstanceStore
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import ActorDensity, InstanceRecord

END_DEADLINE_S: Final = 20.0
"""For one instance; below what the controller gives a node, so that it hears why."""
AT_ONCE: Final = 16
"""Instances that are ended at a time: each has a connection of its own to its engine."""


def end_orphans(instance_ids: Collection[str]) -> list[InstanceId]:
    """End this node's instances whose host is gone for good; run it on the node.

    Args:
        instance_ids: Those that may be on any host. Dedicated ones are ended whether named or not;
            shared hosts are made again under their name and take their instances over.

    Returns:
        The ids of what was ended.

    Raises:
        FabricUnavailable: One or more could not be ended; the others are.
    """
    directory = node_directory(settings().runtime_dir, ray_api.session_scope())
    store = FileInstanceStore(directory / "records")
    records, engines_used = store.list(), store.engines_used()
    # Listed after the records: a host has its name before it writes one.
    present = set(ray_api.actor_names())
    orphans = [
        record
        for record in records
        if record.host_id not in present
        and (record.density is ActorDensity.DEDICATED or record.id in instance_ids)
    ]

    async def end(record: InstanceRecord) -> None:
        await _end(record)
        store.delete([record.id])

    gone = {host: engines for host, engines in engines_used.items() if host not in present}
    ended, failed = asyncio.run(end_each(orphans, end))
    for host_id, engines in gone.items():
        try:
            ended += asyncio.run(_end_unrecorded(host_id, sorted(engines), instance_ids))
        except Exception as exc:  # noqa: BLE001  # told below, with the others
            failed.append(f"what {host_id} did not record: {exc!r}")
        else:
            if not host_id.startswith(SHARED_PREFIX):
                store.forget_host(host_id)
    if failed:
        raise FabricUnavailable(
            f"{len(failed)} attempts to end what is ownerless failed; the first: {failed[0]}"
        )
    return ended


async def end_each(
    records: Sequence[InstanceRecord], end: Callable[[InstanceRecord], Awaitable[None]]
) -> tuple[list[InstanceId], list[str]]:
    """End each record by itself: one that cannot be ended keeps no other from it.

    Args:
        records: What to end.
        end: Ends one; stopped after `END_DEADLINE_S`.

    Returns:
        The ids of what was ended, and for each other one its id with the reason.
    """
    ended: list[InstanceId] = []
    failed: list[str] = []
    places = asyncio.Semaphore(AT_ONCE)

    async def one(record: InstanceRecord) -> None:
        try:
            async with places, asyncio.timeout(END_DEADLINE_S):
                await end(record)
        except Exception as exc:  # noqa: BLE001  # the caller tells of it, and tries again
            failed.append(f"{record.id}: {exc!r}")
        else:
            ended.append(record.id)

    async with asyncio.TaskGroup() as group:
        for record in records:
            group.create_task(one(record))
    return ended, failed


async def _end(record: InstanceRecord) -> None:
    engine = make_engine_factory(record.host_id)(record.spec.engine)
    try:
        await engine.stop([record.id])
    finally:
        await engine.close()


async def _end_unrecorded(
    host_id: HostId, engines: Sequence[str], named: Collection[str]
) -> list[InstanceId]:
    """End what a host that is gone made and did not come to record.

    Of a shared one only what is named: made again under its name, it sees to the rest.
    """
    ended: list[InstanceId] = []
    for name in engines:
        engine = make_engine_factory(host_id)(name)
        try:
            async with asyncio.timeout(END_DEADLINE_S):
                ids = [sandbox.instance_id for sandbox in await engine.running()]
                if host_id.startswith(SHARED_PREFIX):
                    ids = [instance_id for instance_id in ids if instance_id in named]
                await engine.stop(ids)
                ended += ids
        finally:
            await engine.close()
    return ended


@functools.cache
def janitor_task() -> Any:
    """Return the Ray task; made once, since every `ray.remote` exports the function anew."""
    return ray_api.cheap_task(end_orphans)
