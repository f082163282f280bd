"""The host: it launches and owns the instances on its node.

One class serves both densities: a dedicated host has one instance and is named after it, a shared
host has many. `Host` is an ordinary class; `aenv_ray.actors.host.host_actor` is the Ray actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import aenv_ray
from aenv_ray import logs
from aenv_ray.actors.calls.introduction import Introduction
from aenv_ray.actors.host.calls import HostCalls
from aenv_ray.actors.host.engines import EngineFactory, HostEngines
from aenv_ray.actors.host.environment_relay import ConnectInner, EnvironmentRelay
from aenv_ray.actors.host.host_capacity import HOST_CAPACITY, HostCapacity
from aenv_ray.actors.host.host_counters import HostCounters, HostMeasures, outcome_of
from aenv_ray.actors.host.instance import EndReason, InstanceLife
from aenv_ray.actors.host.instance_table import REMEMBERED_ENDS, InstanceTable, absent
from aenv_ray.actors.host.introductions import Introductions
from aenv_ray.actors.host.model_relay import ModelRelay
from aenv_ray.actors.host.node_engines import engine_refusal
from aenv_ray.actors.host.pool import WarmRequest
from aenv_ray.actors.host.projects import HostProjects
from aenv_ray.actors.host.start_messages import ProjectMissing
from aenv_ray.actors.host.warm_pools import OnStarted, WarmPools, WarmRequestFile
from aenv_ray.background_tasks import Tasks
from aenv_ray.clock import Clock, SystemClock
from aenv_ray.engines.base import EndCause, HostService, Sandbox, SandboxSpec
from aenv_ray.engines.door import CHAT_METHOD
from aenv_ray.errors import (
    AenvError,
    CapacityExceeded,
    ConfigError,
    FabricUnavailable,
    InsideCause,
    InstanceReleased,
    InternalError,
    PolicyRefused,
    is_infrastructure,
)
from aenv_ray.hub.store import InstanceStore
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import ActorDensity, InstanceInfo, InstanceRecord, InstanceSpec
from aenv_ray.policy import Policy
from aenv_ray.project.config import EnvironmentConfig
from aenv_ray.project.storage import StorageMount
from aenv_ray.runtime.door.host.link import ENVIRONMENT_METHOD
from aenv_ray.runtime.door.roles import DoorRole

logger = logging.getLogger(__name__)

SWEEP_S: Final = 0.5
ADOPT_DEADLINE_S: Final = 60.0
"""How long a restarted host tries to reach the sandboxes of its predecessor."""
LINGER_S: Final = 30.0
"""A dedicated host outlives its instance by this much, so that late calls get a typed error."""
ENGINES_S: Final = 2.0
"""How long it is remembered which engines the node can run: its Docker daemon may come and go."""
_SERVICES: Final = {
    CHAT_METHOD: "the chat model that its code asked",
    ENVIRONMENT_METHOD: "the environment that its code called",
}
"""What failed, by method, for messages."""


class _Start(NamedTuple):
    """An instance that is starting."""

    outcome: asyncio.Future[InstanceInfo | AenvError]
    places: int


class Host:
    """Launches and owns instances, and keeps sandboxes ready for more.

    Args:
        host_id: Stays the same over restarts.
        slots: Capacity of a shared host on an elastic node; the host ends once its node is empty.
            None: its capacity is `HOST_CAPACITY`, and it stays.
        spare_s: A dedicated host that no instance claims ends after this long. None: it was made
            for the instance with its id.
        make_engine: Returns the engine with a given name; raises ConfigError for an unknown one.
        find_engines: Returns the engines that this node can run, the preferred one first.
        policy: Returns what instances may request.
        on_empty: Called when the host has nothing left to do and should be ended.
        is_node_up: Returns whether the raylet of this node is alive.
        requests_path: File that keeps the requests for warm sandboxes. None: the requests end with
            this process.
        introductions_path: Unix socket for callers on this node. None: there is none.
        inner_instances: Connects to the fabric, for calls from an instance's code to other
            environments. None: such calls are not possible.

    Attributes:
        calls: Calls, streams and logs of its instances.
    """

    def __init__(  # noqa: PLR0913  # what it uses of Ray, the node and the settings
        self,
        host_id: HostId,
        *,
        node_id: str,
        density: ActorDensity,
        slots: int | None = None,
        spare_s: float | None = None,
        make_engine: EngineFactory,
        find_engines: Callable[[], Sequence[str]] = lambda: ("process",),
        policy: Callable[[], Policy] = Policy,
        store: InstanceStore,
        projects_dir: Path,
        clock: Clock | None = None,
        count_processes: Callable[[], int] = lambda: 0,
        on_empty: Callable[[], None] | None = None,
        is_node_up: Callable[[], bool] = lambda: True,
        requests_path: Path | None = None,
        introductions_path: Path | None = None,
        model_relay: ModelRelay | None = None,
        inner_instances: ConnectInner | None = None,
    ) -> None:
        self._id = host_id
        self._node_id = node_id
        self._density = density
        self._clock = clock or SystemClock()
        capacity = 1 if density is ActorDensity.DEDICATED else slots or HOST_CAPACITY
        self._capacity = HostCapacity(host_id, capacity, self._used_slots, self._clock)
        self._stays = density is ActorDensity.SHARED and slots is None
        self._spare_s = spare_s
        self._claimed_for = InstanceId(host_id) if spare_s is None else None
        self._is_leaving = False
        self._idle_since = self._clock.now()
        self._engines = HostEngines(make_engine)
        self._find_engines = find_engines
        self._found_engines: tuple[str, ...] = ()
        self._engines_found_at = float("-inf")
        self._policy = policy
        self._pooled_under: Policy | None = None
        """The policy under which the latest sandboxes were created."""
        self._store = store
        self._table = InstanceTable(
            self._engines, store, self._clock, self._add_services, self._note_end
        )
        self._counters = HostCounters()
        self._lives = self._table.lives
        self._sandboxes = self._table.sandboxes
        self._projects = HostProjects(projects_dir, node_id)
        self._pools = WarmPools(
            self._engines,
            self._projects,
            self._clock,
            start=self._start_sandboxes,
            store=store,
            requests=WarmRequestFile(requests_path),
            room=self._room,
            is_busy=lambda: bool(self._starting),
        )
        self._count_processes = count_processes
        self._on_empty = on_empty
        self._is_node_up = is_node_up
        self._starting: dict[InstanceId, _Start] = {}
        self._doomed: set[InstanceId] = set()
        self._released: dict[InstanceId, None] = {}
        self._adopted = asyncio.Event()
        self.calls = HostCalls(host_id, self._table, self._engines, self._adopted, self._clock)
        self._model_relay = model_relay
        self._environment_relay = (
            None
            if inner_instances is None
            else EnvironmentRelay(inner_instances, store, self._clock)
        )
        self._endings = Tasks()
        """Tasks that end instances for which a service of this host failed."""
        self._introductions = (
            None
            if introductions_path is None
            else Introductions(introductions_path, self.calls, self._clock)
        )
        self._sweeper: asyncio.Task[None] | None = None

    # --- life of the host -------------------------------------------------------------------

    async def open(self) -> None:
        """Adopt the instances of an earlier host with this id, then sweep until `close`.

        The earlier host may have died between making a sandbox and recording it. Unrecorded
        sandboxes on the engines that it used are ended; Ray repeats the `start` that made them.
        If opening fails, the host is closed.
        """
        try:
            await self._adopt()
        except BaseException:
            await self.close()
            raise
        self._adopted.set()
        self._sweeper = asyncio.create_task(self._sweep_for_ever())

    async def _adopt(self) -> None:
        deadline = asyncio.get_running_loop().time() + ADOPT_DEADLINE_S
        records = self._store.list(self._id)
        self._pools.open()
        for record in records:
            if record.has_ended:
                self._end_inner(record)
                continue
            await (self._pools if record.is_pooled else self._table).adopt(record, deadline)
            self._claimed_for = record.requested_id or record.id
        used = self._store.engines_used().get(self._id, frozenset())
        live = [record for record in records if not record.has_ended]
        await self._table.end_unrecorded(live, used)
        self._table.note_if_empty()

    async def ready(self) -> str:
        """Return this node's aenv-ray version, once an earlier host's instances are adopted."""
        await self._adopted.wait()
        return aenv_ray.__version__

    def claim(self, instance_id: InstanceId) -> None:
        """Keep this spare host for an instance; idempotent.

        Raises:
            FabricUnavailable: It is kept for another instance, or is about to end.
        """
        self.load()
        if self._claimed_for not in {None, instance_id}:
            raise FabricUnavailable(f"host {self._id} is claimed for {self._claimed_for}")
        self._claimed_for = instance_id
        self._table.note_if_empty()  # it lingers for its instance, as it does for late calls

    def prepare(self, engine: str) -> None:
        """Load an engine, so that the first start need not.

        Raises:
            ConfigError: There is no engine with this name.
        """
        self._engines.get(engine)

    def retire(self) -> InstanceId | None:
        """End this host if it is a spare that is not claimed.

        Returns:
            The id of the instance that it is claimed for; None if it ends.
        """
        self._is_leaving = self._is_leaving or self._claimed_for is None
        return self._claimed_for

    async def close(self) -> None:
        """Disconnect; the instances run on for the next host with this id."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._introductions is not None:
            await self._introductions.close()
        if self._model_relay is not None:
            await self._model_relay.close()
        await self._pools.close()
        await self._engines.close()

    def pools(self) -> dict[str, int]:
        """See `WarmPools.ready`."""
        return self._pools.ready()

    def engines(self) -> tuple[str, ...]:
        """Return the engines that this node can run, the preferred one first."""
        now = self._clock.now()
        if not 0.0 <= now - self._engines_found_at < ENGINES_S:
            self._found_engines, self._engines_found_at = tuple(self._find_engines()), now
        return self._found_engines

    def _with_engine(self, spec: InstanceSpec) -> InstanceSpec:
        """Return a spec with one engine: of those possible, the first that this node can run.

        Raises:
            FabricUnavailable: This node can run none of them.
        """
        if not spec.engines:
            return spec
        here = self.engines()
        able = [name for name in here if name in spec.engines]
        allowed = [name for name in able if self._policy().allows_engine(name)]
        if not able:
            refusal = engine_refusal(spec.engines, [here])
            assert refusal is not None
            raise refusal
        return spec.model_copy(update={"engine": (allowed or able)[0], "engines": ()})

    def load(self) -> tuple[int, int]:
        """Return the number of used or reserved slots, and the capacity.

        Raises:
            FabricUnavailable: The node is going down, or the host is about to end.
        """
        if not self._is_node_up():  # an actor outlives its raylet by a second
            raise FabricUnavailable(f"node {self._node_id[:8]} is going down: its raylet is gone")
        if self._is_leaving:
            raise FabricUnavailable(f"host {self._id} is ending: it has no instances")
        return self._capacity.taken(), self._capacity.capacity

    def measures(self) -> HostMeasures:
        """Return what the controller exports as metrics.

        Raises:
            FabricUnavailable: As `load`.
        """
        return HostMeasures(*self.load(), self._counters, self._engines.pods())

    def _used_slots(self) -> int:
        """Return the number of slots in use, by instances that are starting or ending too."""
        return self._live_slots() + self._engines.ending()

    def _live_slots(self) -> int:
        slots_of = self._capacity.slots_of
        starting = sum(slots_of(start.places) for start in self._starting.values())
        more = sum(slots_of(places) - 1 for places in self._table.uneven.values())
        return len(self._sandboxes) + more + starting

    def _room(self) -> int:
        """Return how many sandboxes may be warm."""
        is_staying = self._is_node_up() and not self._is_leaving
        return self._capacity.capacity - self._capacity.taken() if is_staying else 0

    def hold(self, seconds: float) -> None:
        """Accept only instances with a reservation, for this long; 0: accept all again."""
        self._capacity.hold(seconds)

    async def drain(self, seconds: float) -> None:
        """Take no new instances for this long, and end the warm sandboxes; 0: take some again."""
        self._capacity.drain(seconds)
        if seconds:
            await self._pools.give_way(self._pools.size)

    def reserve(self, ids: Sequence[InstanceId], seconds: float, places: int = 1) -> bool:
        """See `HostCapacity.reserve`; instances that are here already need no slot."""
        self.load()
        absent = [i for i in ids if i not in self._lives]
        return self._capacity.reserve(absent, seconds, places)

    # --- projects ---------------------------------------------------------------------------

    def has_project(self, digest: str) -> bool:
        """Whether the files of a project are on this node."""
        return self._projects.has(digest)

    async def put_project(self, digest: str, archive: bytes) -> None:
        """Unpack a project on this node; idempotent."""
        await self._projects.put(digest, archive)

    async def delete_storage(self, engine: str, storage: StorageMount) -> None:
        """See `Engine.delete_storage`."""
        await self._engines.get(engine).delete_storage(storage)

    # --- instances --------------------------------------------------------------------------

    async def start(
        self, specs: Sequence[InstanceSpec]
    ) -> list[InstanceInfo | AenvError] | ProjectMissing:
        """Start instances and wait until each answers calls or has failed.

        Idempotent by instance id: an instance that runs, has ended or was released is not started,
        and the outcome says so; one that another `start` is starting is waited for.

        Returns:
            The outcome of each spec, in order; or `ProjectMissing` if this node lacks the files of
            a project: then nothing was started.

        Raises:
            CapacityExceeded: They do not fit; nothing was started.
            FabricUnavailable: The node is being drained, or cannot make sandboxes.
        """
        await self._adopted.wait()
        known = {i: outcome for i in (s.instance_id for s in specs)
                 if (outcome := self._known_outcome(i)) is not None}  # fmt: skip
        under_way = {i: self._starting[i].outcome for i in (s.instance_id for s in specs)
                     if i in self._starting}  # fmt: skip
        wanted = [self._with_engine(s) for s in specs if s.instance_id not in known | under_way]
        self.load()
        if any(not self._projects.has(digest) for digest in {s.digest for s in wanted}):
            return ProjectMissing(self._node_id)
        self._capacity.admit({spec.instance_id: spec.places for spec in wanted})
        if self._claimed_for is None and wanted:  # it was restarted after it was claimed
            self._claimed_for = wanted[0].instance_id
        known |= await self._start_new(wanted)
        for instance_id, first in under_way.items():
            known[instance_id] = await asyncio.shield(first)
        return [known[spec.instance_id] for spec in specs]

    def _known_outcome(self, instance_id: InstanceId) -> InstanceInfo | AenvError | None:
        """Return the outcome of an earlier start with this id, or None."""
        life = self._lives.get(instance_id)
        if life is not None and instance_id not in self._starting:
            return life.end_error() if life.ended else life.info()
        if instance_id in self._released:
            return InstanceReleased(
                f"{instance_id} was released",
                instance_id=instance_id,
                hint="create another instance",
            )
        return None

    async def _start_new(
        self, specs: Sequence[InstanceSpec]
    ) -> dict[InstanceId, InstanceInfo | AenvError]:
        loop = asyncio.get_running_loop()
        starts = {spec.instance_id: _Start(loop.create_future(), spec.places) for spec in specs}
        self._starting |= starts
        error: AenvError = FabricUnavailable("the start was cancelled")
        started: dict[InstanceId, InstanceInfo | AenvError] = {}
        try:
            started = await self._make(specs)
            started |= await self._end_doomed(list(started))
        except AenvError as exc:
            error = exc
            raise
        finally:
            # If it failed or was cancelled, some may run nevertheless.
            doomed = self._doomed & starts.keys()
            self._table.end_soon(doomed, EndReason.RELEASED, EndCause("it was released"))
            self._doomed -= doomed
            for instance_id, start in starts.items():
                del self._starting[instance_id]
                start.outcome.set_result(started.get(instance_id, error))
            if self._density is ActorDensity.SHARED:  # the controller counts dedicated creates
                self._counters.created((s, started.get(s.instance_id, error)) for s in specs)
            for spec in specs:
                answer = started.get(spec.instance_id, error)
                self._log(
                    spec, "create of %s: %s", spec.instance_id, outcome_of(spec, answer).outcome
                )
        return started

    def _log(self, spec: InstanceSpec, message: str, *values: object) -> None:
        """Log what happened to an instance."""
        logs.events.info(message, *values, extra=logs.of_instance(spec.instance_id, spec.owner))

    async def _end_doomed(self, ids: Sequence[InstanceId]) -> dict[InstanceId, AenvError]:
        """End instances that were released while they started, and return their errors."""
        doomed = [instance_id for instance_id in ids if instance_id in self._doomed]
        self._doomed -= set(doomed)
        await self._table.end(doomed, EndReason.RELEASED, EndCause("it was released"))
        return {i: self._lives[i].end_error() for i in doomed if i in self._lives}

    async def _make(
        self, specs: Sequence[InstanceSpec]
    ) -> dict[InstanceId, InstanceInfo | AenvError]:
        """Take instances from warm pools, and start the others."""
        results: dict[InstanceId, InstanceInfo | AenvError] = {}
        records: list[InstanceRecord] = []

        def take_in(record: InstanceRecord, sandbox: Sandbox) -> None:
            results[record.requested_id or record.id] = self._table.add(record, sandbox)
            records.append(record)

        policy = self._policy()
        if policy != (self._pooled_under or policy):
            await self._pools.give_way(self._pools.size)  # made under another policy
        self._pooled_under = policy
        left = []
        for spec in specs:
            try:
                policy.check_ttl(spec.ttl_s, spec.reference)
                policy.check(
                    self._projects.sandbox_spec(spec, self._clock.now()).config, spec.engine
                )
            except PolicyRefused as exc:
                results[spec.instance_id] = exc
            else:
                left.append(spec)
        try:
            if self._density is ActorDensity.SHARED:
                left = await self._pools.take(left, take_in, most_standing=policy.max_warm)
                taken = [spec.places for spec in specs if spec.instance_id in results]
                others = self._live_slots() - sum(map(self._capacity.slots_of, taken))
                await self._pools.give_way(others + self._pools.size - self._capacity.capacity)
            results |= await self._start_sandboxes(left, take_in)
        finally:
            # As they are now: an instance may have called another environment already.
            self._store.put([self._lives[r.id].record for r in records if r.id in self._sandboxes])
        return results

    async def _start_sandboxes(
        self, specs: Sequence[InstanceSpec], on_started: OnStarted, *, is_pooled: bool = False
    ) -> dict[InstanceId, AenvError]:
        """Start sandboxes; return the errors of those that do not run.

        `on_started` is called for each that answers calls; its record is not in the store yet.

        Raises:
            FabricUnavailable: The node cannot make sandboxes.
        """
        by_engine: dict[str, list[tuple[InstanceSpec, SandboxSpec]]] = {}
        failures: dict[InstanceId, AenvError] = {}
        now = self._clock.now()
        for spec in specs:
            try:
                sandbox_spec = self._sandbox_spec(self._named(spec), now)
            except AenvError as exc:
                failures[spec.instance_id] = exc
            else:
                by_engine.setdefault(spec.engine, []).append((spec, sandbox_spec))
        for name, pairs in by_engine.items():
            await self._table.will_use(self._id, name)
            outcomes = await self._engines.get(name).start_many([s for _, s in pairs])
            for (spec, sandbox_spec), outcome in zip(pairs, outcomes, strict=True):
                if isinstance(outcome, AenvError):
                    failures[spec.instance_id] = outcome
                    continue
                own = self._named(spec)
                record = InstanceRecord(
                    spec=own, requested_id=None if own is spec else spec.instance_id,
                    host_id=self._id, node_id=self._node_id, density=self._density,
                    created_at=now, deadline=sandbox_spec.deadline, isolation=outcome.isolation,
                    start_mode=outcome.start_mode, is_pooled=is_pooled,
                )  # fmt: skip
                on_started(record, outcome)
        return failures

    def _add_services(self, life: InstanceLife, sandbox: Sandbox) -> None:
        """Let a sandbox request what its project declares and may have."""
        record = life.record
        try:
            config = self._projects.config(record.spec.digest)
        except AenvError as exc:  # its project is gone: the rest of the adopted instance works
            logger.warning(
                "code of %s cannot ask this host, as its project is missing: %s", record.id, exc,
                extra=logs.of_instance(record.id, record.spec.owner),
            )  # fmt: skip
            return
        services: dict[str, HostService] = {}
        if model := self._model_of(config):
            services[CHAT_METHOD] = functools.partial(model.answer, record.id)
        environments = self._environment_relay
        if environments and config.deploy.environments:
            services[ENVIRONMENT_METHOD] = functools.partial(
                environments.answer, life, config.deploy
            )
        sandbox.services = {
            method: functools.partial(self._serve, life, method, service)
            for method, service in services.items()
        }

    def _model_of(self, config: EnvironmentConfig) -> ModelRelay | None:
        """Return the chat model that instances of a project may ask; None if they may ask none."""
        if config.deploy.chat_model and self._policy().allows_chat_model(config.name):
            return self._model_relay
        return None

    def _note_end(self, life: InstanceLife) -> None:
        self._counters.ended(life)
        why = str(life.end_cause).partition("\n")[0]  # without the end of the sandbox's log
        self._log(life.record.spec, "%s ended: %s", life.record.id, why)
        if self._model_relay is not None:
            self._model_relay.forget(life.record.id)
        self._end_inner(life.record)

    def _end_inner(self, record: InstanceRecord) -> None:
        if self._environment_relay is not None:
            self._environment_relay.end(record)

    async def _serve(
        self, life: InstanceLife, method: str, service: HostService, params: dict[str, Any]
    ) -> bytes:
        """Answer a request of a sandbox; if the infrastructure fails, the instance is lost.

        The host decides this: a sandbox that reports such a failure is not believed. So the sandbox
        is ended first: its answers to calls would count as the agent's failures. Whether a lack of
        room is such a failure, only the caller can say: see `InsideCause.ROOM`.
        """
        instance_id, owner = life.record.id, life.record.spec.owner
        try:
            return await service(params)
        except AenvError as exc:
            await self._end_if_infrastructure(instance_id, method, exc)
            raise
        except Exception as exc:  # a bug of ours: without an answer the sandbox would wait
            extra = logs.of_instance(instance_id, owner)
            logger.exception("%s for %s failed", method, instance_id, extra=extra)
            error = InternalError(f"{type(exc).__name__}; the log of host {self._id} has more")
            await self._end_if_infrastructure(instance_id, method, error)
            raise error from exc

    async def _end_if_infrastructure(
        self, instance_id: InstanceId, method: str, error: AenvError
    ) -> None:
        if is_infrastructure(error):
            inside = InsideCause.ROOM if isinstance(error, CapacityExceeded) else None
            cause = EndCause(f"{_SERVICES[method]} failed: {error.message}", inside)
            # In another task, because the end of the sandbox cancels this request.
            ending = self._table.end([instance_id], EndReason.LOST, cause)
            await asyncio.shield(self._endings.spawn(ending))

    def _named(self, spec: InstanceSpec) -> InstanceSpec:
        """Return the spec with the instance's actual id: on a dedicated host, the host's own id."""
        if self._density is ActorDensity.SHARED or spec.instance_id == InstanceId(self._id):
            return spec
        return spec.model_copy(update={"instance_id": InstanceId(self._id)})

    def _sandbox_spec(self, spec: InstanceSpec, now: float) -> SandboxSpec:
        """Return the sandbox of an instance.

        Raises:
            PolicyRefused: The policy does not allow it.
            ConfigError: Its engine cannot make it, or the key of its chat model is missing.
        """
        sandbox_spec = self._projects.sandbox_spec(spec, now)
        config = self._policy().applied(sandbox_spec.config, spec.engine)
        if config is not sandbox_spec.config:
            sandbox_spec = replace(sandbox_spec, config=config)
        if model := self._model_of(config):
            model.check_key()
        engine = self._engines.get(spec.engine)
        if spec.storage is not None and not engine.capabilities.storage:
            raise ConfigError(
                f"the {spec.engine} engine has no storage that outlives a sandbox",
                hint="engines with storage: process, docker, kubernetes",
            )
        return sandbox_spec

    # --- deadlines and ends -----------------------------------------------------------------

    async def renew(self, instance_id: InstanceId, ttl_s: float) -> InstanceInfo:
        """Move the deadline to `ttl_s` from now, unless it is later already.

        Raises:
            PolicyRefused: The policy does not allow a TTL of this length.
            AenvError: The instance has ended.
        """
        self._policy().check_ttl(ttl_s, instance_id)
        life, _ = await self.calls.enter(instance_id)
        async with life.renewing:
            record = life.renewed(ttl_s, self._clock.now())
            await self._engines.get(record.spec.engine).set_deadline(record.id, record.deadline)
            if life.ended is not None:  # its record is deleted already
                raise life.end_error()
            life.record = life.record.model_copy(update={"deadline": record.deadline})
            self._store.put([life.record])
        if self._environment_relay is not None:
            self._environment_relay.renew(life, ttl_s)
        return life.info()

    async def release(self, instance_ids: Sequence[InstanceId]) -> list[InstanceId]:
        """End instances; idempotent.

        An instance that is still starting ends once it is up. An unknown id cannot be started here
        from now on, because its start may be on its way.

        Returns:
            The ids that this host knew; their sandboxes are gone, or `Engine.ending` counts them.
        """
        await self._adopted.wait()
        known = [i for i in instance_ids if i in self._lives or i in self._starting]
        self._doomed |= self._starting.keys() & set(instance_ids)
        self._capacity.forget(instance_ids)
        self._released |= dict.fromkeys(i for i in instance_ids if i not in known)
        while len(self._released) > REMEMBERED_ENDS:
            del self._released[next(iter(self._released))]
        await self._table.end(instance_ids, EndReason.RELEASED, EndCause("it was released"))
        return known

    async def release_jobs(self, jobs: Sequence[str]) -> list[InstanceId]:
        """End the instances of Ray jobs that ended; return their ids."""
        await self._adopted.wait()
        ended = set(jobs)
        mine = [i for i in self._sandboxes if self._lives[i].record.spec.job_id in ended]
        ids = [InstanceId(i) for i in mine]
        self._pools.forget_jobs(ended)
        cause = EndCause("the Ray job that owned it ended")
        await self._table.end(ids, EndReason.OWNER, cause)
        return ids

    async def warm(self, request: WarmRequest, wait_s: float | None) -> int:
        """See `WarmPools.ask`."""
        spec = self._with_engine(request.spec)
        return await self._pools.ask(request.model_copy(update={"spec": spec}), wait_s)

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.sweep()
            except Exception as exc:  # noqa: BLE001  # the next sweep may succeed
                logger.warning("a sweep of host %s failed: %r", self._id, exc)

    async def sweep(self) -> None:
        """End the instances that are due, and report when the host has nothing left to do."""
        await self._table.end_due()
        if self._density is ActorDensity.SHARED:
            await self._pools.tick()
        if not self._stays and self._on_empty is not None and self._is_done():
            self._is_leaving = True
            self._store.forget_host(self._id)  # it ends for good and leaves nothing
            if self._introductions is not None:
                await self._introductions.close()
            self._on_empty()

    def _is_done(self) -> bool:
        """Whether the host has been empty for a while.

        A shared host waits for the dedicated hosts of its node, because it reserves their slots.
        """
        if self._environment_relay is not None and self._environment_relay.is_busy:
            return False  # it ends the inner instances of those that have ended
        now = self._clock.now()
        since = self._table.empty_since
        if self._density is ActorDensity.DEDICATED:
            if self._starting or since is None:
                return False
            unused_s = LINGER_S if self._claimed_for or self._spare_s is None else self._spare_s
            return self._is_leaving or now - since > unused_s
        is_used = self._capacity.taken() or self._sandboxes or self._starting
        if is_used or self._pools.size or self._store.list():
            self._idle_since = now
        return now - max(self._idle_since, since or 0.0) > LINGER_S

    # --- callers on this node ---------------------------------------------------------------

    async def introduce(self, instance_id: InstanceId, role: DoorRole) -> Introduction | None:
        """See `Introductions.introduce`; None if this host introduces nobody."""
        if self._introductions is None:
            return None
        return await self._introductions.introduce(instance_id, role)

    def cancel_direct(self, names: Sequence[str]) -> None:
        """See `Introductions.cancel`."""
        if self._introductions is not None:
            self._introductions.cancel(names)

    async def introduce_started(self, outcome: InstanceInfo | AenvError) -> Introduction | None:
        """Introduce its owner to an instance that has just started, if it has."""
        if isinstance(outcome, InstanceInfo):
            with contextlib.suppress(AenvError):  # it has ended: the first call says why
                return await self.introduce(outcome.id, DoorRole.OWNER)
        return None

    # --- queries ----------------------------------------------------------------------------

    async def info(self, instance_id: InstanceId) -> InstanceInfo:
        """Return the info of an instance, also a while after its end; does not count as activity.

        Raises:
            InstanceNotFound: It was never here, or ended too long ago.
        """
        await self._adopted.wait()
        life = self._lives.get(instance_id)
        if life is None:
            raise absent(self._id, instance_id)
        return life.info()

    async def count_processes(self) -> int:
        """Return how many processes, containers and pods of sandboxes run on this node.

        Raises:
            FabricUnavailable: The Docker daemon or the Kubernetes API that ran some does not
                answer.
        """
        return await asyncio.to_thread(self._count_processes)

    async def count_instances(self) -> int:
        """Return how many instances run or start here; while the node drains, also how many may.

        Those have a reservation, with which they are still accepted.
        """
        await self._adopted.wait()
        expected = self._capacity.reserved() if self._capacity.is_draining() else set()
        return len(self._sandboxes.keys() | self._starting.keys() | expected)

    async def instances(self) -> list[InstanceInfo]:
        """Return the live instances."""
        await self._adopted.wait()
        return [self._lives[i].info() for i in self._sandboxes]
