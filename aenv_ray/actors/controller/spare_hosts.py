"""Spare hosts: dedicated hosts that run before their instance is created.

Starting a Ray actor takes half a second, so a node keeps one ready for each environment of which a
dedicated instance was recently created there. The name of an actor cannot change. Therefore a spare
is named after an id that its future instance will have. The id that the creator asked for is kept
as the instance's `requested_id`, as for instances from a warm pool.

`SpareHostPlan` decides; `SpareHosts` starts, claims and ends the actors. A spare host reserves
nothing in Ray, and ends by itself if nobody claims it for `SPARE_S`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

from aenv_ray.actors.controller.host_directory import HostDirectory
from aenv_ray.actors.host.remote_host import RemoteHost
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.background_tasks import start_shared
from aenv_ray.errors import AenvError
from aenv_ray.ids import InstanceId, new_instance_id

logger = logging.getLogger(__name__)

SPARE_S: Final = 60.0
"""How long a node keeps a spare for an environment after the last dedicated create there. This is
short, because an autoscaler removes no node with a spare."""
CLAIM_S: Final = 5.0
"""If a spare does not answer a claim within this time, it is ended and a new host is started."""


PAUSE_S: Final = 0.3
"""Between a create and the start of the next spare, which takes a whole core for half a second: the
first call of the new instance comes first."""


class SpareHostKind(NamedTuple):
    """What a spare host is for."""

    node_id: str
    environment: str
    """Name of the environment, with which the ids of its instances begin."""


@dataclass
class _Demand:
    until: float
    engine: str


class SpareHostPlan:
    """Decides which spare hosts there should be. It has no clock: callers pass the time.

    Args:
        per_node: Maximum number of spares of a node, for the environments created there last.
    """

    def __init__(self, per_node: int) -> None:
        self._per_node = per_node
        self._demands: dict[SpareHostKind, _Demand] = {}
        """In the order of the last create."""
        self._ready: dict[str, SpareHostKind] = {}

    @property
    def names(self) -> set[str]:
        """Names of the spares that are ready."""
        return set(self._ready)

    def created(self, kind: SpareHostKind, engine: str, now: float) -> None:
        """Note that an instance with a dedicated host was created."""
        self._demands.pop(kind, None)
        self._demands[kind] = _Demand(now + SPARE_S, engine)
        on_node = [one for one in self._demands if one.node_id == kind.node_id]
        for oldest in on_node[: len(on_node) - self._per_node]:
            del self._demands[oldest]

    def engine(self, kind: SpareHostKind) -> str | None:
        """Return the engine of the last create of this kind; None if no spare is wanted."""
        demand = self._demands.get(kind)
        return None if demand is None else demand.engine

    def missing(self, now: float) -> SpareHostKind | None:
        """Return the kind of the spare to start next, or None."""
        present = set(self._ready.values())
        for kind, demand in self._demands.items():
            if now < demand.until and kind not in present:
                return kind
        return None

    def failed(self, kind: SpareHostKind) -> None:
        """Note that a spare did not start; none is started again until the next such create."""
        self._demands.pop(kind, None)

    def ready(self, name: str, kind: SpareHostKind) -> None:
        """Note that a spare runs."""
        self._ready[name] = kind

    def take(self, kind: SpareHostKind) -> str | None:
        """Take a spare of this kind and return its name; None if there is none."""
        name = next((name for name, one in self._ready.items() if one == kind), None)
        if name is not None:
            del self._ready[name]
        return name

    def gone(self, names: Collection[str]) -> None:
        """Forget spares that have ended."""
        self._ready = {name: kind for name, kind in self._ready.items() if name not in names}

    def drain(self, nodes: Collection[str]) -> None:
        """Keep no spares on these nodes; `take_surplus` returns the existing ones."""
        self._demands = {k: one for k, one in self._demands.items() if k.node_id not in nodes}

    def take_surplus(self, now: float) -> list[str]:
        """Remove the spares that are no longer wanted, and return their names, to end them."""
        self._demands = {k: demand for k, demand in self._demands.items() if now < demand.until}
        surplus = [name for name, kind in self._ready.items() if kind not in self._demands]
        for name in surplus:
            del self._ready[name]
        return surplus


class SpareHosts:
    """The spare hosts of all nodes.

    Args:
        hosts: Starts host actors.
        is_busy: Returns whether creates are under way, which spares must not slow down.
        per_node: As for `SpareHostPlan`.
    """

    def __init__(self, hosts: HostDirectory, is_busy: Callable[[], bool], per_node: int) -> None:
        self._hosts = hosts
        self._is_busy = is_busy
        self._plan = SpareHostPlan(per_node)
        self._actors: dict[str, RemoteHost] = {}
        self._starting: set[str] = set()
        self._claiming: set[str] = set()
        self._refilling: asyncio.Task[None] | None = None

    @property
    def ready(self) -> set[str]:
        """Names of the spares that are ready."""
        return self._plan.names

    @property
    def names(self) -> set[str]:
        """Names of the spares that are ready, starting or being claimed."""
        return self._plan.names | self._starting | self._claiming

    def created(self, kind: SpareHostKind, engine: str) -> None:
        """Note that an instance with a dedicated host was created: another may follow."""
        self._plan.created(kind, engine, _now())
        self._refill_soon()

    async def claim(self, kind: SpareHostKind, instance_id: InstanceId) -> str | None:
        """Turn a spare into the host of an instance.

        Returns:
            Its name, under which `HostDirectory` knows it from now on; None if there is none.
        """
        while (name := self._plan.take(kind)) is not None:
            actor = self._actors.pop(name)
            self._claiming.add(name)
            # From now on, other creates of a group count this host when they choose their nodes.
            self._hosts.add(name, kind.node_id, actor)
            try:
                with ray_api.translated(f"claiming spare host {name}"):
                    async with asyncio.timeout(CLAIM_S):
                        await actor.claim.remote(instance_id)
            except (AenvError, TimeoutError) as exc:
                logger.warning("spare host %s is not used: %r", name, exc)
                self._hosts.forget(name)
                ray_api.kill(actor)
            else:
                return name
            finally:
                self._claiming.discard(name)
        return None

    def tick(self, gone: Collection[str], draining: Collection[str]) -> None:
        """Forget spares that are gone, end superfluous ones and start missing ones.

        Args:
            gone: Names of spares.
            draining: Ids of nodes that get no more spares.
        """
        self._plan.gone(gone)
        self._plan.drain(draining)
        for name in self._plan.take_surplus(_now()):
            ray_api.kill(self._actors[name])  # nobody can have claimed it
        self._actors = {name: self._actors[name] for name in self._plan.names}
        self._refill_soon()

    def _refill_soon(self) -> None:
        if self._refilling is None or self._refilling.done():
            self._refilling = start_shared(self._refill())

    async def _refill(self) -> None:
        """Start missing spares one after another, unless creates are under way."""
        await asyncio.sleep(PAUSE_S)
        while not self._is_busy() and (kind := self._plan.missing(_now())) is not None:
            name = new_instance_id(kind.environment)
            self._starting = {name}
            try:
                actor = await self._hosts.start_spare_host(name, kind.node_id, SPARE_S)
                if (engine := self._plan.engine(kind)) is not None:
                    await actor.prepare.remote(engine)
            except Exception as exc:  # noqa: BLE001  # creates start hosts without it
                logger.warning("no spare host on node %s: %r", kind.node_id[:8], exc)
                self._plan.failed(kind)
                continue
            finally:
                self._starting = set()
            self._actors[name] = actor
            self._plan.ready(name, kind)


def _now() -> float:
    return asyncio.get_running_loop().time()
