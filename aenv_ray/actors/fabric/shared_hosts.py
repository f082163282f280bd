"""The shared hosts as a creating process knows them, and the placement of groups on them.

Each process places its instances itself and sends them to the hosts. It asks the controller for the
hosts only now and then, so that the controller does not limit how fast instances are created.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

from aenv_ray.actors.controller.placement import (
    HostLoad,
    check_capacity,
    near_node,
    on_nodes,
    spread,
)
from aenv_ray.actors.fabric.waits import Waits
from aenv_ray.actors.host.host_capacity import HOST_CAPACITY
from aenv_ray.actors.host.remote_host import RemoteHost
from aenv_ray.errors import CapacityExceeded
from aenv_ray.models import InstanceSpec

LOOK_AGAIN_S: Final = 5.0
"""The controller is asked again after this long, for example to find the hosts of new nodes."""
FIRST_PATIENCE_S: Final = 10.0
"""How long the first create waits for slow nodes, so that its group is spread over all nodes."""
LATER_PATIENCE_S: Final = 1.0
"""How long later creates wait; short, so that a host that starts or hangs does not delay them."""
_ANSWER_S: Final = 300.0


class Share(NamedTuple):
    """The part of a group that one host gets."""

    name: str
    """Of the host."""
    host: RemoteHost
    """The host actor."""
    specs: list[InstanceSpec]


class SharedHosts:
    """The shared hosts with their load, as the controller last reported them."""

    def __init__(self, controller: Any, waits: Waits) -> None:
        self._controller = controller
        self._waits = waits
        self._lock = waits.lock()
        self._hosts: list[tuple[HostLoad, Any]] = []
        self._placed: dict[str, int] = {}
        self._looked_at = 0.0

    async def check_size(self, count: int) -> None:
        """Refuse a group that would not fit even if all hosts were empty.

        Raises:
            CapacityExceeded: It would not fit.
            FabricUnavailable: No node has a host.
        """
        if count <= HOST_CAPACITY:
            return  # any single host holds it
        async with self._lock:
            await self._look(FIRST_PATIENCE_S, count)
            check_capacity(count, sum(load.capacity for load, _ in self._hosts))

    async def place(
        self, specs: Sequence[InstanceSpec], *, avoid: Collection[str] | None = None
    ) -> list[Share]:
        """Divide a group among the hosts.

        Args:
            specs: The group.
            avoid: Names of hosts that have just failed: the load of all hosts is asked for again,
                and these are used only if there are no others. None: no host failed.

        Raises:
            CapacityExceeded: The group does not fit.
            FabricUnavailable: No node has a host.
        """
        async with self._lock:
            is_first = avoid is not None or not self._hosts
            if is_first or time.monotonic() - self._looked_at > LOOK_AGAIN_S:
                await self._look(FIRST_PATIENCE_S if is_first else LATER_PATIENCE_S, len(specs))
                return self._divide(specs, avoid or ())
            try:
                return self._divide(specs, avoid or ())
            except CapacityExceeded:  # releases since the last look are not known here
                await self._look(FIRST_PATIENCE_S, len(specs))
                return self._divide(specs, avoid or ())

    async def place_some(
        self, specs: Sequence[InstanceSpec], *, avoid: Collection[str] | None = None
    ) -> list[Share]:
        """Divide as many instances among the hosts as fit; the arguments are those of `place`.

        Returns:
            The shares, for the first of `specs`.

        Raises:
            FabricUnavailable: No node has a host.
        """
        async with self._lock:
            is_first = avoid is not None or not self._hosts
            if is_first or time.monotonic() - self._looked_at > LOOK_AGAIN_S:
                await self._look(FIRST_PATIENCE_S if is_first else LATER_PATIENCE_S, len(specs))
            elif len(specs) > self._free():  # releases since the last look are not known here
                await self._look(LATER_PATIENCE_S, len(specs))
            return self._divide(specs[: self._free(specs[0].node_ids)], avoid or ())

    def _free(self, node_ids: Sequence[str] = ()) -> int:
        loads = on_nodes([load for load, _ in self._hosts], node_ids)
        return sum(max(0, load.capacity - self._placed[load.name]) for load in loads)

    async def look(self, wanted: int = 0) -> list[tuple[HostLoad, Any]]:
        """Return all shared hosts with their present load.

        Nodes without hosts get some if the others have fewer than `wanted` free slots.

        Raises:
            FabricUnavailable: No node has a host.
        """
        async with self._lock:
            await self._look(FIRST_PATIENCE_S, wanted)
            return list(self._hosts)

    def forget(self) -> None:
        """Ask the controller again before the next placement, because the known load was wrong."""
        self._looked_at = float("-inf")

    def _divide(self, specs: Sequence[InstanceSpec], avoid: Collection[str]) -> list[Share]:
        loads = [
            HostLoad(h.name, h.node_id, min(self._placed[h.name], h.capacity), h.capacity)
            for h, _ in self._hosts
        ]
        loads = on_nodes(loads, specs[0].node_ids if specs else ())
        loads = [load for load in loads if load.name not in avoid] or loads
        if specs and specs[0].near_node:
            loads = near_node(loads, specs[0].near_node, len(specs))
        counts = spread(len(specs), loads)
        shares, start = [], 0
        for load, host in self._hosts:
            count = counts.get(load.name, 0)
            if count:
                shares.append(Share(load.name, host, list(specs[start : start + count])))
                self._placed[load.name] += count
                start += count
        return shares

    async def _look(self, patience_s: float, wanted: int) -> None:
        reference = self._controller.shared_hosts.remote(patience_s, wanted)
        self._hosts = await self._waits.result(reference, "the shared hosts", _ANSWER_S)
        self._placed = {load.name: load.instances for load, _ in self._hosts}
        self._looked_at = time.monotonic()
