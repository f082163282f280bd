"""Ends the sandboxes of hosts that are gone for good, for example after `ray.kill` of a host.

Ray does not restart a dedicated host that was killed, so no new host adopts its sandbox: it is an
orphan. For each node, the controller runs a Ray task there (`end_orphans`), which reads the node's
own records and therefore needs no host. `OrphanCleanup` runs the task again on nodes where it
failed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

from aenv_ray.actors.controller.placement import SHARED_PREFIX
from aenv_ray.actors.host.host_actor import make_engine_factory
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.config import settings
from aenv_ray.engines.node.directory import node_directory
from aenv_ray.errors import FabricUnavailable
from aenv_ray.hub.store import FileInstanceStore
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import ActorDensity, InstanceRecord
from aenv_ray.units import counted

logger = logging.getLogger(__name__)

LONGEST_PAUSE: Final = 60
"""Maximum number of `OrphanCleanup.retry` calls to skip before trying a failed node again."""
END_DEADLINE_S: Final = 20.0
"""Deadline for ending one instance. It is shorter than the controller's deadline for a node, so
that the controller receives the reason of a failure."""
AT_ONCE: Final = 16
"""Instances ended at the same time; each uses a separate connection to its engine."""


class OrphanCleanup:
    """Ends the orphans of each node, and retries nodes where that failed.

    Args:
        end_on: Ends the orphans of one node, given the node's id and the ids of instances to end
            even if their host is shared; raises if one or more could not be ended.
        alive_nodes: Returns the ids of the live nodes.
    """

    def __init__(
        self,
        end_on: Callable[[str, list[str]], Awaitable[None]],
        alive_nodes: Callable[[], Awaitable[Collection[str]]],
    ) -> None:
        self._end_on = end_on
        self._alive_nodes = alive_nodes
        self._left: dict[str, set[str]] = {}
        self._pause = 0
        self._skip = 0

    async def end(self, nodes: Collection[str | None], ids: Collection[str]) -> None:
        """End the sandboxes that lost hosts have left on nodes.

        Args:
            nodes: The nodes; if None is among them, all live nodes.
            ids: Instances that are ended even if they are on a shared host.
        """
        alive = set(await self._alive_nodes())
        chosen = alive if None in nodes else alive.intersection(nodes)
        async with asyncio.TaskGroup() as group:
            for node in chosen:
                group.create_task(self._try(node, set(ids)))

    async def retry(self) -> None:
        """Try failed nodes again if they are still alive; call it at regular intervals.

        If a node keeps failing, only every second call tries again, then every fourth, and so on.
        """
        if not self._left:
            self._pause = self._skip = 0
            return
        if self._skip:
            self._skip -= 1
            return
        alive = set(await self._alive_nodes())
        left, self._left = self._left, {}
        async with asyncio.TaskGroup() as group:
            for node in alive.intersection(left):
                group.create_task(self._try(node, left[node]))
        self._pause = min(2 * self._pause + 1, LONGEST_PAUSE)
        self._skip = self._pause

    async def _try(self, node: str, ids: set[str]) -> None:
        try:
            await self._end_on(node, sorted(ids))
        except Exception as exc:  # noqa: BLE001  # the other nodes do not depend on this one
            # If no retry succeeds, the node's engine ends them at their deadlines.
            logger.warning("cannot end the orphans on node %s yet, will retry: %r", node[:8], exc)
            self._left.setdefault(node, set()).update(ids)


# --- on the node ----------------------------------------------------------------------------------


class EndedOrphans(NamedTuple):
    """What `end_orphans` did."""

    ended: list[InstanceId]
    """The ended instances."""
    inner: list[InstanceId]
    """Instances of other environments that their code called, on any host; they still run."""
    outer: list[InstanceId]
    """Instances that have inner ones. Their records remain until `forget_orphans`, since nothing
    else names the inner ones."""


def end_orphans(instance_ids: Collection[str]) -> EndedOrphans:
    """End the instances of this node whose host is gone for good; runs on the node.

    Args:
        instance_ids: Instances of shared hosts to end. A shared host that is gone will be replaced
            by one with the same name, which adopts its other instances. Instances of dedicated
            hosts are ended whether they are listed or not.

    Raises:
        FabricUnavailable: Some could not be ended; all others were.
    """
    store = _store()
    records, engines_used = store.list(), store.engines_used()
    # List the actors after the records: a host registers its name before it writes a record.
    present = set(ray_api.actor_names())
    orphans = [
        record
        for record in records
        if record.host_id not in present
        and (record.density is ActorDensity.DEDICATED or record.id in instance_ids)
    ]

    async def end(record: InstanceRecord) -> None:
        await _end(record)
        if not record.inner:
            store.delete([record.id])

    gone = {host: engines for host, engines in engines_used.items() if host not in present}
    ended, failed = asyncio.run(end_each(orphans, end))
    for host_id, engines in gone.items():
        try:
            ended += asyncio.run(_end_unrecorded(host_id, sorted(engines), instance_ids))
        except Exception as exc:  # noqa: BLE001  # reported below with the others
            failed.append(f"unrecorded sandboxes of {host_id}: {exc!r}")
        else:
            if not host_id.startswith(SHARED_PREFIX):
                store.forget_host(host_id)
    if failed:
        raise FabricUnavailable(
            f"{counted(len(failed), 'attempt')} to end orphans failed; the first: {failed[0]}"
        )
    outer = [record for record in orphans if record.inner]
    inner = [i for record in outer for i in record.inner.values()]
    return EndedOrphans(ended, inner, [record.id for record in outer])


def forget_orphans(instance_ids: Sequence[InstanceId]) -> None:
    """Delete the records of ended orphans whose inner instances have ended; runs on the node."""
    _store().delete(instance_ids)


def _store() -> FileInstanceStore:
    directory = node_directory(settings().runtime_dir, ray_api.session_scope())
    return FileInstanceStore(directory / "records")


async def end_each(
    records: Sequence[InstanceRecord], end: Callable[[InstanceRecord], Awaitable[None]]
) -> tuple[list[InstanceId], list[str]]:
    """End instances independently of each other.

    `end` ends one; it is cancelled after `END_DEADLINE_S`.

    Returns:
        The ids of the ended instances, and for each other one its id with the reason.
    """
    ended: list[InstanceId] = []
    failed: list[str] = []
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(record: InstanceRecord) -> None:
        try:
            async with limit, asyncio.timeout(END_DEADLINE_S):
                await end(record)
        except Exception as exc:  # noqa: BLE001  # the caller reports it and tries again
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
    """End sandboxes that a host started, but had not recorded when it died.

    For a shared host, end only those in `named`; the host that replaces it handles the others.
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
def orphan_cleanup_task() -> Any:
    """Return the Ray task; cached, because each `ray.remote` exports the function again."""
    return ray_api.cheap_task(end_orphans)


@functools.cache
def forget_orphans_task() -> Any:
    """Return the Ray task of `forget_orphans`, cached likewise."""
    return ray_api.cheap_task(forget_orphans)
