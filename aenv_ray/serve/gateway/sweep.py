"""Compares leases with running instances, so that neither outlives the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping

from aenv_ray import logs
from aenv_ray.actors.fabric.async_fabric import AsyncFabric
from aenv_ray.errors import AenvError, FabricUnavailable, InstanceNotFound
from aenv_ray.hub.api import Hub
from aenv_ray.hub.records import Lease, LeaseQuery
from aenv_ray.models import InstanceInfo, InstanceStatus
from aenv_ray.serve.gateway.creation import Creator
from aenv_ray.serve.gateway.membership import Membership

logger = logging.getLogger(__name__)


class Sweep:
    """Ends leases without an instance, and instances whose replica died while creating them.

    All replicas run it; the hub elects one of them for each round.
    """

    def __init__(
        self,
        hub: Hub,
        fabric: AsyncFabric,
        creator: Creator,
        membership: Membership,
        every_s: float,
        note_live: Callable[[Collection[Lease]], None],
        note_pools: Callable[[Mapping[str, int]], None],
    ) -> None:
        self._hub = hub
        self._fabric = fabric
        self._creator = creator
        self._membership = membership
        self._every_s = every_s
        self._note_live = note_live
        self._note_pools = note_pools

    async def run(self) -> None:
        """Run until cancelled; a failed round is logged, and the next one repeats its work."""
        async with asyncio.TaskGroup() as group:
            # Separate tasks: a round may take longer than a replica may go without a heartbeat.
            group.create_task(self._repeat(self._membership.heartbeat))
            group.create_task(self._repeat(self._round))

    async def _repeat(self, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await act()
            except AenvError as exc:
                logger.warning("a heartbeat or sweep failed, will retry: %s", exc)
            except Exception:
                logger.exception("a heartbeat or sweep failed, will retry")
            await asyncio.sleep(self._every_s)

    async def _round(self) -> None:
        if await self._membership.is_elected("sweep", self._every_s):
            await self.once()

    async def once(self) -> None:
        """Run one round.

        Raises:
            FabricUnavailable: The hub or the fabric does not answer; this ends no instance.
        """
        # List the leases before the instances: a lease is older than its instance.
        leases = [lease async for lease in self._hub.all_leases(LeaseQuery())]
        infos = await self._fabric.list_instances()
        live = {str(info.requested_id or info.id): info for info in infos}
        dead = await self._membership.dead({lease.made_by for lease in leases})
        running = []
        for lease in leases:
            if not lease.made_by:
                continue  # made by Ray code: it ends with the instance's owner or deadline
            if lease.status is InstanceStatus.PENDING:
                await self._check_pending(lease, dead)
            elif lease.status is not InstanceStatus.RUNNING:
                continue  # it has ended; the hub keeps the reason for a while
            elif lease.id in live:
                running.append(lease)
                await self._update_deadline(lease, live[lease.id])
            else:
                await self._check_unlisted(lease)
        self._note_live(running)
        self._note_pools(await self._fabric.pools())

    async def _check_pending(self, lease: Lease, dead: set[str]) -> None:
        is_own = lease.made_by == self._membership.name
        if (lease.id in self._creator.in_progress) if is_own else (lease.made_by not in dead):
            return
        # It may have become Running since it was listed, even if its replica died right after.
        try:
            if (await self._hub.lease(lease.id)).status is not InstanceStatus.PENDING:
                return
        except InstanceNotFound:
            return
        logger.warning(
            "%s was being created by %s, which died", lease.id, lease.made_by,
            extra=logs.of_instance(lease.id, lease.owner),
        )  # fmt: skip
        await self._creator.keys.mark_failed(lease.id)
        await self._creator.undo([lease.id])

    async def _update_deadline(self, lease: Lease, info: InstanceInfo) -> None:
        if abs(info.deadline - lease.deadline) > 1.0:  # Ray code renewed it
            await self._hub.update_lease(lease.id, deadline=info.deadline)

    async def _check_unlisted(self, lease: Lease) -> None:
        """End a lease whose instance no host listed, unless a host is only restarting."""
        self._fabric.forget(lease.id)
        try:
            status = (await self._fabric.info(lease.id)).status
        except InstanceNotFound:
            status = InstanceStatus.TERMINATED
        except FabricUnavailable as exc:
            # Its host is alive but does not answer, so the instance may be in use.
            extra = logs.of_instance(lease.id, lease.owner)
            logger.warning("the state of %s is unknown: %s", lease.id, exc, extra=extra)
            return
        if status is InstanceStatus.FAILED:
            reason = "its sandbox, its host or its node died"
            await self._hub.update_lease(lease.id, status=status, reason=reason)
        elif status is InstanceStatus.TERMINATED:
            await self._creator.undo([lease.id])
