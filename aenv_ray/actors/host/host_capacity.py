"""The places of a host, some of them kept for creates that waited for them, as decisions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from aenv_ray.clock import Clock
from aenv_ray.errors import CapacityExceeded
from aenv_ray.ids import HostId, InstanceId

HOST_CAPACITY: Final = 4096
"""Instances that one shared host holds; measured at 4,000 live ones on 24 GB."""


class HostCapacity:
    """How many instances a host takes, and which.

    Args:
        host_id: For messages.
        capacity: How many it holds.
        present: Says how many are there, with those that are starting.
        clock: For how long places are kept.
    """

    def __init__(
        self, host_id: HostId, capacity: int, present: Callable[[], int], clock: Clock
    ) -> None:
        self.capacity = capacity
        self._host_id = host_id
        self._present = present
        self._clock = clock
        self._kept_until: dict[InstanceId, float] = {}
        self._held_until = float("-inf")

    def taken(self, without: Collection[InstanceId] = ()) -> int:
        """Return how many places are taken or kept, but for those kept for some ids."""
        now = self._clock.now()
        self._kept_until = {i: until for i, until in self._kept_until.items() if now < until}
        return self._present() + sum(i not in without for i in self._kept_until)

    def hold(self, seconds: float) -> None:
        """Give no place to those for whom none is kept, for so long: others wait for it longer."""
        self._held_until = self._clock.now() + seconds

    def keep(self, ids: Sequence[InstanceId], seconds: float) -> bool:
        """Keep a place for each id, for so long; False when there are not so many.

        Idempotent: one is kept for an id, and the time is that of the last call.
        """
        if self.taken(without=ids) + len(ids) > self.capacity:
            return False
        self._kept_until |= dict.fromkeys(ids, self._clock.now() + seconds)
        return True

    def admit(self, ids: Sequence[InstanceId]) -> None:
        """Let instances take places, those that are kept for them first.

        Raises:
            CapacityExceeded: There are not so many, or others wait for them longer.
        """
        taken = self.taken(without=ids)
        if taken + len(ids) > self.capacity:
            raise CapacityExceeded(
                f"host {self._host_id} holds {taken} of {self.capacity} instances; "
                f"{len(ids)} more do not fit",
                hint="release instances or add nodes",
            )
        is_held = self._clock.now() < self._held_until
        if is_held and not self._kept_until.keys() >= set(ids):
            raise CapacityExceeded(
                f"others wait longer for the places of host {self._host_id}",
                hint="try again, or wait with them: queue_timeout",
            )
        self.forget(ids)

    def forget(self, ids: Iterable[InstanceId]) -> None:
        """Keep no place for those ids any more."""
        for instance_id in ids:
            self._kept_until.pop(instance_id, None)
