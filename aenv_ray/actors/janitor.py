"""Ends what host actors left on a node that are gone for good, as after `ray.kill` of one.

A dedicated host that Ray will not restart has nobody who takes its sandbox over. Where other hosts
are, or none, this runs as a Ray task on the node itself: it reads the node's own records and needs
no host there.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Collection
from typing import Any

from aenv_ray.actors import ray_api
from aenv_ray.actors.host_actor import make_engine_factory
from aenv_ray.actors.placement import SHARED_PREFIX
from aenv_ray.config import settings
from aenv_ray.engines.launcher_client import node_directory
from aenv_ray.hub.store import FileInstanceStore
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import ActorDensity, InstanceRecord


def end_orphans(instance_ids: Collection[str]) -> list[str]:
    """End this node's instances whose host is gone for good; run it on the node.

    Args:
        instance_ids: Those that may be on any host. Dedicated ones are ended whether named or not;
            shared hosts are made again under their name and take their instances over.

    Returns:
        The ids of what was ended.
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
    for record in orphans:
        asyncio.run(_end(record))
        store.delete([record.id])
    ended: list[str] = [record.id for record in orphans]
    for host_id, engines in engines_used.items():
        if host_id not in present and not host_id.startswith(SHARED_PREFIX):
            for name in sorted(engines):
                ended += asyncio.run(_end_unrecorded(host_id, name))
            store.forget_host(host_id)
    return ended


async def _end(record: InstanceRecord) -> None:
    engine = make_engine_factory(record.host_id)(record.spec.engine)
    try:
        await engine.stop([record.id])
    finally:
        await engine.close()


async def _end_unrecorded(host_id: HostId, name: str) -> list[InstanceId]:
    """End what a host that is gone for good made and did not come to record."""
    engine = make_engine_factory(host_id)(name)
    try:
        ids = [sandbox.instance_id for sandbox in await engine.running()]
        await engine.stop(ids)
    finally:
        await engine.close()
    return ids


@functools.cache
def janitor_task() -> Any:
    """Return the Ray task; made once, since every `ray.remote` exports the function anew."""
    return ray_api.cheap_task(end_orphans)
