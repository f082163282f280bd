"""The slots of a host, some of them reserved for creates that waited: pure decisions.

An instance takes as many slots as it has `InstanceSpec.places`: one for itself, and one for each
inner instance that it may have. An inner instance takes none and is always accepted. Otherwise an
agent that makes its environment call others could fill the cluster and so void its episode.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from aenv_ray.clock import Clock
from aenv_ray.errors import CapacityExceeded, FabricUnavailable
from aenv_ray.ids import HostId, InstanceId

HOST_CAPACITY: Final = 4096
"""Capacity of a shared host; measured with 4,000 live instances on 24 GB."""


def slots_of(places: int, capacity: int) -> int:
    """Return how many slots of a host an instance takes: all of a host that has fewer."""
    return min(places, max(1, capacity))


class HostCapacity:
    """Decides which instances a host accepts.

    Args:
        present: Returns the number of slots in use, by instances that are starting too.
    """

    def __init__(
        self, host_id: HostId, capacity: int, present: Callable[[], int], clock: Clock
    ) -> None:
        self._slots = capacity
        self._host_id = host_id
        self._present = present
        self._clock = clock
        self._reserved: dict[InstanceId, tuple[float, int]] = {}
        """The end of each reservation, and its slots."""
        self._held_until = float("-inf")
        self._drained_until = float("-inf")

    @property
    def capacity(self) -> int:
        """Number of slots; while the node drains, only those that are in use."""
        return min(self._slots, self.taken()) if self.is_draining() else self._slots

    def drain(self, seconds: float) -> None:
        """Accept only instances that have a reservation already, for this long."""
        self._drained_until = self._clock.now() + seconds

    def is_draining(self) -> bool:
        """Return whether only instances that have a reservation already are accepted."""
        return self._clock.now() < self._drained_until

    def slots_of(self, places: int) -> int:
        """Return how many slots an instance takes here."""
        return slots_of(places, self._slots)

    def taken(self, without: Collection[InstanceId] = ()) -> int:
        """Return the number of used or reserved slots, without reservations for these ids."""
        reserved = (slots for i, (_, slots) in self._kept().items() if i not in without)
        return self._present() + sum(reserved)

    def reserved(self) -> set[InstanceId]:
        """Return the instances that have a reservation."""
        return set(self._kept())

    def _kept(self) -> dict[InstanceId, tuple[float, int]]:
        """Return the reservations that have not ended, and forget the others."""
        now = self._clock.now()
        self._reserved = {i: kept for i, kept in self._reserved.items() if now < kept[0]}
        return self._reserved

    def hold(self, seconds: float) -> None:
        """Accept only instances with a reservation, for this long: others have waited longer.

        0: accept all again.
        """
        self._held_until = self._clock.now() + seconds

    def reserve(self, ids: Collection[InstanceId], seconds: float, places: int = 1) -> bool:
        """Reserve slots for instances for this long; return False if there are too few.

        Idempotent: an id has one reservation, whose end the last call sets.

        Args:
            ids: The instances.
            seconds: From now on; 0 drops their reservations.
            places: `InstanceSpec.places` of each.
        """
        slots = self.slots_of(places)
        if self.taken(without=ids) + slots * len(ids) > self.capacity:
            return False
        self._reserved |= dict.fromkeys(ids, (self._clock.now() + seconds, slots))
        return True

    def admit(self, places: Mapping[InstanceId, int]) -> None:
        """Accept instances, which use up their reservations.

        Args:
            places: `InstanceSpec.places` of each instance.

        Raises:
            FabricUnavailable: The node is being drained.
            CapacityExceeded: There are too few slots, or they are held for others.
        """
        wanted = sum(map(self.slots_of, places.values()))
        if wanted:
            self._check(places.keys(), wanted)
        self.forget(places)

    def _check(self, ids: Collection[InstanceId], wanted: int) -> None:
        taken = self.taken(without=ids)
        is_reserved = self._reserved.keys() >= set(ids)
        if self.is_draining() and not is_reserved:
            raise FabricUnavailable(
                f"host {self._host_id} takes no new instances: its node is being drained",
                hint="create them on another node",
            )
        if taken + wanted > self._slots:
            raise CapacityExceeded(
                f"host {self._host_id} has {taken} of {self._slots} slots in use; "
                f"{len(ids)} more instances, which need {wanted}, do not fit",
                hint="release instances or add nodes",
            )
        is_held = self._clock.now() < self._held_until
        if is_held and not is_reserved:
            raise CapacityExceeded(
                f"the slots of host {self._host_id} are held for creates that have waited longer",
                hint="try again, or join the queue by queue_timeout",
            )

    def forget(self, ids: Iterable[InstanceId]) -> None:
        """Drop the reservations of these ids."""
        for instance_id in ids:
            self._reserved.pop(instance_id, None)
