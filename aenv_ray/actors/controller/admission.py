"""Admission: the room of the cluster, and the creates that wait for it.

`AdmissionQueue` decides; this module asks the hosts and tells Ray. Nodes that declare slots come
and go with demand: they have hosts only while they are used, and waiting creates become resource
demand that Ray's autoscaler sees. Other nodes have hosts from the first use on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

from aenv_ray.actors.controller.admission_queue import (
    MOST_BUNDLES,
    AdmissionQueue,
    Grant,
    Ticket,
    bundles,
    explain_wait,
    missing_room,
)
from aenv_ray.actors.controller.host_directory import HostDirectory
from aenv_ray.actors.controller.placement import (
    ONE_SLOT,
    HostLoad,
    Need,
    may_grow,
    needed,
    nodes_are_gone,
    shared_host_names,
    usable,
)
from aenv_ray.actors.host.node_engines import engine_refusal
from aenv_ray.actors.host.remote_host import RemoteHost
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.actors.ray_shell.nodes import NodeFacts, SlotDemand
from aenv_ray.background_tasks import start_shared
from aenv_ray.errors import AenvError, CapacityExceeded, FabricUnavailable, InstanceReleased
from aenv_ray.ids import InstanceId
from aenv_ray.models import InstanceSpec
from aenv_ray.units import counted

logger = logging.getLogger(__name__)

SOON_S: Final = 0.02
"""Shortest pause between two turns in which slots are handed out to waiting creates."""
TURN_S: Final = 0.5
"""Longest pause between two turns: each one in which no slot was free doubles it. Also the shortest
time between two demands on Ray's autoscaler."""
HOLD_S: Final = 20.0
"""While creates wait, hosts accept only those with a reservation; each turn renews that, or ends
it."""
PATIENCE_S: Final = 1.0
"""How long a turn waits for hosts once one has answered, and for a host that it starts."""
RESERVED_S: Final = 30.0
"""How long a host keeps a slot for a create that was granted it."""
SEEN_S: Final = 0.2
"""How long the list of nodes and hosts is used again: asking Ray takes milliseconds."""
ASK_S: Final = 5.0
"""A host that does not answer within this is left out of a turn."""
TRY_AGAIN_S: Final = 5.0
"""``retry_after_s`` of a create that found no room while it waited."""


class Reservation(NamedTuple):
    """Slots on one host that are kept for instances."""

    host_name: str
    host: RemoteHost
    """The host actor."""
    instance_ids: list[InstanceId]


class _Nodes(NamedTuple):
    alive: dict[str, NodeFacts]
    idle: dict[str, NodeFacts]
    """The elastic ones that take instances and have no shared host."""


class Cluster(Protocol):
    """What admission uses of Ray; `aenv_ray.actors.ray_shell.ray_api` has it."""

    def alive_nodes(self) -> dict[str, NodeFacts]:
        """See `ray_api.alive_nodes`."""

    def actor_names(self) -> list[str]:
        """See `ray_api.actor_names`."""

    def demand_slots(self, bundles: Sequence[SlotDemand]) -> None:
        """See `ray_api.demand_slots`."""

    def has_autoscaler(self) -> bool:
        """See `ray_api.has_autoscaler`."""


