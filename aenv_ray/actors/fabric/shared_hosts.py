"""The shared hosts as a creating process knows them, and the placement of groups on them.

Each process chooses hosts for its instances itself and sends the specs to them directly. It asks
the controller for the list of hosts only once in `LOOK_AGAIN_S`, so that the controller does not
limit how fast instances are created.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from aenv_ray.actors.controller.placement import (
    ONE_SLOT,
    HostLoad,
    Need,
    check_capacity,
    near_node,
    on_nodes,
    spread,
)
from aenv_ray.actors.controller.remote_controller import RemoteController
from aenv_ray.actors.fabric.waits import Waits
from aenv_ray.actors.host.host_capacity import HOST_CAPACITY, slots_of
from aenv_ray.actors.host.remote_host import RemoteHost
from aenv_ray.errors import CapacityExceeded
from aenv_ray.models import InstanceSpec

LOOK_AGAIN_S: Final = 5.0
"""The controller is asked again after this long, for example to find the hosts of new nodes."""
FIRST_PATIENCE_S: Final = 10.0
"""How long the first create waits for slow nodes, so that its group is spread over all nodes."""
FRESH_S: Final = 0.5
"""What has no room joins the queue without another look if the last one is not longer ago, because
the queue knows first what has become free."""
LATER_PATIENCE_S: Final = 1.0
"""How long later creates wait; short, so that a host that starts or hangs does not delay them."""
_ANSWER_S: Final = 300.0


class Share(NamedTuple):
    """The part of a group that one host gets."""

    name: str
    """The name of the host."""
    host: RemoteHost
    """The host actor."""
    specs: list[InstanceSpec]


def need_of(specs: Sequence[InstanceSpec]) -> Need:
    """Return what each instance of one group needs; inner ones, which take no slot, one slot."""
    if not specs:
        return ONE_SLOT
    first = specs[0]
    return Need(first.possible_engines, max(1, first.places), first.node_ids)


class SharedHosts:
    """The shared hosts with their load, as the controller last reported them."""

    def __init__(self, controller: RemoteController, waits: Waits) -> None:
        self._controller = controller
        self._waits = waits
        self._lock = waits.lock()
        self._hosts: list[tuple[HostLoad, RemoteHost]] = []
        self._placed: dict[str, int] = {}
        self._looked_at = 0.0

    async def check_size(self, count: int, places: int = 1) -> None:
        """Refuse a group that would not fit even if all hosts were empty.

        `places` is `InstanceSpec.places` of each instance.

        Raises:
            CapacityExceeded: It would not fit.
            FabricUnavailable: No node has a host.
        """
        if count * places <= HOST_CAPACITY:
            return  # any single host holds it
        async with self._lock:
            await self._look(FIRST_PATIENCE_S, count, Need(places=places))
            check_capacity(count, sum(load.holds(places) for load, _ in self._hosts))

    async def place(
        self, specs: Sequence[InstanceSpec], *, avoid: Collection[str] | None = None
    ) -> list[Share]:
        """Divide a group among the hosts.

        Args:
            specs: The group.
            avoid: Names of hosts that have just failed. They are used only if there are no others,
                and the load of all hosts is asked for again. None: no host has failed.

        Raises:
            CapacityExceeded: The group does not fit.
            FabricUnavailable: No node has a host, or none can run the group's engine.
        """
        async with self._lock:
            if not await self._look_if_due(specs, avoid):
                try:
                    return self._divide(specs, avoid or ())
                except CapacityExceeded:  # releases since the last look are not known here
                    await self._look(FIRST_PATIENCE_S, len(specs), need_of(specs))
            return self._divide(specs, avoid or ())

    async def place_some(
        self,
        specs: Sequence[InstanceSpec],
        *,
        avoid: Collection[str] | None = None,
        may_queue: bool,
    ) -> list[Share]:
        """Divide as many instances among the hosts as fit.

        Args:
            specs: As `place`.
            avoid: As `place`.
            may_queue: Whether the others can wait for room.

        Returns:
            The shares, for the first of `specs`.

        Raises:
            FabricUnavailable: As `place`.
        """
        async with self._lock:
            has_looked = await self._look_if_due(specs, avoid)
            is_fresh = may_queue and time.monotonic() - self._looked_at < FRESH_S
            if not (has_looked or is_fresh) and len(specs) > self._room(specs):
                # Releases since the last look are not known here.
                await self._look(LATER_PATIENCE_S, len(specs), need_of(specs))
            return self._divide(specs[: self._room(specs)], avoid or ())

    async def _look_if_due(
        self, specs: Sequence[InstanceSpec], avoid: Collection[str] | None
    ) -> bool:
        """Ask the controller again if that is due before a placement; return whether it was."""
        is_first = avoid is not None or not self._hosts
        if not is_first and time.monotonic() - self._looked_at <= LOOK_AGAIN_S:
            return False
        patience_s = FIRST_PATIENCE_S if is_first else LATER_PATIENCE_S
        await self._look(patience_s, len(specs), need_of(specs))
        return True

    def _room(self, specs: Sequence[InstanceSpec]) -> int:
        """Return how many instances like the first of these fit, on any node that they may use."""
        return sum(load.room(specs[0].places) for load in self._able(need_of(specs)))

    def _able(self, need: Need) -> list[HostLoad]:
        """Return the hosts that suit a need, with their load as known here.

        Raises:
            FabricUnavailable: It names nodes, and no host is on them.
        """
        loads = [
            replace(h, instances=min(self._placed[h.name], h.capacity))
            for h, _ in self._hosts
            if h.runs(need.engines)
        ]
        return on_nodes(loads, need.node_ids)

    async def look(
        self, wanted: int = 0, engines: Sequence[str] = ()
    ) -> list[tuple[HostLoad, RemoteHost]]:
        """Return the shared hosts that can run one of `engines`, with their present load.

        Slots that are kept for waiting creates count as free.

        Nodes without hosts get some if the others have fewer than `wanted` free slots.

        Raises:
            FabricUnavailable: No node has a host, or none can run these engines.
        """
        async with self._lock:
            await self._look(FIRST_PATIENCE_S, wanted, Need(tuple(engines)))
            hosts = [(replace(load, is_held=False), host) for load, host in self._hosts]
            return [(load, host) for load, host in hosts if load.runs(engines)]

    def forget(self) -> None:
        """Ask the controller again before the next placement, because the known load was wrong."""
        self._looked_at = float("-inf")

    def _divide(self, specs: Sequence[InstanceSpec], avoid: Collection[str]) -> list[Share]:
        places = specs[0].places if specs else 1
        loads = self._able(need_of(specs))
        loads = [load for load in loads if load.name not in avoid] or loads
        if specs and specs[0].near_node:
            loads = near_node(loads, specs[0].near_node, len(specs), places)
        counts = spread(len(specs), loads, places)
        shares, start = [], 0
        for load, host in self._hosts:
            count = counts.get(load.name, 0)
            if count:
                shares.append(Share(load.name, host, list(specs[start : start + count])))
                self._placed[load.name] += count * slots_of(places, load.capacity)
                start += count
        return shares

    async def _look(self, patience_s: float, wanted: int, need: Need) -> None:
        reference = self._controller.shared_hosts.remote(patience_s, wanted, need)
        self._hosts = await self._waits.result(reference, "the shared hosts", _ANSWER_S)
        self._placed = {load.name: load.instances for load, _ in self._hosts}
        self._looked_at = time.monotonic()
