"""The instances of a host with their sandboxes and records, from start to end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from aenv_ray import logs
from aenv_ray.actors.host.engines import HostEngines
from aenv_ray.actors.host.instance import EndReason, InstanceLife
from aenv_ray.clock import Clock
from aenv_ray.engines.base import EndCause, Sandbox
from aenv_ray.errors import (
    AenvError,
    FabricUnavailable,
    InstanceNotFound,
    SandboxDiedInside,
    SandboxLost,
)
from aenv_ray.hub.store import InstanceStore
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import InstanceInfo, InstanceRecord

logger = logging.getLogger(__name__)

REMEMBERED_ENDS: Final = 20_000
"""Ended instances for which calls still raise the exact reason."""


def absent(host_id: HostId, instance_id: InstanceId) -> InstanceNotFound:
    """Return the error for an instance that a host does not know."""
    return InstanceNotFound(
        f"host {host_id} has no instance {instance_id}",
        instance_id=instance_id,
        hint="it never existed or ended long ago; list_instances() shows live ones",
    )


class InstanceTable:
    """The instances of one host.

    Args:
        engines: Engines of the host.
        store: Store of the records.
        clock: The host's clock.
        on_sandbox: Called with each instance and its sandbox, new or adopted.
        on_end: Called with each instance that has ended.

    Attributes:
        lives: Live instances, and those that ended recently, by id; instances from a warm pool also
            by the id that was requested.
        sandboxes: The sandboxes of live instances, by id.
        uneven: `InstanceSpec.places` of the live instances that have not exactly one, by id.
        empty_since: Since when there is no live instance; None while there is one, and before the
            first.
    """

    def __init__(
        self,
        engines: HostEngines,
        store: InstanceStore,
        clock: Clock,
        on_sandbox: Callable[[InstanceLife, Sandbox], None],
        on_end: Callable[[InstanceLife], None],
    ) -> None:
        self._engines = engines
        self._on_sandbox = on_sandbox
        self._on_end = on_end
        self._store = store
        self._clock = clock
        self.lives: dict[str, InstanceLife] = {}
        self.sandboxes: dict[str, Sandbox] = {}
        self.uneven: dict[str, int] = {}
        self.empty_since: float | None = None
        self._noted: set[str] = set()
        self._unsearched: dict[str, frozenset[InstanceId]] = {}
        """Engines on which an earlier host may have left unrecorded sandboxes, with its records."""
        self._searching = asyncio.Lock()

    async def will_use(self, host_id: HostId, engine: str) -> None:
        """Prepare to make sandboxes on an engine.

        Unrecorded sandboxes of an earlier host are ended, and the use of the engine is recorded for
        the next host with this id.

        Raises:
            AenvError: It is still unknown which sandboxes an earlier host left there, so new ones
                could not be told from them.
        """
        await self._end_left(engine)
        if engine not in self._noted:
            self._store.note_engine(host_id, engine)
            self._noted.add(engine)

    def add(self, record: InstanceRecord, sandbox: Sandbox) -> InstanceInfo:
        """Add a new instance; the caller stores its record."""
        life = self._note_life(record)
        self._add_sandbox(record, sandbox)
        return life.info()

    def _note_life(self, record: InstanceRecord) -> InstanceLife:
        life = InstanceLife(record, self._clock.now())
        self.lives[record.id] = life
        if record.requested_id is not None:
            # Its creator may retry or release it before it knows the actual id.
            self.lives[record.requested_id] = life
        return life

    async def adopt(self, record: InstanceRecord, deadline: float) -> None:
        """Adopt an instance of an earlier host with this id.

        Retries until `deadline`, on the loop's clock; then the instance counts as lost.
        """
        record = record.model_copy(update={"generation": record.generation + 1})
        self._note_life(record)
        try:
            sandbox = await self._engines.attach(record.spec.engine, record.id, deadline)
        except AenvError as exc:
            if not isinstance(exc, SandboxLost):
                # Its sandbox may be running, and nothing else would end it.
                extra = logs.of_instance(record.id, record.spec.owner)
                logger.warning("%s cannot be adopted: %s", record.id, exc, extra=extra)
                self._engines.owe(record.spec.engine, [record.id])
            inside = exc.died_of if isinstance(exc, SandboxDiedInside) else None
            self._note_end(record.id, EndReason.LOST, EndCause(exc.message, inside))
            return
        self._update_stored(record)
        self._add_sandbox(record, sandbox)

    async def end_unrecorded(
        self, records: Sequence[InstanceRecord], engines: Collection[str]
    ) -> None:
        """End the sandboxes that an earlier host with this id did not record.

        An engine that does not answer does not prevent the host from opening: `end_due` and
        `will_use` ask it again.
        """
        recorded = frozenset(record.id for record in records)
        self._unsearched = dict.fromkeys(engines, recorded)
        for name in engines:
            try:
                await self._end_left(name)
            except AenvError as exc:
                logger.warning("engine %s does not list its sandboxes: %s", name, exc)

    async def _end_left(self, engine: str) -> None:
        """End the unrecorded sandboxes of an earlier host on an engine, once."""
        if engine not in self._unsearched:
            return
        async with self._searching:
            if engine in self._unsearched:
                recorded = self._unsearched[engine]
                running = await self._engines.get(engine).running()
                left = [s.instance_id for s in running if s.instance_id not in recorded]
                await self._engines.stop(engine, left)
                del self._unsearched[engine]

    def _add_sandbox(self, record: InstanceRecord, sandbox: Sandbox) -> None:
        self.sandboxes[record.id] = sandbox
        if record.spec.places != 1:
            self.uneven[record.id] = record.spec.places
        self.empty_since = None
        self._on_sandbox(self.lives[record.id], sandbox)
        sandbox.on_end(functools.partial(self._note_end, record.id, EndReason.LOST))

    def _note_end(self, instance_id: InstanceId, reason: EndReason, cause: EndCause) -> None:
        life = self.lives.get(instance_id)
        if life is None or not life.end(reason, cause, self._clock.now()):
            return
        self.sandboxes.pop(instance_id, None)
        self.uneven.pop(instance_id, None)
        if life.record.inner:
            life.record = life.record.model_copy(update={"has_ended": True})
            self._update_stored(life.record)  # until its inner instances have ended
        else:
            self._store.delete([instance_id])
        self._on_end(life)
        self.note_if_empty()
        while len(self.lives) - len(self.sandboxes) > REMEMBERED_ENDS:
            oldest = next(i for i, life in self.lives.items() if life.ended is not None)
            del self.lives[oldest]

    def _update_stored(self, record: InstanceRecord) -> None:
        """Replace a stored record; the earlier one is enough to find the sandbox."""
        try:
            self._store.put([record])
        except FabricUnavailable as exc:
            extra = logs.of_instance(record.id, record.spec.owner)
            logger.warning(
                "the record of %s is not updated: %s", record.id, exc.message, extra=extra
            )

    def note_if_empty(self) -> None:
        """Update `empty_since`."""
        if not self.sandboxes:
            self.empty_since = self._clock.now()

    def end_soon(
        self, ids: Iterable[InstanceId], reason: EndReason, cause: EndCause
    ) -> dict[str, list[InstanceId]]:
        """End instances, whose sandboxes the next `end_due` ends; ended ones are ignored.

        Returns:
            The instances that this ended, by engine.
        """
        by_engine: dict[str, list[InstanceId]] = {}
        for instance_id in ids:
            life = self.lives.get(instance_id)
            if life is not None and life.record.id in self.sandboxes:
                by_engine.setdefault(life.record.spec.engine, []).append(life.record.id)
                self._note_end(life.record.id, reason, cause)
                self._engines.owe(life.record.spec.engine, [life.record.id])  # it takes a slot
        return by_engine

    async def end(self, ids: Sequence[InstanceId], reason: EndReason, cause: EndCause) -> None:
        """End instances and wait until their sandboxes are gone; ended ones are ignored.

        Raises:
            AenvError: An engine could not end its sandboxes. Those of other engines are gone.
        """
        failure: AenvError | None = None
        for name, group in self.end_soon(ids, reason, cause).items():
            try:
                await self._engines.stop(name, group)
            except AenvError as exc:
                failure = exc
        if failure is not None:
            raise failure

    async def end_due(self) -> None:
        """End the instances that are due, and retry to end earlier ones."""
        now = self._clock.now()
        due: dict[EndReason, list[InstanceId]] = {}
        for instance_id in list(self.sandboxes):
            reason = self.lives[instance_id].due(now)
            if reason is not None:
                due.setdefault(reason, []).append(InstanceId(instance_id))
        for reason, ids in due.items():
            await self.end(ids, reason, EndCause(reason.value))
        await self._engines.stop_owed()
        for name in list(self._unsearched):
            with contextlib.suppress(AenvError):  # logged at the first attempt
                await self._end_left(name)
