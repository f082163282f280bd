"""Where the cluster has room, and the creates that wait for it: does what `backlog` decides (D9).

Nodes that declare slots come and go with demand: they have hosts only while they are needed, and a
backlog becomes demand that Ray's autoscaler sees. Others have hosts from the first use on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from aenv_ray.actors.controller.admission_queue import Backlog, Grant, Ticket, bundles
from aenv_ray.actors.controller.host_directory import HostDirectory
from aenv_ray.actors.controller.placement import (
    HostLoad,
    may_grow,
    needed,
    shared_host_names,
    usable,
)
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.actors.ray_shell.nodes import NodeFacts
from aenv_ray.errors import AenvError, CapacityExceeded, FabricUnavailable
from aenv_ray.ids import InstanceId
from aenv_ray.models import InstanceSpec

logger = logging.getLogger(__name__)

TURN_S: Final = 0.5
"""Whoever waits is looked after this often."""
HOLD_S: Final = 5.0
"""While somebody waits, hosts take nobody else; without word for this long, they do again."""
RESERVED_S: Final = 30.0
"""Places are kept this long for a create that was given them."""
ASK_S: Final = 5.0
"""A host that does not answer within this is left out of a turn."""
TRY_AGAIN_S: Final = 5.0
"""What is told to whoever waited in vain."""

Places = list[tuple[str, Any, list[InstanceId]]]
"""Names and actors of hosts with the ids that have places there."""


class Queue:
    """The room that a cluster has, and who waits for it.

    Args:
        hosts: Through which hosts are made and asked.
        dedicated: Says how many dedicated hosts each node has, by its id.
    """

    def __init__(self, hosts: HostDirectory, dedicated: Callable[[], Mapping[str, int]]) -> None:
        self._hosts = hosts
        self._dedicated = dedicated
        self._backlog = Backlog()
        self._futures: dict[Ticket, asyncio.Future[Places]] = {}
        self._serving: asyncio.Task[None] | None = None
        self._demanded: list[int] = []
        self._slots_per_node: int | None = None
        self._trouble = "the cluster has no room"

    async def open(self) -> None:
        """Take back what an earlier controller demanded: nobody waits here yet."""
        await asyncio.to_thread(ray_api.demand_slots, [])

    # --- room -----------------------------------------------------------------------------------

    async def shared(self, patience_s: float, wanted: int) -> list[tuple[HostLoad, Any]]:
        """Return the shared hosts with their load, making missing ones.

        Args:
            patience_s: How long to wait for others once one has answered.
            wanted: Places that are asked for: nodes that come and go get hosts as far as needed.

        Returns:
            None where the cluster has no node for instances, but may get some.

        Raises:
            FabricUnavailable: None answers; with the causes.
        """
        nodes = await asyncio.to_thread(ray_api.alive_nodes)
        idle = await self._without_hosts(nodes)
        present = {n: f for n, f in usable(nodes).items() if n not in idle}
        found: list[tuple[HostLoad, Any]] = []
        if present or not may_grow(nodes.values()):
            try:
                found = await self._hosts.loads(present, patience_s=patience_s)
            except FabricUnavailable:
                if not idle:
                    raise
        found = self._with_dedicated(found, nodes)
        chosen = needed(idle, wanted - sum(load.free for load, _ in found))
        if chosen:
            more = await self._hosts.loads({n: idle[n] for n in chosen}, patience_s=patience_s)
            found += self._with_dedicated(more, nodes)
        return found

    async def _without_hosts(self, nodes: Mapping[str, NodeFacts]) -> dict[str, NodeFacts]:
        """Return the nodes that come and go, and have no hosts now."""
        elastic = {node: facts for node, facts in nodes.items() if facts.is_elastic}
        if not elastic:
            return {}
        self._slots_per_node = max(
            self._slots_per_node or 1, *(facts.slots or 1 for facts in elastic.values())
        )
        names = set(await asyncio.to_thread(ray_api.actor_names))
        return {n: f for n, f in elastic.items() if names.isdisjoint(shared_host_names(n, f))}

    def _with_dedicated(
        self, found: Iterable[tuple[HostLoad, Any]], nodes: Mapping[str, NodeFacts]
    ) -> list[tuple[HostLoad, Any]]:
        """Count dedicated hosts as well where slots are declared; on the node's first host."""
        left = {n: count for n, count in self._dedicated().items() if _has_slots(nodes.get(n))}
        counted = []
        for load, host in found:
            more = left.pop(load.node_id, 0)
            counted.append((replace(load, instances=load.instances + more), host))
        return counted

    # --- waiting --------------------------------------------------------------------------------

    async def wait(
        self, ids: Sequence[InstanceId], owner: str, job_id: str | None, wait_s: float
    ) -> Places:
        """Return places for instances, all or none, once it is their turn and there is room.

        They are kept for `RESERVED_S`. Cancelling gives up the turn.

        Raises:
            CapacityExceeded: There was none within `wait_s`.
        """
        loop = asyncio.get_running_loop()
        ticket = Ticket(tuple(ids), owner, job_id, loop.time())
        granted: asyncio.Future[Places] = loop.create_future()
        self._futures[ticket] = granted
        self._backlog.add(ticket)
        if self._serving is None or self._serving.done():
            self._serving = loop.create_task(self._serve())
        try:
            async with asyncio.timeout(wait_s):
                return await granted
        except TimeoutError as exc:
            raise CapacityExceeded(
                f"{len(ids)} instances found no place within {wait_s:g} s: {self._trouble}",
                retry_after_s=TRY_AGAIN_S,
                hint="release instances, lower the concurrency, add nodes, or wait longer",
            ) from exc
        finally:
            del self._futures[ticket]
            self._backlog.remove(ticket)

    async def for_dedicated(self, specs: Sequence[InstanceSpec], wait_s: float) -> Places:
        """Return places for a group of dedicated hosts; none where the cluster does not grow.

        Raises:
            CapacityExceeded: As `wait`.
        """
        nodes = await asyncio.to_thread(ray_api.alive_nodes)
        if not may_grow(nodes.values()):
            return []
        ids, first = [spec.instance_id for spec in specs], specs[0]
        return await self.wait(ids, first.owner or first.job_id or "", first.job_id, wait_s)

    def forget_jobs(self, jobs: Collection[str]) -> None:
        """Let creates of Ray jobs that ended wait no longer."""
        for ticket in self._backlog.of_jobs(jobs):
            if not self._futures[ticket].done():
                self._futures[ticket].set_exception(
                    CapacityExceeded("the Ray job that waited for places has ended")
                )

    async def _serve(self) -> None:
        while self._backlog:
            try:
                await self._turn()
            except Exception as exc:  # noqa: BLE001  # whoever waits is told at the deadline
                logger.warning("a turn of those who wait for places: %r", exc)
                self._trouble = exc.message if isinstance(exc, AenvError) else repr(exc)
            await asyncio.sleep(TURN_S)
        await self._demand([])

    async def _turn(self) -> None:
        nodes = await asyncio.to_thread(ray_api.alive_nodes)
        if self._demanded and await self._without_hosts(nodes):
            await self._demand([])  # it would keep a host from the node that came for it
        found = await self.shared(ASK_S, self._backlog.instances)
        actors = {load.name: host for load, host in found}
        loads = [load for load in await self._each(actors, "hold", HOLD_S) if load is not None]
        free_places = {load.name: load for load, _ in self._with_dedicated(_pairs(loads), nodes)}
        grants = self._backlog.grants(list(free_places.values()), asyncio.get_running_loop().time())
        for grant in grants:
            await self._give(grant, actors)
        capacity = sum(load.capacity for load in free_places.values())
        free = sum(load.free for load in free_places.values())
        free -= sum(len(grant.ticket.ids) for grant in grants)
        self._trouble = (
            f"{free} of {capacity} places on {len(free_places)} hosts are free, and "
            f"{len(self._backlog)} creates wait"
        )
        if may_grow(nodes.values()):
            await self._demand(bundles(self._backlog.instances - free, self._slots_per_node))

    async def _each(
        self, actors: Mapping[str, Any], operation: str, *args: Any
    ) -> list[HostLoad | None]:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._ask_load(name, host, operation, *args))
                for name, host in actors.items()
            ]
        return [task.result() for task in tasks]

    async def _ask_load(self, name: str, host: Any, operation: str, *args: Any) -> HostLoad | None:
        try:
            with ray_api.translated(f"{operation} on host {name}"):
                async with asyncio.timeout(ASK_S):
                    count, capacity = await getattr(host, operation).remote(*args)
        except (AenvError, TimeoutError) as exc:
            logger.warning("left out of this turn: %s: %s", name, exc)
            return None
        return HostLoad(name, self._hosts.nodes.get(name, ""), count, capacity)

    async def _give(self, grant: Grant, actors: Mapping[str, Any]) -> None:
        places: Places = []
        for name, ids in grant.shares.items():
            if not await self._reserve(name, actors[name], list(ids)):
                # What is kept elsewhere lapses, or is given to the same ids again.
                if not self._futures[grant.ticket].done():
                    self._backlog.add(grant.ticket)
                return
            places.append((name, actors[name], list(ids)))
        granted = self._futures.get(grant.ticket)
        if granted is not None and not granted.done():
            granted.set_result(places)

    async def _reserve(self, name: str, host: Any, ids: list[InstanceId]) -> bool:
        try:
            with ray_api.translated(f"reserving places on host {name}"):
                async with asyncio.timeout(ASK_S):
                    return bool(await host.reserve.remote(ids, RESERVED_S))
        except (AenvError, TimeoutError) as exc:
            logger.warning("no places on %s: %s", name, exc)
            return False

    async def _demand(self, wanted: list[int]) -> None:
        """Tell Ray which room is missing, unless it knows."""
        if wanted != self._demanded:
            await asyncio.to_thread(ray_api.demand_slots, wanted)
            self._demanded = wanted


def _has_slots(facts: NodeFacts | None) -> bool:
    return facts is not None and facts.slots is not None


def _pairs(loads: Iterable[HostLoad]) -> list[tuple[HostLoad, Any]]:
    return [(load, None) for load in loads]


def by_node(dedicated: Mapping[str, str | None]) -> Counter[str]:
    """Return how many dedicated hosts each node has, given the node of each."""
    return Counter(node for node in dedicated.values() if node is not None)
