"""The sandboxes that a host keeps ready: does what `aenv_ray.actors.host.pool` decides (design D9).

They are no instances yet: nobody can call them, nothing lists them, and they give way to whatever
needs their place. One that is taken keeps its id and becomes the taker's in everything else.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from aenv_ray.actors.host.engines import HostEngines
from aenv_ray.actors.host.pool import MAX_AGE_S, PoolKey, Pools, pool_key
from aenv_ray.actors.host.projects import HostProjects
from aenv_ray.actors.host.starts import HostStarts, OnMade
from aenv_ray.actors.host.warm_requests import WarmRequest, WarmRequestFile
from aenv_ray.clock import Clock
from aenv_ray.engines.base import Sandbox
from aenv_ray.errors import AenvError, DeadlineExceeded
from aenv_ray.hub.store import InstanceStore
from aenv_ray.ids import InstanceId, new_instance_id, split_reference
from aenv_ray.models import InstanceRecord, InstanceSpec

logger = logging.getLogger(__name__)

POOLED_TTL_S: Final = 2 * MAX_AGE_S
"""The engine's own deadline of one that nobody takes: it is replaced long before."""
DRAIN_S: Final = 20.0
"""Starts that are under way when nobody wants them any more end within this."""
CHECK_S: Final = 5.0
"""One that is taken answers within this, or is not handed out."""

Taken = tuple[InstanceRecord, Sandbox]


