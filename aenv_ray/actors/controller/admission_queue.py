"""Decides which waiting create gets room next in a full cluster: pure decisions.

* Between owners, the one with the fewest slots granted since the queue was last empty is next.
* The creates of one owner are served in order of arrival.
* A group is granted all its slots at once, or none.
* Smaller groups may overtake one that does not fit yet, but only for `OVERTAKEN_S`.
* A group that is larger than the present cluster blocks no other group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from aenv_ray.actors.controller.placement import ONE_SLOT, HostLoad, Need, spread
from aenv_ray.actors.host.host_capacity import slots_of
from aenv_ray.ids import InstanceId
from aenv_ray.units import counted

OVERTAKEN_S: Final = 10.0
"""How long smaller groups may overtake one that does not fit."""
MOST_BUNDLES: Final = 64
"""Maximum number of demands sent to Ray at a time: its autoscaler looks at each one repeatedly."""


@dataclass(frozen=True)
class Ticket:
    """A waiting create."""

    ids: tuple[InstanceId, ...]
    """The ids of the instances to create."""
    owner: str
    job_id: str | None
    """The Ray job that the instances end with; None: they outlive it."""
    since: float
    """Arrival, in seconds of a monotonic clock."""
    is_divisible: bool = False
    """Whether it may be granted in part, because its instances are independent."""
    need: Need = ONE_SLOT
    """What each of its instances needs."""


class Grant(NamedTuple):
    """Slots for a ticket: the instance ids for each host, by the host's name."""

    ticket: Ticket
    shares: dict[str, tuple[InstanceId, ...]]

    @property
    def granted(self) -> int:
        """Number of instances that got a slot."""
        return sum(map(len, self.shares.values()))

    @property
    def left(self) -> int:
        """Number of instances of a divisible ticket without a slot; the create asks again."""
        return len(self.ticket.ids) - self.granted


class AdmissionQueue:
    """The waiting creates."""

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []
        self._granted: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def instances(self) -> int:
        """Number of instances that all waiting creates ask for."""
        return sum(len(ticket.ids) for ticket in self._tickets)

    def wanted(self) -> dict[Need, int]:
        """Return the number of instances that wait, by what they need."""
        found: Counter[Need] = Counter()
        for ticket in self._tickets:
            found[ticket.need] += len(ticket.ids)
        return dict(found)

    def oldest_s(self, now: float) -> float:
        """Return how long the oldest create has waited at a moment; 0 if none waits."""
        return max((now - ticket.since for ticket in self._tickets), default=0.0)

    def add(self, ticket: Ticket) -> None:
        """Add a create.

        A new owner starts at the count of the owner with the fewest granted slots. At zero, it
        would be served before all others until it had caught up.
        """
        owners = {waiting.owner for waiting in self._tickets}
        if ticket.owner not in owners:
            least = min((self._granted[owner] for owner in owners), default=0)
            self._granted[ticket.owner] = max(self._granted[ticket.owner], least)
        self._tickets.append(ticket)

    def remove(self, ticket: Ticket) -> None:
        """Remove a create; idempotent."""
        if ticket in self._tickets:
            self._tickets.remove(ticket)
        if not self._tickets:
            self._granted.clear()

    def without_nodes(self, alive: Collection[str]) -> list[Ticket]:
        """Return the creates whose instances may only be on nodes that are gone."""
        tied = [ticket for ticket in self._tickets if ticket.need.node_ids]
        return [ticket for ticket in tied if not any(map(ticket.need.may_be_on, alive))]

    def take_back(self, grant: Grant) -> None:
        """Put a create back in the queue if its granted slots could not be reserved."""
        owner, slots = grant.ticket.owner, grant.granted * grant.ticket.need.places
        self._granted[owner] = max(0, self._granted[owner] - slots)
        self.add(grant.ticket)

    def grants(self, hosts: Sequence[HostLoad], now: float) -> list[Grant]:
        """Return the slots to hand out now, and remove the creates that get them."""
        loads = {host.name: host for host in hosts}
        granted: list[Grant] = []
        waiting = list(self._tickets)
        while waiting:
            ticket = min(waiting, key=lambda t: (self._granted[t.owner], t.since))
            waiting.remove(ticket)
            places = ticket.need.places
            able = [load for load in loads.values() if load.suits(ticket.need)]
            room = sum(load.room(places) for load in able)
            ids = ticket.ids[:room] if ticket.is_divisible and room else ticket.ids
            if len(ids) > room:
                fits_ever = len(ticket.ids) <= sum(load.holds(places) for load in able)
                if fits_ever and now - ticket.since >= OVERTAKEN_S:
                    for load in able:  # keep the slots that become free there for this group
                        del loads[load.name]
                # Later creates of the same owner wait behind it, to keep that owner's order.
                waiting = [
                    other
                    for other in waiting
                    if (other.owner, other.need) != (ticket.owner, ticket.need)
                ]
                continue
            shares, start = {}, 0
            for name, count in spread(len(ids), able, places).items():
                shares[name] = ids[start : start + count]
                start += count
                loads[name] = loads[name].taking(count, places)
            granted.append(Grant(ticket, shares))
            self._granted[ticket.owner] += len(ids) * places
        for grant in granted:
            self.remove(grant.ticket)
        return granted


