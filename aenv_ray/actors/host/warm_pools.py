"""The warm sandboxes of a host; `aenv_ray.actors.host.pool` decides about them.

They are not instances yet: nobody can call or list them, and they give way to instances that need
their slot. A sandbox that is taken keeps its id and gets everything else from the create.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol

from pydantic import TypeAdapter, ValidationError

from aenv_ray.actors.host.engines import HostEngines
from aenv_ray.actors.host.pool import MAX_AGE_S, PoolKey, Pools, WarmRequest, pool_key
from aenv_ray.actors.host.projects import HostProjects
from aenv_ray.clock import Clock
from aenv_ray.engines.base import EndCause, Sandbox
from aenv_ray.errors import AenvError, DeadlineExceeded, FabricUnavailable
from aenv_ray.files import write_atomically
from aenv_ray.hub.store import InstanceStore
from aenv_ray.ids import InstanceId, new_instance_id, split_reference
from aenv_ray.models import InstanceRecord, InstanceSpec
from aenv_ray.runtime.door.dispatch import REHEARSAL_METHOD

logger = logging.getLogger(__name__)

POOLED_TTL_S: Final = 2 * MAX_AGE_S
"""The engine's deadline of a warm sandbox, which is replaced long before."""
DRAIN_S: Final = 20.0
"""How long a smaller request waits for starts that became superfluous."""
CHECK_S: Final = 5.0
"""A sandbox that does not answer within this is not handed out."""

Taken = tuple[InstanceRecord, Sandbox]

OnStarted = Callable[[InstanceRecord, Sandbox], None]
"""Called with the record and the sandbox of an instance that runs."""


class StartSandboxes(Protocol):
    """See `Host._start_sandboxes`."""

    async def __call__(
        self, specs: Sequence[InstanceSpec], on_started: OnStarted, *, is_pooled: bool = False
    ) -> dict[InstanceId, AenvError]:
        """Start sandboxes; return the errors of those that do not run."""


_REQUESTS: Final = TypeAdapter(list[WarmRequest])