class WarmPools:
    """The pools of one shared host.

    Args:
        engines: Which made the sandboxes.
        projects: On its node.
        clock: For deadlines.
        starts: Makes more of them.
        store: Of their records.
        requests: Where what was asked for is kept.
        room: Says how many places the host has for pools.
        is_busy: Says whether somebody waits for a start now.
    """

    def __init__(
        self,
        engines: HostEngines,
        projects: HostProjects,
        clock: Clock,
        starts: HostStarts,
        store: InstanceStore,
        requests: WarmRequestFile,
        room: Callable[[], int],
        is_busy: Callable[[], bool],
    ) -> None:
        self._engines = engines
        self._projects = projects
        self._starts = starts
        self._store = store
        self._requests = requests
        self._clock = clock
        self._room = room
        self._is_busy = is_busy
        self._pools = Pools()
        self._shelf: dict[InstanceId, Taken] = {}
        self._failures: dict[PoolKey, AenvError] = {}
        self._changed = asyncio.Event()
        self._refilling: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Go on with what an earlier host of this id was asked for."""
        for request in self._requests.load():
            self._pools.ask(request, self._clock.now())

    async def close(self) -> None:
        """Start nothing more; what is ready runs on for a host of the same id."""
        if self._refilling is not None:
            self._refilling.cancel()
            await asyncio.wait([self._refilling])

    async def adopt(self, record: InstanceRecord, deadline: float) -> None:
        """Take over a sandbox that an earlier host kept ready; one that is gone is dropped.

        Args:
            record: The earlier host's.
            deadline: On the loop's clock: until then its node is asked for it.
        """
        try:
            sandbox = await self._engines.attach(record.spec.engine, record.id, deadline)
        except AenvError as exc:
            logger.warning("%s was ready and is given up: %s", record.id, exc)
            self._engines.owe(record.spec.engine, [record.id])
            self._store.delete([record.id])
            return
        self._pools.adopted(record.spec, self._clock.now())
        self._keep(record, sandbox)

    # --- what is wanted -------------------------------------------------------------------------

    async def ask(self, request: WarmRequest, wait_s: float | None) -> int:
        """Keep sandboxes ready from now on; what is too many then is gone when this returns.

        Idempotent: a request replaces the earlier one of its job for the same pool.

        Args:
            request: What to keep ready.
            wait_s: Wait for so long until they are ready. None: they are made in the background.

        Returns:
            How many are ready.

        Raises:
            DeadlineExceeded: They are not ready after `wait_s`, and more are still made; or some
                that are too many still start after `DRAIN_S`.
            AenvError: Why one did not start, when that was waited for.
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
        """Wait for starts under way that nobody wants any more, and end what they made."""
        try:
            async with asyncio.timeout(DRAIN_S):
                while self._pools.excess(key, self._clock.now()):
                    changed = self._changed
                    await self.tick()
                    if self._pools.excess(key, self._clock.now()):
                        await changed.wait()
        except TimeoutError as exc:
            raise DeadlineExceeded(
                f"sandboxes that nobody wants any more still start after {DRAIN_S:g} s",
                hint="each is ended when it is up",
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
                f"{missing} sandboxes are not ready after {wait_s:g} s",
                hint="more are still made; do not wait for all of them, or ask for fewer",
            ) from exc

    def forget_jobs(self, job_ids: Collection[str]) -> None:
        """Drop what jobs that ended asked for; the next `tick` ends what nobody else wants."""
        if self._pools.forget_jobs(job_ids):
            self._requests.save(self._pools.requests())

    # --- taking ---------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """How many places the pools take."""
        return self._pools.size

    def ready(self) -> dict[str, int]:
        """Return how many are ready now, by the reference of their environment."""
        return dict(Counter(record.spec.reference for record, _ in self._shelf.values()))

    async def take(self, specs: Sequence[InstanceSpec], on_taken: OnMade) -> list[InstanceSpec]:
        """Turn ready sandboxes into instances, as far as there are any.

        Args:
            specs: What is asked for.
            on_taken: Told of each: its record has the sandbox's own id, and that of the spec as the
                requested one. It was never called, and answered just now.

        Returns:
            Those that must be started.
        """
        groups: dict[PoolKey, list[InstanceSpec]] = {}
        # What has a storage is alone in having it: none is kept ready.
        left = [spec for spec in specs if spec.storage is not None]
        for spec in specs:
            if spec.storage is None:
                groups.setdefault(pool_key(spec), []).append(spec)
        for key, group in groups.items():
            self._note_demand(group)
            while group and (ready := self._pools.take(key, len(group))):
                pairs = [(spec, *self._shelf.pop(i)) for spec, i in zip(group, ready, strict=False)]
                async with asyncio.TaskGroup() as tasks:
                    checks = [tasks.create_task(self._hand_over(*p, on_taken)) for p in pairs]
                dead = [p[0] for p, c in zip(pairs, checks, strict=True) if not c.result()]
                group = dead + group[len(pairs) :]  # noqa: PLW2901  # what is left of it
            left += group
        return left

    def _note_demand(self, group: Sequence[InstanceSpec]) -> None:
        try:
            warm = self._projects.config(group[0].digest).deploy.warm
            is_slow = self._engines.get(group[0].engine).capabilities.slow_start
        except AenvError:
            return  # whoever starts it tells the caller
        now = self._clock.now()
        self._pools.demanded(group[0], len(group), now, warm=warm, is_slow=is_slow)

    async def _hand_over(
        self, spec: InstanceSpec, record: InstanceRecord, sandbox: Sandbox, on_taken: OnMade
    ) -> bool:
        """Make a sandbox that instance; False when it does not answer: it is ended then."""
        now = self._clock.now()
        deadline = now + spec.ttl_s
        try:
            async with asyncio.timeout(CHECK_S):
                await self._engines.get(spec.engine).set_deadline(record.id, deadline)
                await sandbox.request("ping", {}, deadline_s=CHECK_S)
        except (AenvError, TimeoutError) as exc:
            logger.warning("%s was ready and does not answer: %r", record.id, exc)
            self._discard(record)
            return False
        except BaseException:
            self._discard(record)  # its taker is gone, and it may not be taken again
            raise
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
        """End what is too many, and start what is missing in the background."""
        await self._end(self._pools.surplus(self._clock.now()))
        if self._refilling is not None:
            if not self._refilling.done():
                return
            refilled, self._refilling = self._refilling, None
            await refilled  # raises what nobody expected
        self._refilling = asyncio.create_task(self._refill())

    async def give_way(self, count: int) -> None:
        """End up to `count` of them for instances that need their places."""
        await self._end(self._pools.give_way(count))

    async def _refill(self) -> None:
        while batch := self._pools.refills(
            self._clock.now(), room=self._room() - self._pools.size, is_busy=self._is_busy()
        ):
            async with asyncio.TaskGroup() as group:
                for key, count in batch.items():
                    group.create_task(self._start(key, count))

    async def _start(self, key: PoolKey, count: int) -> None:
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
            failures = await self._starts.start(
                specs, lambda *taken: made.append(taken), is_pooled=True
            )
            has_failed = bool(failures)
            self._note_failure(key, next(iter(failures.values()), None))
        except AenvError as exc:
            self._note_failure(key, exc)
        finally:
            now, ids = self._clock.now(), [record.id for record, _ in made]
            self._pools.refilled(key, ids, now, count=count, has_failed=has_failed)
            for record, sandbox in made:
                self._keep(record, sandbox)
            self._tell_change()
            self._store.put([record for record, _ in made if record.id in self._shelf])

    def _note_failure(self, key: PoolKey, failure: AenvError | None) -> None:
        self._failures.pop(key, None)
        if failure is not None:
            self._failures[key] = failure
            reference = self._pools.pattern(key).reference
            logger.warning("a pool of %s is not filled: %s", reference, failure.message)

    def _keep(self, record: InstanceRecord, sandbox: Sandbox) -> None:
        self._shelf[record.id] = record, sandbox
        sandbox.on_end(functools.partial(self._note_end, record.id))

    def _note_end(self, instance_id: InstanceId, cause: str) -> None:
        """Forget one that died before anybody took it."""
        if self._shelf.pop(instance_id, None) is not None:
            logger.info("%s was ready and died: %s", instance_id, cause)
            self._pools.gone(instance_id)
            self._store.delete([instance_id])
            self._tell_change()

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _end(self, instance_ids: Iterable[InstanceId]) -> None:
        by_engine: dict[str, list[InstanceId]] = {}
        for instance_id in instance_ids:
            record, _ = self._shelf.pop(instance_id)
            by_engine.setdefault(record.spec.engine, []).append(instance_id)
            self._store.delete([instance_id])
        for name, group in by_engine.items():
            self._engines.owe(name, group)  # also when this is cancelled before their turn
        for name, group in by_engine.items():
            try:
                await self._engines.stop(name, group)
            except AenvError as exc:
                logger.warning("%d that nobody took are still to be ended: %s", len(group), exc)
