"""Decides which nodes and hosts get new instances: pure decisions."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from aenv_ray.actors.host.host_capacity import HOST_CAPACITY, slots_of
from aenv_ray.actors.ray_shell.nodes import NodeFacts
from aenv_ray.errors import CapacityExceeded, FabricUnavailable
from aenv_ray.models import InstanceSpec
from aenv_ray.units import counted

DEDICATED_PER_NODE: Final = 1024
"""Maximum number of dedicated instances of one group per node. An actor needs 50 MB and 22 threads,
so most nodes reach their own limits earlier."""

SHARED_PREFIX: Final = "aenv-host-"
CORES_PER_HOST: Final = 8
"""Cores of a node for each shared host. A host handles about 2,000 calls per second; the sandboxes
on eight cores make fewer."""


def host_capacities(node: NodeFacts) -> list[int]:
    """Return how many instances each shared host of a node holds; one entry for each host."""
    if not node.takes_instances:
        return []
    hosts = max(1, node.cores // CORES_PER_HOST)
    if node.slots is None:
        return [HOST_CAPACITY] * hosts
    hosts = min(hosts, node.slots)
    each, more = divmod(node.slots, hosts)
    return [each + (n < more) for n in range(hosts)]


def shared_host_names(node: str, facts: NodeFacts) -> dict[str, int]:
    """Return the names of the shared hosts of a node, with the capacity of each."""
    capacities = host_capacities(facts)
    return {f"{SHARED_PREFIX}{node[:12]}-{n}": capacity for n, capacity in enumerate(capacities)}


def is_on_node(name: str, node: str) -> bool:
    """Return whether a name is that of a shared host of a node."""
    return name.startswith(f"{SHARED_PREFIX}{node[:12]}-")


def usable(nodes: Mapping[str, NodeFacts]) -> dict[str, NodeFacts]:
    """Return the nodes that may run instances.

    If some nodes declare slots, the others run none: without a limit they would get all instances.
    """
    are_declared = any(facts.slots is not None for facts in nodes.values())
    return {
        node: facts
        for node, facts in nodes.items()
        if facts.takes_instances and (facts.slots is not None or not are_declared)
    }


def may_grow(nodes: Iterable[NodeFacts]) -> bool:
    """Return whether nodes may join on demand: some declare slots, or the head runs no work.

    In a cluster that cannot grow, a create that can never fit is refused at once.
    """
    return any(node.is_elastic or not node.takes_instances for node in nodes)


def needed(idle: Mapping[str, NodeFacts], missing: int, places: int = 1) -> list[str]:
    """Return the idle nodes that get hosts, so that `missing` more instances have room.

    `places` is `InstanceSpec.places` of each.
    """
    chosen: list[str] = []
    for node, facts in sorted(idle.items()):
        if missing <= 0:
            break
        chosen.append(node)
        missing -= sum(n // slots_of(places, n) for n in host_capacities(facts))
    return chosen


def node_for(spec: InstanceSpec, nodes: Iterable[str], taken: Iterable[str]) -> str | None:
    """Return the node for the dedicated host of an instance, or None.

    It is one of those that the instance may run on: the one that it prefers, else the emptiest.
    """
    allowed = [node for node in nodes if not spec.node_ids or node in spec.node_ids]
    return spec.near_node if spec.near_node in allowed else emptiest(allowed, taken)


def emptiest(nodes: Iterable[str], taken: Iterable[str]) -> str | None:
    """Return the node for another dedicated host: the one with the fewest hosts, or None.

    `taken` is the node of each host that runs or is being started.
    """
    hosts = Counter(taken)
    return min(nodes, key=lambda node: (hosts[node], node), default=None)


class Need(NamedTuple):
    """What an instance needs of a host."""

    engines: tuple[str, ...] = ()
    """Engines that it may run on; empty: any."""
    places: int = 1
    """`InstanceSpec.places`, at least one."""
    node_ids: tuple[str, ...] = ()
    """Ray nodes that it may run on; empty: any."""

    def may_be_on(self, node: str) -> bool:
        """Whether it may run on a node."""
        return not self.node_ids or node in self.node_ids


ONE_SLOT: Final = Need()
"""The least that an instance needs: one slot, on any host."""


@dataclass(frozen=True)
class HostLoad:
    """A shared host and its load."""

    name: str
    node_id: str
    instances: int
    """Number of used or reserved slots."""
    capacity: int = HOST_CAPACITY
    engines: tuple[str, ...] = ()
    """The engines that it can run; empty if they are not known."""
    is_held: bool = False
    """Whether its free slots are kept for creates that wait."""

    @property
    def free(self) -> int:
        """Number of free slots."""
        return max(0, self.capacity - self.instances)

    def room(self, places: int) -> int:
        """Return how many more instances with `places` each fit; inner ones always fit."""
        if not places:
            return sys.maxsize
        return 0 if self.is_held else self.free // slots_of(places, self.capacity)

    def holds(self, places: int) -> int:
        """Return how many instances that have `places` each, at least one, fit if it is empty."""
        return self.capacity // slots_of(places, self.capacity)

    def taking(self, count: int, places: int) -> HostLoad:
        """Return the load with `count` more instances."""
        more = count * slots_of(places, self.capacity)
        return replace(self, instances=self.instances + more)

    def runs(self, engines: Collection[str]) -> bool:
        """Whether it can run one of these engines; true if nothing is known of its engines."""
        return not self.engines or not engines or any(name in engines for name in self.engines)

    def suits(self, need: Need) -> bool:
        """Whether an instance with this need may run there, if there is room."""
        return self.runs(need.engines) and need.may_be_on(self.node_id)


def on_nodes(hosts: Sequence[HostLoad], nodes: Sequence[str]) -> list[HostLoad]:
    """Return the hosts on certain nodes; all hosts if no node is given.

    Raises:
        FabricUnavailable: No host is on those nodes.
    """
    found = [host for host in hosts if not nodes or host.node_id in nodes]
    if hosts and not found:
        raise nodes_are_gone(nodes)
    return found


def nodes_are_gone(nodes: Iterable[str]) -> FabricUnavailable:
    """Return the error of an instance that may only be on these nodes."""
    return FabricUnavailable(
        f"no host on node {', '.join(node[:8] for node in nodes)} answers, and the instance "
        "cannot be on another node",
        hint="its storage is on that machine; bring the machine back",
    )


def near_node(hosts: Sequence[HostLoad], node: str, count: int, places: int = 1) -> list[HostLoad]:
    """Return the hosts on a node, if they have room for `count` instances; else all hosts."""
    found = [host for host in hosts if host.node_id == node]
    return found if sum(host.room(places) for host in found) >= count > 0 else list(hosts)


def check_capacity(count: int, capacity: int) -> None:
    """Refuse a group that would not fit into an empty cluster.

    Raises:
        CapacityExceeded: It would not fit.
    """
    if count > capacity:
        raise CapacityExceeded(
            f"no room for {counted(count, 'instance')}: the cluster holds {capacity} at most",
            retry_after_s=60.0,
            hint=f"create at most {capacity} at a time, or add nodes",
        )


def spread(count: int, hosts: Sequence[HostLoad], places: int = 1) -> dict[str, int]:
    """Divide `count` new instances among hosts so that the fullest host gets as few as possible.

    Args:
        count: How many.
        hosts: Where they may run.
        places: `InstanceSpec.places` of each. Inner instances, which have none, only prefer hosts
            with free slots.

    Returns:
        The number for each host that gets any.

    Raises:
        CapacityExceeded: They do not all fit.
    """
    if not places:
        hosts = [host for host in hosts if host.free] or hosts
    room = {host.name: host.room(places) for host in hosts}
    if count > sum(room.values()):
        free, capacity = sum(h.free for h in hosts), sum(h.capacity for h in hosts)
        held = sum(host.free for host in hosts if host.is_held)
        kept = f", and {held} of these are kept for creates that have waited longer" if held else ""
        each = f" of {places} slots each, inner instances included," if places > 1 else ""
        raise CapacityExceeded(
            f"no room for {counted(count, 'instance')}{each}: {free} of "
            f"{counted(capacity, 'slot')} on {counted(len(hosts), 'host')} are free{kept}",
            retry_after_s=1.0,
            hint="release instances, lower the concurrency, add nodes, or join the queue with "
            "queue_timeout",
        )
    load = {host.name: host.instances for host in hosts}
    slots = {host.name: slots_of(places, host.capacity) for host in hosts}
    given: Counter[str] = Counter()
    if len(hosts) == 1:
        return {hosts[0].name: count} if count else {}
    for _ in range(count):
        name = min((n for n in load if room[n] > 0), key=lambda n: (load[n], n))
        load[name] += slots[name]
        room[name] -= 1
        given[name] += 1
    return dict(given)