def missing_room(wanted: Mapping[Need, int], hosts: Sequence[HostLoad]) -> dict[Need, int]:
    """Return how many instances have no room on these hosts, by what they need.

    Free slots go first to the instances that may run on certain nodes only, then to those with the
    fewest possible engines, and of these to the ones with the most places.
    """
    left_of = {host.name: host for host in hosts}
    missing = {}
    many = len(hosts) + 99
    for need in sorted(
        wanted, key=lambda n: (len(n.node_ids) or many, len(n.engines) or many, -n.places, n)
    ):
        left = wanted[need]
        for host in list(left_of.values()):
            if host.suits(need):
                taken = min(left, host.room(need.places))
                left_of[host.name] = host.taking(taken, need.places)
                left -= taken
        if left > 0:
            missing[need] = left
    return missing


def bundles(missing: int, slots_per_node: int | None, places: int = 1) -> list[int]:
    """Return the resource demands for instances without room, in slots each.

    Args:
        missing: Instances for which there is no node.
        slots_per_node: Slots of the largest known node, which new nodes probably have too. None: no
            node has declared slots yet; each demand is then for one slot, which fits any node.
        places: `InstanceSpec.places` of each. Those of one instance are on one node.
    """
    missing = max(0, missing)
    if slots_per_node is None:
        return [1] * min(MOST_BUNDLES, missing * places)
    slots = slots_of(places, slots_per_node)
    per_node = max(1, slots_per_node) // slots
    whole, rest = divmod(missing, per_node)
    return ([per_node * slots] * whole + [rest * slots] * bool(rest))[:MOST_BUNDLES]


def explain_wait(
    queue: AdmissionQueue,
    *,
    free: int,
    capacity: int,
    hosts: int,
    draining: int,
    demanded_slots: int,
    demanded_for_s: float,
    has_autoscaler: bool,
) -> str:
    """Return why creates wait, in words.

    Args:
        queue: The waiting creates.
        free: Free slots of all hosts.
        capacity: Free and used slots of all hosts.
        hosts: Number of hosts.
        draining: Number of nodes that take no new instances.
        demanded_slots: Slots that Ray's autoscaler was asked for.
        demanded_for_s: Seconds since that request; no node has joined since.
        has_autoscaler: Whether an autoscaler runs in this cluster.
    """
    text = (
        f"{free} of {counted(capacity, 'slot')} on {counted(hosts, 'host')} are free; "
        f"{counted(len(queue), 'create')} for {counted(queue.instances, 'instance')} "
        f"{'waits' if len(queue) == 1 else 'wait'}"
    )
    if draining:
        text += (
            f"; {draining} of the cluster's nodes take none because they are draining: "
            "aenv cluster nodes lists them, aenv cluster undrain ends it"
        )
    if not demanded_slots:
        return text
    if not has_autoscaler:
        return f"{text}; no autoscaler runs in this cluster: add workers with env_slot resources"
    return (
        f"{text}; Ray's autoscaler was asked for {demanded_slots} more env_slot resources "
        f"{demanded_for_s:.0f} s ago and no worker has joined since: ray status shows what it does "
        "(a worker group at its maxReplicas does not grow)"
    )
