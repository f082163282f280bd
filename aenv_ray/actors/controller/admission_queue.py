"""Who waits for room in a full cluster, and who gets it next, as decisions (design D9).

Owners take turns by what they were given since the backlog began, and an owner's creates go in the
order in which they came. A group is given all its places at once or none. One that does not fit yet
is overtaken by smaller ones for a while, and then by nobody, so that it comes to its places too;
unless it needs more nodes than there are, for which nobody is kept waiting.
Nothing here waits or asks anybody, and the time is passed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from aenv_ray.actors.controller.placement import HostLoad, spread
from aenv_ray.ids import InstanceId

OVERTAKEN_S: Final = 10.0
"""A group that does not fit is overtaken by others for this long."""
MOST_BUNDLES: Final = 64
"""Demands that Ray is told of at a time: its autoscaler looks at each of them again and again."""


@dataclass(frozen=True)
class Ticket:
    """A create that waits.

    Attributes:
        ids: Of the instances that it makes.
        owner: Whose turn it is when it is given places.
        job_id: The Ray job that it ends with; None: it ends with none.
        since: When it came, in seconds of any clock that only goes forward.
    """

    ids: tuple[InstanceId, ...]
    owner: str
    job_id: str | None
    since: float


class Grant(NamedTuple):
    """Places for a ticket: the ids that go to each host, by its name."""

    ticket: Ticket
    shares: dict[str, tuple[InstanceId, ...]]


class Backlog:
    """The creates that wait."""

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []
        self._given: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def instances(self) -> int:
        """How many instances all that wait would make."""
        return sum(len(ticket.ids) for ticket in self._tickets)

    def add(self, ticket: Ticket) -> None:
        """Let a create wait.

        An owner who comes anew is as far as the one who was given least: having had nothing so far
        is no reason to be served before all others.
        """
        owners = {waiting.owner for waiting in self._tickets}
        if ticket.owner not in owners:
            least = min((self._given[owner] for owner in owners), default=0)
            self._given[ticket.owner] = max(self._given[ticket.owner], least)
        self._tickets.append(ticket)

    def remove(self, ticket: Ticket) -> None:
        """Let a create wait no longer; again does nothing."""
        if ticket in self._tickets:
            self._tickets.remove(ticket)
        if not self._tickets:
            self._given.clear()

    def of_jobs(self, jobs: Collection[str]) -> list[Ticket]:
        """Return the creates of some Ray jobs."""
        return [ticket for ticket in self._tickets if ticket.job_id in jobs]

    def grants(self, hosts: Sequence[HostLoad], now: float) -> list[Grant]:
        """Return who is given which places now; they wait no longer.

        Args:
            hosts: All that take instances, with how full they are.
            now: On the clock of the tickets.
        """
        loads = {host.name: host for host in hosts}
        granted: list[Grant] = []
        waiting = list(self._tickets)
        while waiting:
            ticket = min(waiting, key=lambda t: (self._given[t.owner], t.since))
            waiting.remove(ticket)
            if len(ticket.ids) > sum(load.free for load in loads.values()):
                fits_ever = len(ticket.ids) <= sum(load.capacity for load in loads.values())
                if fits_ever and now - ticket.since >= OVERTAKEN_S:
                    break  # what becomes free from now on is kept for it
                # The owner's later ones wait with it: their order is the owner's.
                waiting = [other for other in waiting if other.owner != ticket.owner]
                continue
            shares, start = {}, 0
            for name, count in spread(len(ticket.ids), list(loads.values())).items():
                shares[name] = ticket.ids[start : start + count]
                start += count
                load = loads[name]
                loads[name] = replace(load, instances=load.instances + count)
            granted.append(Grant(ticket, shares))
            self._given[ticket.owner] += len(ticket.ids)
        for grant in granted:
            self.remove(grant.ticket)
        return granted


def bundles(missing: int, slots_per_node: int | None) -> list[int]:
    """Return the demands that stand for missing places, in slots each.

    Args:
        missing: Places for which there is no node.
        slots_per_node: What the largest node has, and so the next ones may have. None: no node has
            declared slots yet; the demands are then such that they fit any.
    """
    size = max(1, slots_per_node or 1)
    whole, rest = divmod(max(0, missing), size)
    return ([size] * whole + [rest] * bool(rest))[:MOST_BUNDLES]
