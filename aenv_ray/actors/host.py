"""The host: an actor that launches and owns instances on its node (design D2, D7).

One class serves both densities: a dedicated host holds one instance and carries its id, a shared
one holds many. `Host` is an ordinary class around engines, records and lives;
`aenv_ray.actors.host_actor` is the Ray actor around it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final

from aenv_ray import project
from aenv_ray.actors.instance import EndReason, InstanceLife
from aenv_ray.actors.placement import HOST_CAPACITY
from aenv_ray.actors.wire import CallMessage, WireResult
from aenv_ray.clock import Clock, SystemClock
from aenv_ray.engines.base import Engine, Sandbox, SandboxSpec
from aenv_ray.errors import (
    AenvError,
    CapacityExceeded,
    InstanceNotFound,
    InternalError,
    SandboxLost,
)
from aenv_ray.hub.store import InstanceStore
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import (
    ActorDensity,
    InstanceInfo,
    InstanceRecord,
    InstanceSpec,
)

logger = logging.getLogger(__name__)

CALL_GRACE_S: Final = 5.0
"""How long after a call's own deadline its sandbox counts as not answering."""
SWEEP_S: Final = 0.5
REMEMBERED_ENDS: Final = 20_000
"""Ended instances whose callers still get the exact reason."""
LINGER_S: Final = 30.0
"""A dedicated host stays this long after its instance, so that late calls get a typed error."""

EngineFactory = Callable[[str], Engine]