class WarmRequestFile:
    """The requests of one host.

    Without a path, requests end with this process.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def save(self, requests: Sequence[WarmRequest]) -> None:
        """Replace the saved requests atomically."""
        if self._path is None:
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(self._path, _REQUESTS.dump_json(list(requests)))  # may contain secrets

    def load(self) -> list[WarmRequest]:
        """Return the saved requests; none if they cannot be read."""
        if self._path is None or not self._path.exists():
            return []
        try:
            return _REQUESTS.validate_json(self._path.read_bytes())
        except (OSError, ValidationError) as exc:
            # Another version may have written it. Pools only save time, and are requested again.
            logger.warning("ignoring unreadable warm pool requests: %s", type(exc).__name__)
            return []


class WarmPools:
    """The pools of one shared host.

    Args:
        room: Returns how many slots the pools may use.
        is_busy: Returns whether a create waits for a start now.
    """

    def __init__(
        self,
        engines: HostEngines,
        projects: HostProjects,
        clock: Clock,
        *,
        start: StartSandboxes,
        store: InstanceStore,
        requests: WarmRequestFile,
        room: Callable[[], int],
        is_busy: Callable[[], bool],
    ) -> None:
        self._engines = engines
        self._projects = projects
        self._start_sandboxes = start
        self._store = store
        self._requests = requests
        self._clock = clock
        self._room = room
        self._is_busy = is_busy
        self._pools = Pools()
        self._ready: dict[InstanceId, Taken] = {}
        self._failures: dict[PoolKey, AenvError] = {}
        self._changed = asyncio.Event()
        self._starts: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Load the requests of an earlier host with this id."""
        for request in self._requests.load():
            self._pools.ask(request, self._clock.now())

    async def close(self) -> None:
        """Stop starting sandboxes; the warm ones run on for the next host with this id."""
        for start in self._starts:
            start.cancel()
        if self._starts:
            await asyncio.wait(self._starts)

    async def adopt(self, record: InstanceRecord, deadline: float) -> None:
        """Adopt a warm sandbox of an earlier host; one that is gone is forgotten.

        It is tried until `deadline`, on the loop's clock.
        """
        try:
            sandbox = await self._engines.attach(record.spec.engine, record.id, deadline)
        except AenvError as exc:
            logger.warning("warm sandbox %s cannot be adopted: %s", record.id, exc)
            self._engines.owe(record.spec.engine, [record.id])
            self._store.delete([record.id])
            return
        self._pools.adopted(record.spec, self._clock.now())
        self._put_ready(record, sandbox)

    # --- what is wanted -------------------------------------------------------------------------

    async def ask(self, request: WarmRequest, wait_s: float | None) -> int:
        """Keep sandboxes ready from now on; superfluous ones are gone when this returns.

        Idempotent: a request replaces an earlier one of the same job for the same pool.

        Args:
            request: What to keep ready.
            wait_s: How long to wait until they are ready; None: they start in the background.

        Returns:
            How many are ready.

        Raises:
            DeadlineExceeded: Not all are ready after `wait_s`, and the others are still starting;
                or superfluous ones are still starting after `DRAIN_S`.
            AenvError: Why a sandbox did not start, if that was waited for.
        """
        key = self._pools.ask(request, self._clock.now())
        self._failures.pop(key, None)
        self._requests.save(self._pools.requests())
        await self.tick()
        await self._drain(key)
        if wait_s is not None:
            await self._fill(key, wait_s)
        return self._pools.ready(key)

    async def _drain(self, key: PoolKey) -> None:
        """End superfluous sandboxes, including those that are still starting."""
        try:
            async with asyncio.timeout(DRAIN_S):
                while self._pools.excess(key, self._clock.now()):
                    changed = self._changed
                    await self.tick()
                    if self._pools.excess(key, self._clock.now()):
                        await changed.wait()
        except TimeoutError as exc:
            raise DeadlineExceeded(
                f"superfluous warm sandboxes are still starting after {DRAIN_S:g} s",
                hint="each is ended once it is up",
            ) from exc

    async def _fill(self, key: PoolKey, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                while self._pools.missing(key, self._clock.now()):
                    if key in self._failures:
                        raise self._failures[key]
                    await self._changed.wait()
        except TimeoutError as exc:
            missing = self._pools.missing(key, self._clock.now())
            raise DeadlineExceeded(
                f"{missing} warm sandboxes are not ready after {wait_s:g} s",
                hint="they continue to start; do not wait for all of them, or ask for fewer",
            ) from exc

    def forget_jobs(self, job_ids: Collection[str]) -> None:
        """Drop the requests of ended Ray jobs; the next `tick` ends what is superfluous."""
        if self._pools.forget_jobs(job_ids):
            self._requests.save(self._pools.requests())

    # --- taking ---------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of slots that the pools use."""
        return self._pools.size

    def ready(self) -> dict[str, int]:
        """Return how many sandboxes are ready, by environment reference."""
        return dict(Counter(record.spec.reference for record, _ in self._ready.values()))

    async def take(
        self, specs: Sequence[InstanceSpec], on_taken: OnStarted, *, most_standing: int | None
    ) -> list[InstanceSpec]:
        """Turn warm sandboxes into instances, as far as there are any.

        Args:
            specs: The instances to create.
            on_taken: Called for each. The record has the id of the sandbox, with the id of the spec
                as `requested_id`. The sandbox has just answered a ping.
            most_standing: As `Policy.max_warm`.

        Returns:
            The specs for which there was no warm sandbox.
        """
        groups: dict[PoolKey, list[InstanceSpec]] = {}
        # A storage volume belongs to one instance, so no sandbox is warm for it.
        left = [spec for spec in specs if spec.storage is not None]
        for spec in specs:
            if spec.storage is None:
                groups.setdefault(pool_key(spec), []).append(spec)
        for key, group in groups.items():
            self._note_demand(group, most_standing)
            while group and (ready := self._pools.take(key, len(group))):
                pairs = [(spec, *self._ready.pop(i)) for spec, i in zip(group, ready, strict=False)]
                async with asyncio.TaskGroup() as tasks:
                    checks = [tasks.create_task(self._hand_over(*p, on_taken)) for p in pairs]
                dead = [p[0] for p, c in zip(pairs, checks, strict=True) if not c.result()]
                group = dead + group[len(pairs) :]  # noqa: PLW2901  # what is left of it
            left += group
        return left

    def _note_demand(self, group: Sequence[InstanceSpec], most: int | None) -> None:
        try:
            warm = self._projects.config(group[0].digest).deploy.warm
            is_slow = self._engines.get(group[0].engine).capabilities.slow_start
        except AenvError:
            return  # starting it raises the same error
        now = self._clock.now()
        self._pools.demanded(group[0], len(group), now, warm=warm, most=most, is_slow=is_slow)

    async def _hand_over(
        self, spec: InstanceSpec, record: InstanceRecord, sandbox: Sandbox, on_taken: OnStarted
    ) -> bool:
        """Turn a sandbox into an instance; if it does not answer, end it and return False."""
        now = self._clock.now()
        deadline = now + spec.ttl_s
        failure, is_fit = None, False
        try:
            async with asyncio.timeout(CHECK_S), asyncio.TaskGroup() as group:
                engine = self._engines.get(spec.engine)
                group.create_task(engine.set_deadline(record.id, deadline))
                group.create_task(sandbox.request("ping", {}, deadline_s=CHECK_S))
            is_fit = True
        except* (AenvError, TimeoutError) as failures:
            failure = failures.exceptions[0]
        finally:
            if not is_fit:  # also if the create that took it was cancelled: no other may take it
                self._discard(record)
        if failure is not None:
            logger.warning("warm sandbox %s does not answer: %r", record.id, failure)
            return False
        fields = {
            "spec": spec.model_copy(update={"instance_id": record.id}),
            "requested_id": spec.instance_id, "is_pooled": False, "created_at": now,
            "deadline": deadline, "start_mode": f"warm, {sandbox.start_mode}",
        }  # fmt: skip
        on_taken(record.model_copy(update=fields), sandbox)
        return True

    def _discard(self, record: InstanceRecord) -> None:
        self._store.delete([record.id])
        self._engines.owe(record.spec.engine, [record.id])

    # --- keeping them -----------------------------------------------------------------------------

    async def tick(self) -> None:
        """End superfluous sandboxes, and start missing ones in the background."""
        await self._end(self._pools.surplus(self._clock.now()))
        for start in [start for start in self._starts if start.done()]:
            self._starts.remove(start)
            await start  # raises an unexpected error
        self._refill()

    async def give_way(self, count: int) -> None:
        """End up to `count` sandboxes, because instances need their slots."""
        await self._end(self._pools.give_way(count))

    def _refill(self) -> None:
        """Start missing sandboxes; no pool waits for the starts of another."""
        now = self._clock.now()
        batch = self._pools.refills(
            now, room=self._room() - self._pools.size, is_busy=self._is_busy(),
            remote_engines=self._engines.remote_engines(),
        )  # fmt: skip
        for key, count in batch.items():
            self._starts.add(asyncio.create_task(self._start_and_refill(key, count, now)))

    async def _start_and_refill(self, key: PoolKey, count: int, began: float) -> None:
        await self._start_some(key, count, began)
        self._refill()

    async def _start_some(self, key: PoolKey, count: int, began: float) -> None:
        pattern = self._pools.pattern(key)
        name, _ = split_reference(pattern.reference)
        common = {"job_id": None, "owner": None, "idle_timeout_s": None, "ttl_s": POOLED_TTL_S}
        specs = [
            pattern.model_copy(update={**common, "instance_id": new_instance_id(name)})
            for _ in range(count)
        ]
        made: list[Taken] = []
        has_failed = True
        try:
            failures = await self._start_sandboxes(
                specs, lambda *taken: made.append(taken), is_pooled=True
            )
            has_failed = bool(failures)
            self._note_failure(key, next(iter(failures.values()), None))
            async with asyncio.TaskGroup() as group:
                for _, sandbox in made:
                    group.create_task(_rehearse(sandbox))
        except AenvError as exc:
            self._note_failure(key, exc)
        finally:
            now, ids = self._clock.now(), [record.id for record, _ in made]
            self._pools.refilled(key, ids, now, began=began, count=count, has_failed=has_failed)
            for record, sandbox in made:
                self._put_ready(record, sandbox)
            self._tell_change()
            self._record([record for record, _ in made if record.id in self._ready])

    def _record(self, records: Sequence[InstanceRecord]) -> None:
        try:
            self._store.put(records)
        except FabricUnavailable as exc:  # a later host with this id ends those without a record
            logger.warning("warm sandboxes are not recorded: %s", exc.message)

    def _note_failure(self, key: PoolKey, failure: AenvError | None) -> None:
        self._failures.pop(key, None)
        if failure is not None:
            self._failures[key] = failure
            reference = self._pools.pattern(key).reference
            logger.warning("the warm pool of %s cannot be filled: %s", reference, failure.message)

    def _put_ready(self, record: InstanceRecord, sandbox: Sandbox) -> None:
        self._ready[record.id] = record, sandbox
        sandbox.on_end(functools.partial(self._note_end, record.id))

    def _note_end(self, instance_id: InstanceId, cause: EndCause) -> None:
        """Forget a sandbox that died before it was taken."""
        if self._ready.pop(instance_id, None) is not None:
            logger.info("warm sandbox %s died: %s", instance_id, cause)
            self._pools.gone(instance_id)
            self._store.delete([instance_id])
            self._tell_change()

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _end(self, instance_ids: Iterable[InstanceId]) -> None:
        by_engine: dict[str, list[InstanceId]] = {}
        for instance_id in instance_ids:
            record, _ = self._ready.pop(instance_id)
            by_engine.setdefault(record.spec.engine, []).append(instance_id)
            self._store.delete([instance_id])
        for name, group in by_engine.items():
            self._engines.owe(name, group)  # in case this is cancelled before their turn
        for name, group in by_engine.items():
            try:
                await self._engines.stop(name, group)
            except AenvError as exc:
                logger.warning("%d warm sandboxes are still to be ended: %s", len(group), exc)


async def _rehearse(sandbox: Sandbox) -> None:
    """Have a sandbox answer requests that run no code of its environment.

    Its first call is faster then: see `REHEARSAL_METHOD`.
    """
    arguments = {"arguments": {"text": ""}}
    with contextlib.suppress(AenvError):  # a sandbox that does not answer is not handed out
        await sandbox.request("tools/list", {}, deadline_s=CHECK_S)
        await sandbox.request(REHEARSAL_METHOD, arguments, deadline_s=CHECK_S)
