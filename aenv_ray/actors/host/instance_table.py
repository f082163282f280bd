"""What lives on a host, and how it ends: instances with their sandboxes and records."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Collection, Sequence
from typing import Final

from aenv_ray.actors.host.engines import HostEngines
from aenv_ray.actors.host.instance import EndReason, InstanceLife
from aenv_ray.clock import Clock
from aenv_ray.engines.base import Sandbox
from aenv_ray.errors import AenvError, FabricUnavailable, SandboxLost
from aenv_ray.hub.store import InstanceStore
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import InstanceInfo, InstanceRecord

logger = logging.getLogger(__name__)

REMEMBERED_ENDS: Final = 20_000
"""Ended instances whose callers still get the exact reason."""


class Residents:
    """The instances of one host.

    Args:
        engines: Which made their sandboxes.
        store: Of their records.
        clock: For deadlines.

    Attributes:
        lives: Those that live, and those that ended not too long ago; those from a pool also by
            the id that was asked for.
        sandboxes: Of those that live.
        empty_since: Since when none lives; None while one does, and before the first.
    """

    def __init__(self, engines: HostEngines, store: InstanceStore, clock: Clock) -> None:
        self._engines = engines
        self._store = store
        self._clock = clock
        self.lives: dict[str, InstanceLife] = {}
        self.sandboxes: dict[str, Sandbox] = {}
        self.empty_since: float | None = None
        self._noted: set[str] = set()
        self._unsearched: dict[str, frozenset[InstanceId]] = {}
        """Engines on which an earlier host may have left something, and what it had recorded."""
        self._searching = asyncio.Lock()

    async def will_use(self, host_id: HostId, engine: str) -> None:
        """See that nothing unrecorded is left on an engine, before anything is made there.

        The next host of this id is let know to look there.

        Raises:
            FabricUnavailable: It was not known what an earlier host left, and still is not: what is
                made now could not be told from that.
        """
        await self._end_left(engine)
        if engine not in self._noted:
            self._store.note_engine(host_id, engine)
            self._noted.add(engine)

    def add(self, record: InstanceRecord, sandbox: Sandbox) -> InstanceInfo:
        """Take in a new instance; the caller puts its record into the store."""
        life = self._note_life(record)
        self._keep(record.id, sandbox)
        return life.info()

    def _note_life(self, record: InstanceRecord) -> InstanceLife:
        life = InstanceLife(record, self._clock.now())
        self.lives[record.id] = life
        if record.requested_id is not None:
            # Its creator may ask again, or give up, before it knows the id that it got.
            self.lives[record.requested_id] = life
        return life

    async def adopt(self, record: InstanceRecord, deadline: float) -> None:
        """Take over an instance that an earlier host of this id left.

        Args:
            record: The earlier host's.
            deadline: On the loop's clock: until then its node is asked for it.
        """
        record = record.model_copy(update={"generation": record.generation + 1})
        self._note_life(record)
        try:
            sandbox = await self._engines.attach(record.spec.engine, record.id, deadline)
        except AenvError as exc:
            if not isinstance(exc, SandboxLost):
                # It may run: nobody can call it any more, and it must not live on unowned.
                logger.warning("%s is given up: %s", record.id, exc)
                self._engines.owe(record.spec.engine, [record.id])
            self._note_end(record.id, EndReason.LOST, exc.message)
            return
        self._store.put([record])
        self._keep(record.id, sandbox)

    async def end_unrecorded(
        self, records: Sequence[InstanceRecord], engines: Collection[str]
    ) -> None:
        """End the sandboxes of an earlier host of this id that are in none of its records.

        An engine that cannot be asked keeps no host from opening: `end_due` and `will_use` ask it
        again.

        Args:
            records: The earlier host's.
            engines: Those that it used.
        """
        recorded = frozenset(record.id for record in records)
        self._unsearched = dict.fromkeys(engines, recorded)
        for name in engines:
            try:
                await self._end_left(name)
            except FabricUnavailable as exc:
                logger.warning("what engine %s runs is not known: %s", name, exc)

    async def _end_left(self, engine: str) -> None:
        """End what an earlier host left unrecorded on an engine, unless that is done."""
        if engine not in self._unsearched:
            return
        async with self._searching:
            if engine in self._unsearched:
                recorded = self._unsearched[engine]
                running = await self._engines.get(engine).running()
                left = [s.instance_id for s in running if s.instance_id not in recorded]
                await self._engines.stop(engine, left)
                del self._unsearched[engine]

    def _keep(self, instance_id: InstanceId, sandbox: Sandbox) -> None:
        self.sandboxes[instance_id] = sandbox
        self.empty_since = None
        sandbox.on_end(functools.partial(self._note_end, instance_id, EndReason.LOST))

    def _note_end(self, instance_id: InstanceId, reason: EndReason, cause: str) -> None:
        life = self.lives.get(instance_id)
        if life is None or not life.end(reason, cause, self._clock.now()):
            return
        self.sandboxes.pop(instance_id, None)
        self._store.delete([instance_id])
        self.note_if_empty()
        while len(self.lives) - len(self.sandboxes) > REMEMBERED_ENDS:
            oldest = next(i for i, life in self.lives.items() if life.ended is not None)
            del self.lives[oldest]

    def note_if_empty(self) -> None:
        """Note since when nothing lives here."""
        if not self.sandboxes:
            self.empty_since = self._clock.now()

    async def end(self, ids: Sequence[InstanceId], reason: EndReason, cause: str) -> None:
        """End those that live; returns when they are gone."""
        by_engine: dict[str, list[InstanceId]] = {}
        for instance_id in ids:
            life = self.lives.get(instance_id)
            if life is not None and life.record.id in self.sandboxes:
                by_engine.setdefault(life.record.spec.engine, []).append(life.record.id)
                self._note_end(life.record.id, reason, cause)
        for name, group in by_engine.items():
            await self._engines.stop(name, group)

    async def end_due(self) -> None:
        """End what is due, and what could not be ended before."""
        now = self._clock.now()
        due: dict[EndReason, list[InstanceId]] = {}
        for instance_id in list(self.sandboxes):
            reason = self.lives[instance_id].due(now)
            if reason is not None:
                due.setdefault(reason, []).append(InstanceId(instance_id))
        for reason, ids in due.items():
            await self.end(ids, reason, reason.value)
        await self._engines.stop_owed()
        for name in list(self._unsearched):
            with contextlib.suppress(FabricUnavailable):  # told when it was first tried
                await self._end_left(name)
