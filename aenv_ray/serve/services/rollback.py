"""Rollback of an update that does not become healthy, for services with one sandbox at a time.

With a storage that has a single writer, the old sandbox ends before the new one starts, so nothing
old can continue to serve. The record of an update therefore holds the previous record until the new
sandbox is healthy; if it never is, the previous record is deployed again.
"""

from __future__ import annotations

import asyncio
import logging

from aenv_ray.background_tasks import end_task
from aenv_ray.clock import Clock
from aenv_ray.errors import AenvError, ServiceNotFound
from aenv_ray.hub.services import ServiceRecord, ServiceRecords, is_alone
from aenv_ray.serve.services.apps import Apps, ServiceStatus

logger = logging.getLogger(__name__)

POLL_S = 1.0


def with_previous(changed: ServiceRecord, before: ServiceRecord) -> ServiceRecord:
    """Return the record of an update, with the previous record if a rollback may be needed."""
    known = before.previous or before  # the last record that was healthy
    ends_old = is_alone(before) and is_alone(changed) and known.revision != changed.revision
    is_needed = ends_old and known.replicas > 0 and changed.replicas > 0
    previous = known.model_copy(update={"taken_back": ""}) if is_needed else None
    return changed.model_copy(update={"previous": previous, "taken_back": ""})


class Rollbacks:
    """Watches updates until they are healthy, and rolls back those that fail.

    Args:
        records: The records of all services.
        apps: The applications of all services.
        clock: For times in records.
    """

    def __init__(self, records: ServiceRecords, apps: Apps, clock: Clock) -> None:
        self._records = records
        self._apps = apps
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, record: ServiceRecord) -> None:
        """Watch an update in the background, until this process ends."""
        task = asyncio.create_task(self._watch(record))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop watching; the next process that starts continues."""
        for task in list(self._tasks):
            await end_task(task)

    async def settle(self, record: ServiceRecord) -> bool:
        """Check an update once, and complete it or roll it back.

        Returns:
            Whether the update needs no further checks.

        Raises:
            AenvError: The hub does not answer.
        """
        try:
            current = await self._records.get(record.id)
        except ServiceNotFound:
            return True
        if current.previous is None or current.revision != record.revision:
            return True  # done, or replaced by another update
        (state,) = await asyncio.to_thread(self._apps.states, [current])
        if state.status is ServiceStatus.RUNNING:
            return await self._records.replace(
                current, current.model_copy(update={"previous": None})
            )
        if state.status is ServiceStatus.FAILED and not state.available_replicas:
            return await self._roll_back(current, current.previous, state.reason)
        return False

    async def _roll_back(self, record: ServiceRecord, previous: ServiceRecord, reason: str) -> bool:
        """Deploy the previous record; False if the service was changed in the meantime."""
        why = f"the update to {record.reference} was rolled back: {reason}"
        logger.warning("service %s: %s", record.id, why)
        old = previous.model_copy(update={"updated_at": self._clock.now(), "taken_back": why})
        if not await self._records.replace(record, old):
            return False
        await asyncio.to_thread(self._apps.deploy, old, wait=False)
        return True

    async def _watch(self, record: ServiceRecord) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                if await self.settle(record):
                    return
            except (AenvError, RuntimeError) as exc:
                logger.warning("cannot check the update of service %s: %s", record.id, exc)
