"""The host: an actor that launches and owns instances on its node (design D2, D7).

One class serves both densities: a dedicated host holds one instance and carries its id, a shared
one holds many. `Host` is an ordinary class around engines, records and lives;
`aenv_ray.actors.host.host_actor` is the Ray actor around it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from aenv_ray.actors.host.calls import HostCalls
from aenv_ray.actors.host.engines import EngineFactory, HostEngines
from aenv_ray.actors.host.host_capacity import HOST_CAPACITY, HostCapacity
from aenv_ray.actors.host.instance import EndReason
from aenv_ray.actors.host.instance_table import REMEMBERED_ENDS, Residents
from aenv_ray.actors.host.projects import HostProjects
from aenv_ray.actors.host.start_messages import Outcomes, ProjectMissing
from aenv_ray.actors.host.starts import HostStarts
from aenv_ray.actors.host.warm_pools import WarmPools
from aenv_ray.actors.host.warm_requests import WarmRequest, WarmRequestFile
from aenv_ray.clock import Clock, SystemClock
from aenv_ray.engines.base import Sandbox
from aenv_ray.errors import (
    AenvError,
    FabricUnavailable,
    InstanceNotFound,
    InstanceReleased,
)
from aenv_ray.hub.store import InstanceStore
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import (
    ActorDensity,
    InstanceInfo,
    InstanceRecord,
    InstanceSpec,
)
from aenv_ray.project.storage import StorageMount

logger = logging.getLogger(__name__)

SWEEP_S: Final = 0.5
ADOPT_DEADLINE_S: Final = 60.0
"""How long a restarted host tries to reach what it left before it gives that up."""
LINGER_S: Final = 30.0
"""A dedicated host stays this long after its instance, so that late calls get a typed error."""


class Host:
    """Launches and owns instances, and keeps sandboxes ready for more.

    Args:
        host_id: Stays the same over restarts.
        node_id: Where it runs.
        density: Whether it holds one instance or many.
        slots: How many a shared one holds where nodes come and go with demand; it then leaves when
            nothing is on its node. None: it holds `HOST_CAPACITY` and stays.
        make_engine: Returns the engine of a name; `ConfigError` for an unknown one.
        store: Records of its instances.
        projects_dir: Where projects are unpacked.
        clock: For deadlines.
        count_processes: Counts this node's sandboxes, by what runs them.
        on_empty: Told when it has nothing left to do, and is to be ended.
        is_node_up: Says whether what owns this node's sandboxes, the raylet, is there.
        requests_path: Where what it is asked to keep ready outlives it; None: nowhere.

    Attributes:
        calls: What callers do with its instances.
    """

    def __init__(
        self,
        host_id: HostId,
        *,
        node_id: str,
        density: ActorDensity,
        slots: int | None = None,
        make_engine: EngineFactory,
        store: InstanceStore,
        projects_dir: Path,
        clock: Clock | None = None,
        count_processes: Callable[[], int] = lambda: 0,
        on_empty: Callable[[], None] | None = None,
        is_node_up: Callable[[], bool] = lambda: True,
        requests_path: Path | None = None,
    ) -> None:
        self._id = host_id
        self._node_id = node_id
        self._density = density
        self._clock = clock or SystemClock()
        capacity = 1 if density is ActorDensity.DEDICATED else slots or HOST_CAPACITY
        self._places = HostCapacity(host_id, capacity, self._present, self._clock)
        self._stays = density is ActorDensity.SHARED and slots is None
        self._is_leaving = False
        self._idle_since = self._clock.now()
        self._engines = HostEngines(make_engine)
        self._store = store
        self._residents = Residents(self._engines, store, self._clock)
        self._lives = self._residents.lives
        self._sandboxes = self._residents.sandboxes
        self._projects = HostProjects(projects_dir, node_id)
        around = (self._engines, self._projects, self._clock)
        self._starts = HostStarts(host_id, node_id, density, *around, self._residents.will_use)
        requests = WarmRequestFile(requests_path)
        self._pools = WarmPools(
            *around, self._starts, store, requests, self._room, lambda: bool(self._starting)
        )
        self._count_processes = count_processes
        self._on_empty = on_empty
        self._is_node_up = is_node_up
        self._starting: dict[InstanceId, asyncio.Future[InstanceInfo | AenvError]] = {}
        self._doomed: set[InstanceId] = set()
        self._released: dict[InstanceId, None] = {}
        self._adopted = asyncio.Event()
        self.calls = HostCalls(host_id, self._residents, self._engines, self._adopted, self._clock)
        self._sweeper: asyncio.Task[None] | None = None

    # --- life of the host -------------------------------------------------------------------

    async def open(self) -> None:
        """Take over what an earlier host of this id left, then sweep for ever.

        An earlier host may have died between making a sandbox and recording it: what nobody
        recorded is ended, on the engines that it used, and its `start` runs again.
        """
        deadline = asyncio.get_running_loop().time() + ADOPT_DEADLINE_S
        records = self._store.list(self._id)
        self._pools.open()
        for record in records:
            await (self._pools if record.is_pooled else self._residents).adopt(record, deadline)
        used = self._store.engines_used().get(self._id, frozenset())
        await self._residents.end_unrecorded(records, used)
        self._residents.note_if_empty()
        self._adopted.set()
        self._sweeper = asyncio.create_task(self._sweep_for_ever())

    async def ready(self) -> str:
        """Return the host's id once it answers for its earlier instances."""
        await self._adopted.wait()
        return self._id

    async def close(self) -> None:
        """Disconnect; instances run on for a host of the same id."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._pools.close()
        await self._engines.close()

    def pools(self) -> dict[str, int]:
        """Return how many sandboxes are ready, see `WarmPools.ready`."""
        return self._pools.ready()

    def load(self) -> tuple[int, int]:
        """Return how many places are taken or reserved here, and how many there are.

        Raises:
            FabricUnavailable: The node is going down, or the host is leaving.
        """
        if not self._is_node_up():  # Ray lets an actor live on for a second without its node
            raise FabricUnavailable(f"node {self._node_id[:8]} is going down: its raylet is gone")
        if self._is_leaving:
            raise FabricUnavailable(f"host {self._id} is leaving: it had nothing to do")
        return self._places.taken(), self._places.capacity

    def _present(self) -> int:
        return len(self._sandboxes) + len(self._starting)

    def _room(self) -> int:
        """Return how many sandboxes may be kept ready."""
        is_staying = self._is_node_up() and not self._is_leaving
        return self._places.capacity - self._places.taken() if is_staying else 0

    def hold(self, seconds: float) -> tuple[int, int]:
        """Give no place to those who have none reserved, for so long; return `load`."""
        self._places.hold(seconds)
        return self.load()

    def reserve(self, ids: Sequence[InstanceId], seconds: float) -> bool:
        """See `HostCapacity.keep`; instances that are here already need no place."""
        self.load()
        return self._places.keep([i for i in ids if i not in self._lives], seconds)

    # --- projects ---------------------------------------------------------------------------

    def has_project(self, digest: str) -> bool:
        """Whether the project's files are on this node."""
        return self._projects.has(digest)

    async def put_project(self, digest: str, archive: bytes) -> None:
        """Unpack a project on this node; a second time does nothing."""
        await self._projects.put(digest, archive)

    async def delete_storage(self, engine: str, storage: StorageMount) -> None:
        """See `Engine.delete_storage`."""
        await self._engines.get(engine).delete_storage(storage)

    # --- instances --------------------------------------------------------------------------

    async def start(self, specs: Sequence[InstanceSpec]) -> Outcomes | ProjectMissing:
        """Start instances and wait until each answers calls or has failed.

        Idempotent by instance id: for an instance that runs, has ended or was released this is the
        answer, and one that another `start` is starting is waited for.

        Returns:
            What became of each spec, in order; or `ProjectMissing`: nothing was started.

        Raises:
            CapacityExceeded: They do not fit; nothing was started.
            FabricUnavailable: The node cannot make sandboxes.
        """
        await self._adopted.wait()
        known = {i: outcome for i in (s.instance_id for s in specs)
                 if (outcome := self._known_outcome(i)) is not None}  # fmt: skip
        under_way = {i: self._starting[i] for i in (s.instance_id for s in specs)
                     if i in self._starting}  # fmt: skip
        wanted = [s for s in specs if s.instance_id not in known | under_way]
        self.load()
        if any(not self._projects.has(digest) for digest in {s.digest for s in wanted}):
            return ProjectMissing(self._node_id)
        self._places.admit([spec.instance_id for spec in wanted])
        known |= await self._start_new(wanted)
        for instance_id, first in under_way.items():
            known[instance_id] = await asyncio.shield(first)
        return [known[spec.instance_id] for spec in specs]

    def _known_outcome(self, instance_id: InstanceId) -> InstanceInfo | AenvError | None:
        """Return what became of an earlier start of that id; None when there was none."""
        life = self._lives.get(instance_id)
        if life is not None and instance_id not in self._starting:
            return life.end_error() if life.ended else life.info()
        if instance_id in self._released:
            return InstanceReleased(f"{instance_id} was released", instance_id=instance_id)
        return None

    async def _start_new(
        self, specs: Sequence[InstanceSpec]
    ) -> dict[InstanceId, InstanceInfo | AenvError]:
        loop = asyncio.get_running_loop()
        outcomes = {spec.instance_id: loop.create_future() for spec in specs}
        self._starting |= outcomes
        error: AenvError = FabricUnavailable("the start was cancelled")
        started: dict[InstanceId, InstanceInfo | AenvError] = {}
        try:
            started = await self._make(specs)
            started |= await self._end_doomed(list(started))
        except AenvError as exc:
            error = exc
            raise
        finally:
            self._doomed -= outcomes.keys()
            for instance_id, outcome in outcomes.items():
                del self._starting[instance_id]
                outcome.set_result(started.get(instance_id, error))
        return started

    async def _end_doomed(self, ids: Sequence[InstanceId]) -> dict[InstanceId, AenvError]:
        """End what was released while it started, and say so instead of its info."""
        doomed = [instance_id for instance_id in ids if instance_id in self._doomed]
        self._doomed -= set(doomed)
        await self._residents.end(doomed, EndReason.RELEASED, "it was released")
        return {i: self._lives[i].end_error() for i in doomed if i in self._lives}

    async def _make(
        self, specs: Sequence[InstanceSpec]
    ) -> dict[InstanceId, InstanceInfo | AenvError]:
        """Take instances from the pools, and start those that are not there."""
        results: dict[InstanceId, InstanceInfo | AenvError] = {}
        records: list[InstanceRecord] = []

        def take_in(record: InstanceRecord, sandbox: Sandbox) -> None:
            results[record.requested_id or record.id] = self._residents.add(record, sandbox)
            records.append(record)

        left = specs
        try:
            if self._density is ActorDensity.SHARED:
                left = await self._pools.take(specs, take_in)
                others = len(self._sandboxes) + len(self._starting) - len(results)
                await self._pools.give_way(others + self._pools.size - self._places.capacity)
            results |= await self._starts.start(left, take_in)
        finally:
            self._store.put([record for record in records if record.id in self._sandboxes])
        return results

    # --- deadlines and ends -----------------------------------------------------------------

    async def renew(self, instance_id: InstanceId, ttl_s: float) -> InstanceInfo:
        """Move the deadline to `ttl_s` from now, never earlier than it is.

        Raises:
            AenvError: The instance has ended.
        """
        life, _ = await self.calls.enter(instance_id)
        record = life.renewed(ttl_s, self._clock.now())
        await self._engines.get(record.spec.engine).set_deadline(record.id, record.deadline)
        life.record = record
        self._store.put([record])
        return life.info()

    async def release(self, instance_ids: Sequence[InstanceId]) -> list[InstanceId]:
        """End instances; unknown and ended ones do nothing.

        What is still starting ends when it is up, and an id that is unknown cannot be started here
        any more: its start may be on its way.

        Returns:
            The ids that this host knew; those that ran are gone.
        """
        await self._adopted.wait()
        known = [i for i in instance_ids if i in self._lives or i in self._starting]
        self._doomed |= self._starting.keys() & set(instance_ids)
        self._places.forget(instance_ids)
        self._released |= dict.fromkeys(i for i in instance_ids if i not in known)
        while len(self._released) > REMEMBERED_ENDS:
            del self._released[next(iter(self._released))]
        await self._residents.end(instance_ids, EndReason.RELEASED, "it was released")
        return known

    async def release_jobs(self, jobs: Sequence[str]) -> list[InstanceId]:
        """End the instances that belong to Ray jobs that ended; return their ids."""
        await self._adopted.wait()
        ended = set(jobs)
        mine = [i for i in self._sandboxes if self._lives[i].record.spec.job_id in ended]
        ids = [InstanceId(i) for i in mine]
        self._pools.forget_jobs(ended)
        await self._residents.end(ids, EndReason.OWNER, "the Ray job that owned it ended")
        return ids

    async def warm(self, request: WarmRequest, wait_s: float | None) -> int:
        """See `WarmPools.ask`."""
        return await self._pools.ask(request, wait_s)

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.sweep()
            except Exception as exc:  # noqa: BLE001  # the loop that keeps deadlines goes on
                logger.warning("sweep of host %s: %r", self._id, exc)

    async def sweep(self) -> None:
        """End what is due, and tell when the host has nothing left to do."""
        await self._residents.end_due()
        if self._density is ActorDensity.SHARED:
            await self._pools.tick()
        if not self._stays and self._on_empty is not None and self._is_done():
            self._is_leaving = True
            self._store.forget_host(self._id)  # it ends for good, and has ended all it made
            self._on_empty()

    def _is_done(self) -> bool:
        """Whether it has had nothing to do for a while.

        A shared one waits for the dedicated ones of its node, whose places it keeps from Ray.
        """
        now = self._clock.now()
        since = self._residents.empty_since
        if self._density is ActorDensity.DEDICATED:
            return since is not None and now - since > LINGER_S
        if self._places.taken() or self._pools.size or self._store.list():
            self._idle_since = now
        return now - max(self._idle_since, since or 0.0) > LINGER_S

    # --- looking ----------------------------------------------------------------------------

    async def info(self, instance_id: InstanceId) -> InstanceInfo:
        """Return what is known of an instance; renews nothing.

        Raises:
            InstanceNotFound: It was never here, or ended too long ago.
        """
        await self._adopted.wait()
        life = self._lives.get(instance_id)
        if life is None:
            raise InstanceNotFound(
                f"host {self._id} has no instance {instance_id}", instance_id=instance_id
            )
        return life.info()

    async def count_processes(self) -> int:
        """Return how many processes, containers and pods of sandboxes this node really runs.

        Raises:
            FabricUnavailable: Its Docker daemon, or the API, which has run some, does not say.
        """
        return await asyncio.to_thread(self._count_processes)

    async def instances(self) -> list[InstanceInfo]:
        """Return the live instances."""
        await self._adopted.wait()
        return [self._lives[i].info() for i in self._sandboxes]
