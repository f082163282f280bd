"""The slots of a host, some of them reserved for creates that waited: pure decisions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from aenv_ray.clock import Clock
from aenv_ray.errors import CapacityExceeded, FabricUnavailable
from aenv_ray.ids import HostId, InstanceId

HOST_CAPACITY: Final = 4096
"""Capacity of a shared host; measured with 4,000 live instances on 24 GB."""


class HostCapacity:
    """Decides which instances a host accepts.

    Args:
        present: Returns the number of instances, including those that are starting.
    """

    def __init__(
        self, host_id: HostId, capacity: int, present: Callable[[], int], clock: Clock
    ) -> None:
        self._slots = capacity
        self._host_id = host_id
        self._present = present
        self._clock = clock
        self._reserved_until: dict[InstanceId, float] = {}
        self._held_until = float("-inf")
        self._drained_until = float("-inf")

    @property
    def capacity(self) -> int:
        """Number of slots; while the node drains, only those that are in use."""
        return min(self._slots, self.taken()) if self._is_draining() else self._slots

    def drain(self, seconds: float) -> None:
        """Accept only instances that have a reservation already, for this long."""
        self._drained_until = self._clock.now() + seconds

    def _is_draining(self) -> bool:
        return self._clock.now() < self._drained_until

    def taken(self, without: Collection[InstanceId] = ()) -> int:
        """Return the number of used or reserved slots, without reservations for these ids."""
        now = self._clock.now()
        self._reserved_until = {
            i: until for i, until in self._reserved_until.items() if now < until
        }
        return self._present() + sum(i not in without for i in self._reserved_until)

    def hold(self, seconds: float) -> None:
        """Accept only instances with a reservation, for this long: others have waited longer."""
        self._held_until = self._clock.now() + seconds

    def reserve(self, ids: Sequence[InstanceId], seconds: float) -> bool:
        """Reserve a slot for each id for this long; return False if there are too few.

        Idempotent: an id has one reservation, whose end the last call sets.
        """
        if self.taken(without=ids) + len(ids) > self.capacity:
            return False
        self._reserved_until |= dict.fromkeys(ids, self._clock.now() + seconds)
        return True

    def admit(self, ids: Sequence[InstanceId]) -> None:
        """Accept instances, which use up their reservations.

        Raises:
            FabricUnavailable: The node is being drained.
            CapacityExceeded: There are too few slots, or they are held for others.
        """
        taken = self.taken(without=ids)
        is_reserved = self._reserved_until.keys() >= set(ids)
        if self._is_draining() and not is_reserved:
            raise FabricUnavailable(
                f"host {self._host_id} takes no new instances: its node is being drained",
                hint="create them on another node",
            )
        if taken + len(ids) > self._slots:
            raise CapacityExceeded(
                f"host {self._host_id} has {taken} of {self._slots} slots in use; "
                f"{len(ids)} more instances do not fit",
                hint="release instances or add nodes",
            )
        is_held = self._clock.now() < self._held_until
        if is_held and not is_reserved:
            raise CapacityExceeded(
                f"the slots of host {self._host_id} are held for creates that have waited longer",
                hint="try again, or join the queue by queue_timeout",
            )
        self.forget(ids)

    def forget(self, ids: Iterable[InstanceId]) -> None:
        """Drop the reservations of these ids."""
        for instance_id in ids:
            self._reserved_until.pop(instance_id, None)