class Host:
    """Launches and owns instances.

    Args:
        host_id: Stays the same over restarts.
        node_id: Where it runs.
        density: Whether it holds one instance or many.
        make_engine: Returns the engine of a name; `ConfigError` for an unknown one.
        store: Records of its instances.
        projects_dir: Where projects are unpacked.
        clock: For deadlines.
        count_processes: Counts this node's sandbox processes, by the operating system.
        on_empty: Told when a dedicated host has outlived its instance.
    """

    def __init__(
        self,
        host_id: HostId,
        *,
        node_id: str,
        density: ActorDensity,
        make_engine: EngineFactory,
        store: InstanceStore,
        projects_dir: Path,
        clock: Clock | None = None,
        count_processes: Callable[[], int] = lambda: 0,
        on_empty: Callable[[], None] | None = None,
    ) -> None:
        self._id = host_id
        self._node_id = node_id
        self._density = density
        self._make_engine = make_engine
        self._engines: dict[str, Engine] = {}
        self._store = store
        self._projects_dir = projects_dir
        self._projects: dict[str, project.Project] = {}
        self._clock = clock or SystemClock()
        self._count_processes = count_processes
        self._on_empty = on_empty
        self._lives: dict[str, InstanceLife] = {}
        self._sandboxes: dict[str, Sandbox] = {}
        self._starting: set[str] = set()
        self._doomed: set[str] = set()
        self._empty_since: float | None = None
        self._adopted = asyncio.Event()
        self._sweeper: asyncio.Task[None] | None = None

    # --- life of the host -------------------------------------------------------------------

    async def open(self, *, restarted: bool = False) -> None:
        """Take over the instances that an earlier host of this id left, then sweep for ever.

        Args:
            restarted: There was an earlier host, which may have died between making a sandbox and
                recording it: what nobody recorded is ended, and its `start` runs again.
        """
        records = self._store.list(self._id)
        for record in records:
            await self._adopt(record)
        if restarted:
            recorded = {record.id for record in records}
            for name in {record.spec.engine for record in records} or {"process"}:
                running = await self._engine(name).running()
                orphans = [s.instance_id for s in running if s.instance_id not in recorded]
                await self._engine(name).stop(orphans)
        if not self._sandboxes:
            self._empty_since = self._clock.now()
        self._adopted.set()
        self._sweeper = asyncio.create_task(self._sweep_for_ever())

    async def _adopt(self, record: InstanceRecord) -> None:
        record = record.model_copy(update={"generation": record.generation + 1})
        life = InstanceLife(record, self._clock.now())
        self._lives[record.id] = life
        try:
            sandbox = await self._engine(record.spec.engine).attach(record.id)
        except AenvError as exc:
            self._note_end(record.id, EndReason.LOST, exc.message)
            return
        self._store.put([record])
        self._keep(record.id, sandbox)

    async def ready(self) -> str:
        """Return the host's id once it answers for its earlier instances."""
        await self._adopted.wait()
        return self._id

    async def close(self) -> None:
        """Disconnect; instances run on for a host of the same id."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for engine in self._engines.values():
            await engine.close()

    def load(self) -> tuple[int, int]:
        """Return how many instances live here, and how many fit."""
        capacity = 1 if self._density is ActorDensity.DEDICATED else HOST_CAPACITY
        return len(self._sandboxes) + len(self._starting), capacity

    def _engine(self, name: str) -> Engine:
        if name not in self._engines:
            self._engines[name] = self._make_engine(name)
        return self._engines[name]

    # --- projects ---------------------------------------------------------------------------

    def has_project(self, digest: str) -> bool:
        """Whether the project's files are on this node."""
        return (self._projects_dir / digest).is_dir()

    async def put_project(self, digest: str, archive: bytes) -> None:
        """Unpack a project on this node; a second time does nothing."""
        await asyncio.to_thread(project.unpack, archive, digest, self._projects_dir)

    def _project(self, digest: str) -> project.Project:
        if digest not in self._projects:
            path = self._projects_dir / digest
            if not path.is_dir():
                raise InternalError(
                    f"project {digest[:12]} is not on node {self._node_id[:8]}",
                    hint="its cache was deleted while in use; create again",
                )
            config = project.read_config(path / project.CONFIG_NAME)
            self._projects[digest] = project.Project(path, config, digest)
        return self._projects[digest]

    # --- instances --------------------------------------------------------------------------

    async def start(self, specs: Sequence[InstanceSpec]) -> list[InstanceInfo | AenvError]:
        """Make instances and wait until each answers calls or has failed.

        Idempotent by instance id: what runs already is returned as it is.
        """
        await self._adopted.wait()
        known = {s.instance_id: self._lives[s.instance_id].info() for s in specs
                 if s.instance_id in self._sandboxes}  # fmt: skip
        wanted = [s for s in specs if s.instance_id not in known]
        present, capacity = self.load()
        if present + len(wanted) > capacity:
            raise CapacityExceeded(
                f"host {self._id} holds {present} of {capacity} instances; "
                f"{len(wanted)} more do not fit",
                hint="release instances or add nodes",
            )
        self._starting |= {spec.instance_id for spec in wanted}
        try:
            started = await self._start_on_engines(wanted)
        finally:
            self._starting -= {spec.instance_id for spec in wanted}
        started |= await self._end_doomed(list(started))
        return [known.get(s.instance_id) or started[s.instance_id] for s in specs]

    async def _end_doomed(self, ids: Sequence[InstanceId]) -> dict[InstanceId, AenvError]:
        """End what was released while it started, and say so instead of its info."""
        doomed = [instance_id for instance_id in ids if instance_id in self._doomed]
        self._doomed -= set(doomed)
        await self._end(doomed, EndReason.RELEASED, "it was released")
        return {i: self._lives[i].end_error() for i in doomed if i in self._lives}

    async def _start_on_engines(
        self, specs: Sequence[InstanceSpec]
    ) -> dict[InstanceId, InstanceInfo | AenvError]:
        by_engine: dict[str, list[tuple[InstanceSpec, SandboxSpec]]] = {}
        results: dict[InstanceId, InstanceInfo | AenvError] = {}
        now = self._clock.now()
        for spec in specs:
            try:
                sandbox_spec = self._sandbox_spec(spec, now)
                self._engine(spec.engine)
            except AenvError as exc:
                results[spec.instance_id] = exc
                continue
            by_engine.setdefault(spec.engine, []).append((spec, sandbox_spec))
        records: list[InstanceRecord] = []
        for name, pairs in by_engine.items():
            outcomes = await self._engine(name).start_many([s for _, s in pairs])
            for (spec, sandbox_spec), outcome in zip(pairs, outcomes, strict=True):
                if isinstance(outcome, AenvError):
                    results[spec.instance_id] = outcome
                    continue
                record = InstanceRecord(
                    spec=spec, host_id=self._id, node_id=self._node_id, density=self._density,
                    created_at=now, deadline=sandbox_spec.deadline, isolation=outcome.isolation,
                    start_mode=outcome.start_mode,
                )  # fmt: skip
                life = InstanceLife(record, self._clock.now())
                self._lives[spec.instance_id] = life
                self._keep(spec.instance_id, outcome)
                records.append(record)
                results[spec.instance_id] = life.info()
        self._store.put(records)
        return results

    def _sandbox_spec(self, spec: InstanceSpec, now: float) -> SandboxSpec:
        source = self._project(spec.digest)
        return SandboxSpec(
            instance_id=spec.instance_id,
            project_dir=source.path,
            config=source.config,
            deadline=now + spec.ttl_s,
            environment_variables=spec.environment_variables,
            arguments=spec.arguments,
            labels=spec.labels,
            datasource=spec.datasource,
        )

    def _keep(self, instance_id: InstanceId, sandbox: Sandbox) -> None:
        self._sandboxes[instance_id] = sandbox
        self._empty_since = None
        sandbox.on_end(functools.partial(self._note_end, instance_id, EndReason.LOST))

    def _note_end(self, instance_id: InstanceId, reason: EndReason, cause: str) -> None:
        life = self._lives.get(instance_id)
        if life is None or not life.end(reason, cause, self._clock.now()):
            return
        self._sandboxes.pop(instance_id, None)
        self._store.delete([instance_id])
        if not self._sandboxes:
            self._empty_since = self._clock.now()
        while len(self._lives) - len(self._sandboxes) > REMEMBERED_ENDS:
            oldest = next(i for i in self._lives if i not in self._sandboxes)
            del self._lives[oldest]

    async def call(self, message: CallMessage) -> WireResult:
        """Run one call in an instance and return its result.

        Raises:
            AenvError: See `InstanceLife.call_started` and `Sandbox.request_json`.
        """
        life, sandbox = await self._enter(message.instance_id)
        life.call_started()
        try:
            result = await sandbox.request_json(
                message.method, message.params, deadline_s=message.timeout_s + CALL_GRACE_S
            )
            return WireResult(message.method, result)
        except SandboxLost as error:
            # Released and expired instances lose their sandbox too: say which it was.
            raise (life.end_error() if life.ended else error) from None
        finally:
            life.call_finished(self._clock.now())

    async def stream(self, message: CallMessage) -> AsyncIterator[Any]:
        """Run one call; yield ``(progress, total, message)`` tuples, then its result."""
        life, sandbox = await self._enter(message.instance_id)
        reports: asyncio.Queue[Any] = asyncio.Queue()
        life.call_started()
        task = asyncio.create_task(
            sandbox.request_json(
                message.method,
                message.params,
                deadline_s=message.timeout_s + CALL_GRACE_S,
                on_progress=lambda *report: reports.put_nowait(report),
            )
        )
        task.add_done_callback(lambda _: reports.put_nowait(None))
        try:
            while (report := await reports.get()) is not None:
                yield report
            yield WireResult(message.method, await task)
        except SandboxLost as error:
            raise (life.end_error() if life.ended else error) from None
        finally:
            task.cancel()
            life.call_finished(self._clock.now())

    async def _enter(self, instance_id: InstanceId) -> tuple[InstanceLife, Sandbox]:
        if not self._adopted.is_set():
            await self._adopted.wait()
        life = self._lives.get(instance_id)
        if life is None:
            raise InstanceNotFound(
                f"host {self._id} has no instance {instance_id}",
                instance_id=instance_id,
                hint="it was released long ago, or never created",
            )
        sandbox = self._sandboxes.get(instance_id)
        if sandbox is None:
            raise life.end_error()
        return life, sandbox

    # --- deadlines and ends -----------------------------------------------------------------

    async def renew(self, instance_id: InstanceId, ttl_s: float) -> InstanceInfo:
        """Move the deadline to `ttl_s` from now, never earlier than it is.

        Raises:
            AenvError: The instance has ended.
        """
        life, sandbox = await self._enter(instance_id)
        record = life.renewed(ttl_s, self._clock.now())
        del sandbox
        await self._engine(record.spec.engine).set_deadline(instance_id, record.deadline)
        life.record = record
        self._store.put([record])
        return life.info()

    async def release(self, instance_ids: Sequence[InstanceId]) -> None:
        """End instances; unknown and ended ones do nothing. Returns when they are gone."""
        await self._adopted.wait()
        self._doomed |= self._starting.intersection(instance_ids)
        await self._end(instance_ids, EndReason.RELEASED, "it was released")
        for instance_id in instance_ids:
            if instance_id not in self._lives:
                await self._end_orphan(instance_id)

    async def _end_orphan(self, instance_id: InstanceId) -> None:
        """End an instance of this node whose dedicated host is gone for good."""
        record = self._store.get(instance_id)
        if record is not None and record.density is ActorDensity.DEDICATED:
            await self._engine(record.spec.engine).stop([instance_id])
            self._store.delete([instance_id])

    async def release_jobs(self, jobs: Sequence[str]) -> list[InstanceId]:
        """End the instances that belong to Ray jobs that ended; return their ids."""
        await self._adopted.wait()
        ended = set(jobs)
        mine = [i for i in self._sandboxes if self._lives[i].record.spec.job_id in ended]
        ids = [InstanceId(i) for i in mine]
        await self._end(ids, EndReason.OWNER, "the Ray job that owned it ended")
        return ids

    async def _end(self, ids: Sequence[InstanceId], reason: EndReason, cause: str) -> None:
        by_engine: dict[str, list[InstanceId]] = {}
        for instance_id in ids:
            life = self._lives.get(instance_id)
            if life is not None and instance_id in self._sandboxes:
                by_engine.setdefault(life.record.spec.engine, []).append(instance_id)
                self._note_end(instance_id, reason, cause)
        for name, group in by_engine.items():
            await self._engine(name).stop(group)

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.sweep()
            except Exception as exc:  # noqa: BLE001  # the loop that keeps deadlines goes on
                logger.warning("sweep of host %s: %r", self._id, exc)

    async def sweep(self) -> None:
        """End what is due, and tell when a dedicated host has nothing left to do."""
        now = self._clock.now()
        due: dict[EndReason, list[InstanceId]] = {}
        for instance_id in list(self._sandboxes):
            reason = self._lives[instance_id].due(now)
            if reason is not None:
                due.setdefault(reason, []).append(InstanceId(instance_id))
        for reason, ids in due.items():
            await self._end(ids, reason, reason.value)
        waited = self._empty_since is not None and now - self._empty_since > LINGER_S
        if waited and self._density is ActorDensity.DEDICATED and self._on_empty is not None:
            self._on_empty()

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
        """Return how many sandbox processes this node really runs, whoever they belong to."""
        return await asyncio.to_thread(self._count_processes)

    async def instances(self) -> list[InstanceInfo]:
        """Return the live instances."""
        await self._adopted.wait()
        return [self._lives[i].info() for i in self._sandboxes]
