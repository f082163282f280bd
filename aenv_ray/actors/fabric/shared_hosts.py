"""The shared hosts as a creating process sees them: which there are, how full, what they were sent.

A process places its instances itself and sends them to the hosts: the controller is asked for the
hosts now and then, and is no bottleneck of creating.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

from aenv_ray.actors.calls.wire import encode_specs
from aenv_ray.actors.controller.placement import (
    HostLoad,
    check_capacity,
    on_nodes,
    spread,
)
from aenv_ray.actors.host.host_capacity import HOST_CAPACITY
from aenv_ray.errors import AenvError, CapacityExceeded, FabricUnavailable
from aenv_ray.models import InstanceSpec
from aenv_ray.project import project

LOOK_AGAIN_S: Final = 5.0
"""A node that joined is used after this long."""
FIRST_PATIENCE_S: Final = 10.0
"""How long the first create waits for the slower nodes, so that a group is spread over all."""
LATER_PATIENCE_S: Final = 1.0
"""How long later ones do: creating goes on while a host starts or does not answer."""


class Share(NamedTuple):
    """What one host gets of a group."""

    name: str
    host: Any
    specs: list[InstanceSpec]


class SharedHosts:
    """The hosts and how full they are, as last told by the controller; any thread may use it.

    Args:
        controller: The actor.
        wait: Returns what a reference becomes, given the reference and a description.
    """

    def __init__(self, controller: Any, wait: Callable[[Any, str], Any]) -> None:
        self._controller = controller
        self._wait = wait
        self._lock = threading.Lock()
        self._hosts: list[tuple[HostLoad, Any]] = []
        self._placed: dict[str, int] = {}
        self._shipped: set[tuple[str, str]] = set()
        self._looked_at = 0.0

    def check_size(self, count: int) -> None:
        """Refuse a group that all hosts together do not hold, be they empty.

        Raises:
            CapacityExceeded: They do not.
            FabricUnavailable: No node has a host.
        """
        if count <= HOST_CAPACITY:
            return  # any one host holds it: the usual case costs nothing
        with self._lock:
            self._look(FIRST_PATIENCE_S, count)
            check_capacity(count, sum(load.capacity for load, _ in self._hosts))

    def place(
        self, specs: Sequence[InstanceSpec], *, avoid: Collection[str] | None = None
    ) -> list[Share]:
        """Divide a group among the hosts.

        Args:
            specs: The group.
            avoid: Hosts that just failed, used only where there is no other; what is known of the
                others is then asked anew. None: nothing failed.

        Raises:
            CapacityExceeded: They do not all fit.
            FabricUnavailable: No node has a host.
        """
        with self._lock:
            is_first = avoid is not None or not self._hosts
            if is_first or time.monotonic() - self._looked_at > LOOK_AGAIN_S:
                self._look(FIRST_PATIENCE_S if is_first else LATER_PATIENCE_S, len(specs))
                return self._divide(specs, avoid or ())
            try:
                return self._divide(specs, avoid or ())
            except CapacityExceeded:  # what was released since the last look is not known here
                self._look(FIRST_PATIENCE_S, len(specs))
                return self._divide(specs, avoid or ())

    def begin(
        self,
        source: project.Project,
        specs: Sequence[InstanceSpec],
        avoid: Collection[str] | None = None,
    ) -> tuple[list[tuple[Share, Any]], dict[str, AenvError]]:
        """Divide a group and have each host start its share, without waiting for that.

        Args:
            source: What they run.
            specs: The group.
            avoid: As in `place`.

        Returns:
            Shares with references to what becomes of their specs, in order; and why other hosts,
            by name, were not asked.

        Raises:
            CapacityExceeded: They do not all fit; nothing was begun.
            FabricUnavailable: No node has a host.
        """
        return self.begin_on(source, self.place(specs, avoid=avoid))

    def begin_on(
        self, source: project.Project, shares: Sequence[Share]
    ) -> tuple[list[tuple[Share, Any]], dict[str, AenvError]]:
        """Have hosts start their shares, as `begin` does."""
        begun: list[tuple[Share, Any]] = []
        refusals: dict[str, AenvError] = {}
        for share in shares:
            try:
                self.ship(share, source)
                begun.append((share, share.host.start.remote(encode_specs(share.specs))))
            except FabricUnavailable as exc:
                refusals[share.name] = exc
        return begun, refusals

    def look(self, wanted: int = 0) -> list[tuple[HostLoad, Any]]:
        """Return all shared hosts as they are now.

        Args:
            wanted: Places that will be asked for: nodes get hosts as far as needed.

        Raises:
            FabricUnavailable: No node has a host.
        """
        with self._lock:
            self._look(FIRST_PATIENCE_S, wanted)
            return list(self._hosts)

    def _divide(self, specs: Sequence[InstanceSpec], avoid: Collection[str]) -> list[Share]:
        loads = [
            HostLoad(h.name, h.node_id, min(self._placed[h.name], h.capacity), h.capacity)
            for h, _ in self._hosts
        ]
        loads = on_nodes(loads, specs[0].node_ids if specs else ())
        loads = [load for load in loads if load.name not in avoid] or loads
        counts = spread(len(specs), loads)
        shares, start = [], 0
        for load, host in self._hosts:
            count = counts.get(load.name, 0)
            if count:
                shares.append(Share(load.name, host, list(specs[start : start + count])))
                self._placed[load.name] += count
                start += count
        return shares

    def _look(self, patience_s: float, wanted: int) -> None:
        reference = self._controller.shared_hosts.remote(patience_s, wanted)
        self._hosts = self._wait(reference, "the shared hosts")
        self._placed = {load.name: load.instances for load, _ in self._hosts}
        self._looked_at = time.monotonic()

    def ship(self, share: Share, source: project.Project) -> None:
        """Make sure that a host's node has the project's files.

        Raises:
            FabricUnavailable: The host is gone.
        """
        name, host, _ = share
        if (name, source.digest) in self._shipped:
            return
        if not self._wait(host.has_project.remote(source.digest), f"host {name}"):
            reference = host.put_project.remote(source.digest, source.archive())
            self._wait(reference, f"sending the project to {name}")
        self._shipped.add((name, source.digest))
