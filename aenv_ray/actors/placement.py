"""Where new instances go, as decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from aenv_ray.errors import CapacityExceeded

HOST_CAPACITY: Final = 4096
"""Instances that one shared host holds; measured at 4,000 live ones on 24 GB."""

DEDICATED_PER_NODE: Final = 1024
"""Dedicated instances of one group for each node: an actor has 50 MB and 22 threads, and a node's
usual limits end below this."""

SHARED_PREFIX: Final = "aenv-host-"
CORES_PER_HOST: Final = 8
"""One shared host serves about two thousand calls a second, more than eight cores make."""


def shared_host_names(node: str, cores: int) -> list[str]:
    """Return the names of the shared hosts that a node has by its cores; at least one."""
    return [f"{SHARED_PREFIX}{node[:12]}-{n}" for n in range(max(1, cores // CORES_PER_HOST))]


def emptiest(nodes: Iterable[str], taken: Iterable[str]) -> str | None:
    """Return the node that a further dedicated host goes to.

    Args:
        nodes: Those that may be used.
        taken: The node of each host that there is, or that is being started.

    Returns:
        The one with the fewest hosts; None when there is none.
    """
    hosts = Counter(taken)
    return min(nodes, key=lambda node: (hosts[node], node), default=None)


@dataclass(frozen=True)
class HostLoad:
    """A shared host and how full it is."""

    name: str
    node_id: str
    instances: int
    capacity: int = HOST_CAPACITY

    @property
    def free(self) -> int:
        """How many more it takes."""
        return max(0, self.capacity - self.instances)


def check_capacity(count: int, capacity: int) -> None:
    """Refuse a group that does not fit even into an empty cluster.

    Raises:
        CapacityExceeded: It does not.
    """
    if count > capacity:
        raise CapacityExceeded(
            f"{count} instances do not fit: the cluster holds {capacity} at most",
            retry_after_s=60.0,
            hint=f"make at most {capacity} at a time, or add nodes",
        )


def spread(count: int, hosts: Sequence[HostLoad]) -> dict[str, int]:
    """Divide `count` new instances among hosts so that the fullest stays as empty as possible.

    Returns:
        How many go to each host that gets any.

    Raises:
        CapacityExceeded: They do not all fit; none are placed.
    """
    free = sum(host.free for host in hosts)
    if count > free:
        raise CapacityExceeded(
            f"{count} instances do not fit: {free} of {sum(h.capacity for h in hosts)} places on "
            f"{len(hosts)} hosts are free",
            retry_after_s=1.0,
            hint="release instances, lower the concurrency, or add nodes",
        )
    load = {host.name: host.instances for host in hosts}
    room = {host.name: host.free for host in hosts}
    given: dict[str, int] = {}
    if len(hosts) == 1:
        return {hosts[0].name: count} if count else {}
    for _ in range(count):
        name = min((n for n in load if room[n] > 0), key=lambda n: (load[n], n))
        load[name] += 1
        room[name] -= 1
        given[name] = given.get(name, 0) + 1
    return given