class Admission:
    """The cluster's room and the creates that wait for it.

    Args:
        hosts: Starts hosts and asks for their load.
        dedicated: Returns the number of slots of dedicated instances on each node, by node id.
        cluster: Ray.
        joining: The engines of the workers that may join; empty if they are not known.
    """

    def __init__(
        self,
        hosts: HostDirectory,
        dedicated: Callable[[], Mapping[str, int]],
        cluster: Cluster = ray_api,
        joining: Sequence[str] = (),
    ) -> None:
        self._hosts = hosts
        self._dedicated = dedicated
        self._cluster = cluster
        self._joining = tuple(joining)
        self._queue = AdmissionQueue()
        self._waiters: dict[Ticket, asyncio.Future[list[Reservation]]] = {}
        self._serving: asyncio.Task[None] | None = None
        self._demanded: list[SlotDemand] = []
        self._demanded_at = 0.0
        self._told_at = float("-inf")
        self._slots_per_node: int | None = None
        self._reason = "the cluster has no room"
        self._seen: tuple[float, _Nodes] | None = None
        self._looks = 0
        self._came = asyncio.Event()
        """Set when a create begins to wait."""
        self._held: dict[str, tuple[HostLoad, RemoteHost]] = {}
        """The hosts that were told to accept only instances with a reservation, by name."""
        self._held_until = float("-inf")
        """When these hosts accept all instances again, unless they are told otherwise before."""

    async def open(self) -> None:
        """Withdraw the demand of an earlier controller, unless a waiting create has replaced it."""
        if not self._demanded:
            await asyncio.to_thread(self._cluster.demand_slots, [])
            self._demanded = []  # a host that was told in the meantime is told again

    # --- room -----------------------------------------------------------------------------------

    async def shared_hosts(
        self, patience_s: float, wanted: int, need: Need = ONE_SLOT
    ) -> list[tuple[HostLoad, RemoteHost]]:
        """Return the shared hosts with their load, starting missing ones.

        Args:
            patience_s: How long to wait for more hosts once one has answered.
            wanted: Number of instances that need room; elastic nodes get hosts only as far as
                needed.
            need: What each of them needs. Hosts that do not suit it are returned, too.

        Returns:
            Hosts and actors; empty if the cluster has no node for instances but may get some.

        Raises:
            FabricUnavailable: No host answers, or no node can run these engines; the message has
                the causes.
        """
        nodes, idle = await self._nodes()
        present = {n: f for n, f in usable(nodes).items() if n not in idle}
        found = await self._present(nodes, idle, present, patience_s)
        chosen = self._chosen(idle, {need: wanted}, self._with_dedicated(found, nodes))
        if chosen:
            try:
                found += await self._hosts.loads(chosen, patience_s=patience_s)
            except FabricUnavailable:
                if not found:
                    raise
        await self._check_engines(need.engines)
        is_held = asyncio.get_running_loop().time() < self._held_until
        held = self._held if is_held else {}
        found = self._with_dedicated(found, nodes)
        return [(replace(load, is_held=load.name in held), host) for load, host in found]

    async def _present(
        self,
        nodes: Mapping[str, NodeFacts],
        idle: Mapping[str, NodeFacts],
        present: Mapping[str, NodeFacts],
        patience_s: float,
    ) -> list[tuple[HostLoad, RemoteHost]]:
        """Return the hosts of nodes that have some."""
        if not present and may_grow(nodes.values()):
            return []
        try:
            return await self._hosts.loads(present, patience_s=patience_s)
        except FabricUnavailable:
            if not idle:
                raise
            return []

    def _chosen(
        self,
        idle: Mapping[str, NodeFacts],
        wanted: Mapping[Need, int],
        found: Iterable[tuple[HostLoad, RemoteHost]],
    ) -> dict[str, NodeFacts]:
        """Return the idle nodes that get hosts, because the others have too little room."""
        chosen: dict[str, NodeFacts] = {}
        for need, missing in missing_room(wanted, [load for load, _ in found]).items():
            able = {n: f for n, f in idle.items() if _suits(n, f, need) and n not in chosen}
            chosen |= {n: able[n] for n in needed(able, missing, need.places)}
        return chosen

    async def _check_engines(self, engines: Sequence[str]) -> None:
        """Check that some node can run one of these engines, or that one may join.

        Raises:
            FabricUnavailable: None can; the message names the engines that the nodes have.
        """
        nodes, _ = await self._nodes()
        if self._refusal(engines, nodes) is None:
            return
        self.forget_nodes()  # one may have just joined
        nodes, _ = await self._nodes()
        refusal = self._refusal(engines, nodes)
        if refusal is not None and not await self._may_join(engines, nodes):
            raise refusal

    def _refusal(
        self, engines: Sequence[str], nodes: Mapping[str, NodeFacts]
    ) -> FabricUnavailable | None:
        offered = [
            (facts.engine,) if facts.engine else self._hosts.engines.get(node, ())
            for node, facts in usable(nodes).items()
        ]
        return engine_refusal(engines, offered)

    async def _may_join(self, engines: Sequence[str], nodes: Mapping[str, NodeFacts]) -> bool:
        """Whether a node with one of these engines may join on demand."""
        if not may_grow(nodes.values()):
            return False
        if self._joining:
            return not set(engines).isdisjoint(self._joining)
        return await asyncio.to_thread(self._cluster.has_autoscaler)

    def forget_nodes(self) -> None:
        """Ask Ray again before the next use of the list of nodes, because they have changed."""
        self._seen = None
        self._looks += 1

    async def _nodes(self) -> _Nodes:
        """Return the nodes as they were within the last `SEEN_S`."""
        now, look = asyncio.get_running_loop().time(), self._looks
        if self._seen is not None and now <= self._seen[0] + SEEN_S:
            return self._seen[1]
        found = await asyncio.to_thread(self._look)
        if look == self._looks:
            self._seen = now, found
        slots = [facts.slots for facts in found.alive.values() if facts.slots]
        self._slots_per_node = max([*slots, self._slots_per_node or 0]) or None
        return found

    def _look(self) -> _Nodes:
        nodes = self._cluster.alive_nodes()
        elastic = {n: f for n, f in nodes.items() if f.is_elastic and f.takes_instances}
        names = set(self._cluster.actor_names()) if elastic else set()
        idle = {n: f for n, f in elastic.items() if names.isdisjoint(shared_host_names(n, f))}
        return _Nodes(nodes, idle)

    def _with_dedicated(
        self, found: Iterable[tuple[HostLoad, RemoteHost]], nodes: Mapping[str, NodeFacts]
    ) -> list[tuple[HostLoad, RemoteHost]]:
        """Add the dedicated hosts of nodes with slots to the load of the node's first host."""
        left = {n: count for n, count in self._dedicated().items() if _has_slots(nodes.get(n))}
        counted = []
        for load, host in found:
            more = left.pop(load.node_id, 0)
            counted.append((replace(load, instances=load.instances + more), host))
        return counted

    # --- waiting --------------------------------------------------------------------------------

    async def wait(
        self,
        ids: Sequence[InstanceId],
        owner: str,
        job_id: str | None,
        wait_s: float,
        is_divisible: bool = False,
        need: Need = ONE_SLOT,
    ) -> list[Reservation]:
        """Return slots for all instances of a group, once it is the owner's turn.

        The slots are on hosts that suit `need`. Each instance gets all its places on one host.

        If the group is divisible, these may be slots for some of its instances; the caller asks
        again for the others. The hosts keep the slots for `RESERVED_S`. Cancelling leaves the
        queue.

        Raises:
            CapacityExceeded: There was no room within `wait_s`.
            FabricUnavailable: No node can run these engines, and none that can may join; or the
                nodes that it may run on are gone.
        """
        loop = asyncio.get_running_loop()
        ticket = Ticket(tuple(ids), owner, job_id, loop.time(), is_divisible, need)
        granted: asyncio.Future[list[Reservation]] = loop.create_future()
        self._waiters[ticket] = granted  # from now on it can be told that its caller gave up
        try:
            if need.engines:
                await self._check_engines(need.engines)
            if not granted.done():
                self._queue.add(ticket)
                self._came.set()
                if self._serving is None or self._serving.done():
                    self._serving = start_shared(self._serve())
            async with asyncio.timeout(wait_s):
                return await granted
        except TimeoutError as exc:
            if granted.done() and not granted.cancelled():  # at the last moment
                return granted.result()
            raise CapacityExceeded(
                f"no room for {counted(len(ids), 'instance')} within {wait_s:g} s: {self._reason}",
                retry_after_s=TRY_AGAIN_S,
                hint="release instances, lower the concurrency, add nodes, or wait longer",
            ) from exc
        finally:
            del self._waiters[ticket]
            self._queue.remove(ticket)

    async def wait_for_dedicated(
        self, specs: Sequence[InstanceSpec], wait_s: float
    ) -> list[Reservation]:
        """Return slots for a group of dedicated hosts; none if the cluster cannot grow.

        Raises:
            CapacityExceeded: As `wait`.
        """
        nodes, _ = await self._nodes()
        if not may_grow(nodes.values()):
            return []
        ids, first = [spec.instance_id for spec in specs], specs[0]
        owner = first.owner or first.job_id or ""
        need = Need(first.possible_engines, first.places, first.node_ids)
        return await self.wait(ids, owner, first.job_id, wait_s, need=need)

    def reason(self) -> str:
        """Return why creates wait for room, for people; empty if none waits."""
        return self._reason if self._queue else ""

    def queued(self) -> tuple[int, int, float]:
        """Return the number of waiting creates, their instances, and the oldest one's age in s."""
        now = asyncio.get_running_loop().time()
        return len(self._queue), self._queue.instances, self._queue.oldest_s(now)

    def forget_jobs(self, jobs: Collection[str]) -> None:
        """Fail the waiting creates of Ray jobs that ended."""
        error = CapacityExceeded(
            "the Ray job that waited for slots has ended",
            hint='create it with lifetime="detached" if it must outlive the job',
        )
        self._fail([ticket for ticket in self._waiters if ticket.job_id in jobs], error)

    def forget(self, ids: Collection[InstanceId]) -> None:
        """Fail the waiting creates of these instances, because their caller has given up."""
        error = InstanceReleased(
            "the instance was released while it waited for slots",
            hint="create it again if it is needed",
        )
        self._fail(self._tickets_of(ids), error)

    def is_waiting(self, ids: Collection[InstanceId]) -> bool:
        """Return whether a create of some of these instances waits for slots."""
        return bool(self._tickets_of(ids))

    def _tickets_of(self, ids: Collection[InstanceId]) -> list[Ticket]:
        return [ticket for ticket in self._waiters if not set(ids).isdisjoint(ticket.ids)]

    def _fail(self, tickets: Iterable[Ticket], error: AenvError) -> None:
        for ticket in tickets:
            self._queue.remove(ticket)
            if not self._waiters[ticket].done():
                self._waiters[ticket].set_exception(error)

    async def _serve(self) -> None:
        """Have turns while creates wait, as often as slots become free."""
        clock, pause_s = asyncio.get_running_loop().time, SOON_S
        while self._queue or self._held or self._demanded:
            began, has_granted = clock(), True
            self._came.clear()
            try:
                if self._queue:
                    has_granted = await self._turn()
                else:
                    await self._let_go(self._held)
                    await self._demand([])
            except Exception as exc:  # noqa: BLE001  # a waiting create learns of it at its deadline
                logger.warning("handing out slots failed: %r", exc)
                self._reason = exc.message if isinstance(exc, AenvError) else repr(exc)
                has_granted = False
            # As long as a short turn, so that these take half of the controller's time at most.
            least_s = min(TURN_S, max(SOON_S, clock() - began))
            pause_s = least_s if has_granted else max(least_s, min(TURN_S, 2 * pause_s))
            await asyncio.sleep(least_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s - least_s):
                    await self._came.wait()

    async def _turn(self) -> bool:
        """Hand out the free slots and tell Ray how many are missing; return whether any was."""
        nodes, without = await self._nodes()
        idle = {n: f for n, f in without.items() if self._hosts.refusal(n) is None}
        for ticket in self._queue.without_nodes(nodes):
            self._fail([ticket], nodes_are_gone(ticket.need.node_ids))
        wanted = self._queue.wanted()
        if self._demanded and any(_suits(n, f, need) for n, f in idle.items() for need in wanted):
            # Withdraw the demand: otherwise it would take the slots that the new node's host needs.
            await self._demand([], at_once=True)
        present = {n: f for n, f in usable(nodes).items() if n not in without}
        found = await self._hosts_for_queue(nodes, idle, present, wanted)
        actors = {load.name: host for load, host in found}
        loads = {load.name: load for load, _ in found}
        grants = self._queue.grants(list(loads.values()), asyncio.get_running_loop().time())
        wanted = self._queue.wanted()
        for grant in grants:
            for name, ids in grant.shares.items():
                loads[name] = loads[name].taking(len(ids), grant.ticket.need.places)
            if grant.left:  # the create will queue again for these in a moment
                need = grant.ticket.need
                wanted[need] = wanted.get(need, 0) + grant.left
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._give(grant, actors)) for grant in grants]
        given = [task.result() for task in tasks]
        # Only now: a create that fits at once does not make the hosts refuse others.
        await self._hold_for(wanted.keys() | self._queue.wanted().keys(), found)
        if may_grow(nodes.values()):
            await self._demand(self._demands(wanted, list(loads.values()), nodes))
        self._reason = explain_wait(
            self._queue,
            free=sum(load.free for load in loads.values()),
            capacity=sum(load.capacity for load in loads.values()),
            hosts=len(loads),
            draining=sum(facts.is_draining for facts in nodes.values()),
            demanded_slots=sum(demand.slots for demand in self._demanded),
            demanded_for_s=asyncio.get_running_loop().time() - self._demanded_at,
            has_autoscaler=bool(self._demanded)
            and await asyncio.to_thread(self._cluster.has_autoscaler),
        )
        return any(given)

    async def _hosts_for_queue(
        self,
        nodes: Mapping[str, NodeFacts],
        idle: Mapping[str, NodeFacts],
        present: Mapping[str, NodeFacts],
        wanted: Mapping[Need, int],
    ) -> list[tuple[HostLoad, RemoteHost]]:
        """Return the shared hosts that can run waiting instances; idle nodes get some as needed.

        Hosts that suit none are not asked, so that they may end.

        Raises:
            FabricUnavailable: No host answers, or no node can run any of the engines that are
                waited for; the message has the causes.
        """
        refusals: list[FabricUnavailable] = []
        for engines in {need.engines for need in wanted}:
            try:
                await self._check_engines(engines)
            except FabricUnavailable as exc:  # creates for other engines need not wait
                refusals.append(exc)
        if refusals and len(refusals) == len({need.engines for need in wanted}):
            raise refusals[0]
        present = {n: f for n, f in present.items() if any(_suits(n, f, need) for need in wanted)}
        found = await self._present(nodes, idle, present, PATIENCE_S)
        chosen = self._chosen(idle, wanted, self._with_dedicated(found, nodes))
        if chosen:
            # What starts late takes part in a later turn: nobody waits for a node that is slow.
            with contextlib.suppress(FabricUnavailable, TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    found += await self._hosts.loads(chosen, patience_s=PATIENCE_S)
        found = self._with_dedicated(found, nodes)
        return [(load, host) for load, host in found if any(map(load.suits, wanted))]

    def _demands(
        self,
        wanted: Mapping[Need, int],
        loads: Sequence[HostLoad],
        nodes: Mapping[str, NodeFacts],
    ) -> list[SlotDemand]:
        """Return what to ask Ray's autoscaler for.

        Instances that may run on any of the cluster's engines leave it the choice of the worker.
        """
        declared = set(self._joining) or {f.engine for f in nodes.values() if f.engine}
        demands = []
        for (engines, places, node_ids), missing in missing_room(wanted, loads).items():
            if node_ids:
                continue  # no node that joins is one of these
            is_free = not engines or not declared or declared <= set(engines)
            selected = () if is_free else tuple(name for name in engines if name in declared)
            pieces = bundles(missing, self._slots_per_node, places)
            demands += [SlotDemand(slots, selected) for slots in pieces]
        return demands[:MOST_BUNDLES]

    async def _hold_for(
        self, wanted: Collection[Need], hosts: Iterable[tuple[HostLoad, RemoteHost]]
    ) -> None:
        """Have the hosts that suit waiting creates accept only those, and all others anyone."""
        known = self._held | {load.name: (load, host) for load, host in hosts}
        kept = {name: pair for name, pair in known.items() if any(map(pair[0].suits, wanted))}
        await self._let_go({name: pair for name, pair in self._held.items() if name not in kept})
        self._held = kept
        self._held_until = asyncio.get_running_loop().time() + HOLD_S
        await self._hold(kept, HOLD_S)

    async def _let_go(self, hosts: Mapping[str, tuple[HostLoad, RemoteHost]]) -> None:
        """Have hosts accept all instances again; one that does not answer does so by itself."""
        self._held = {name: pair for name, pair in self._held.items() if name not in hosts}
        await self._hold(hosts, 0.0)

    async def _hold(self, hosts: Mapping[str, tuple[HostLoad, RemoteHost]], seconds: float) -> None:
        async with asyncio.TaskGroup() as group:
            for name, (_, host) in hosts.items():
                group.create_task(self._hold_one(name, host, seconds))

    async def _hold_one(self, name: str, host: RemoteHost, seconds: float) -> None:
        try:
            with ray_api.translated(f"hold on host {name}"):
                async with asyncio.timeout(ASK_S):
                    await host.hold.remote(seconds)
        except Exception as exc:  # noqa: BLE001  # the other hosts do not depend on it
            self._held.pop(name, None)
            logger.warning("host %s does not hold slots for waiting creates: %r", name, exc)

    async def _give(self, grant: Grant, actors: Mapping[str, RemoteHost]) -> bool:
        """Reserve the slots of one grant and wake its waiter; return whether it got them.

        The waiter may time out or be cancelled meanwhile. Then, and if a host refuses, what other
        hosts reserved for this grant is released.
        """
        reserved: list[Reservation] = []
        is_complete = True
        for name, ids in grant.shares.items():
            is_complete = await self._reserve(
                name, actors[name], list(ids), RESERVED_S, grant.ticket.need.places
            )
            if not is_complete:
                break
            reserved.append(Reservation(name, actors[name], list(ids)))
        waiter = self._waiters.get(grant.ticket)
        is_waiting = waiter is not None and not waiter.done()
        if waiter is not None and is_waiting and is_complete:
            waiter.set_result(reserved)
            return True
        if is_waiting:
            self._queue.take_back(grant)
        for one in reserved:
            await self._reserve(one.host_name, one.host, one.instance_ids, 0.0, 1)
        return False

    async def _reserve(
        self, name: str, host: RemoteHost, ids: list[InstanceId], seconds: float, places: int
    ) -> bool:
        try:
            with ray_api.translated(f"reserving slots on host {name}"):
                async with asyncio.timeout(ASK_S):
                    return bool(await host.reserve.remote(ids, seconds, places))
        except Exception as exc:  # noqa: BLE001  # the other grants of this turn do not depend on it
            logger.warning("no slots reserved on host %s: %r", name, exc)
            return False

    async def _demand(self, wanted: list[SlotDemand], *, at_once: bool = False) -> None:
        """Tell Ray how many slots are missing, unless it was told the same.

        If it was told less than `TURN_S` ago, a later turn tells it. `at_once` tells it now, for a
        moment: the next demand need not wait.
        """
        now = asyncio.get_running_loop().time()
        if wanted == self._demanded or (now < self._told_at + TURN_S and not at_once):
            return
        if not self._demanded:
            self._demanded_at = now
        await asyncio.to_thread(self._cluster.demand_slots, wanted)
        self._demanded = wanted
        if not at_once:
            self._told_at = now


def _has_slots(facts: NodeFacts | None) -> bool:
    return facts is not None and facts.slots is not None


def _suits(node: str, facts: NodeFacts, need: Need) -> bool:
    return facts.may_run(need.engines) and need.may_be_on(node)


def by_node(dedicated: Mapping[str, str | None], places: Mapping[str, int]) -> Counter[str]:
    """Return the number of slots that dedicated instances take on each node.

    Args:
        dedicated: The node of each host, by name.
        places: `InstanceSpec.places` of the instances of some of these hosts; of the others: 1.
    """
    slots: Counter[str] = Counter()
    for name, node in dedicated.items():
        if node is not None:
            slots[node] += places.get(name, 1)
    return slots
