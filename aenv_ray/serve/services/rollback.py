"""Taking back an update of a service that has one sandbox at a time, when it does not get healthy.

Where a storage has one writer, the old sandbox ends before a new one can start: there is nothing
left that could go on serving. So the record of what was there before stays with the new one until
that is healthy, and is deployed again when it never becomes so.
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

LOOK_S = 1.0


def with_return(changed: ServiceRecord, before: ServiceRecord) -> ServiceRecord:
    """Return the record of an update, with what it goes back to where it may have to."""
    known = before.previous or before  # the last one that was healthy
    ends_old = is_alone(before) and is_alone(changed) and known.revision != changed.revision
    is_needed = ends_old and known.replicas > 0 and changed.replicas > 0
    previous = known.model_copy(update={"taken_back": ""}) if is_needed else None
    return changed.model_copy(update={"previous": previous, "taken_back": ""})


class Returns:
    """Sees updates through.

    Args:
        records: Of all services.
        apps: Run them.
        clock: For times.
    """

    def __init__(self, records: ServiceRecords, apps: Apps, clock: Clock) -> None:
        self._records = records
        self._apps = apps
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, record: ServiceRecord) -> None:
        """See an update through in the background, for as long as this process lives."""
        task = asyncio.create_task(self._watch(record))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop watching; whoever starts next goes on."""
        for task in list(self._tasks):
            await end_task(task)

    async def settle(self, record: ServiceRecord) -> bool:
        """Look at an update once; True when it needs no more looking at.

        Raises:
            AenvError: The hub does not answer.
        """
        try:
            current = await self._records.get(record.id)
        except ServiceNotFound:
            return True
        if current.previous is None or current.revision != record.revision:
            return True  # done, or another update came
        (state,) = await asyncio.to_thread(self._apps.states, [current])
        if state.status is ServiceStatus.RUNNING:
            return await self._records.replace(
                current, current.model_copy(update={"previous": None})
            )
        if state.status is ServiceStatus.FAILED and not state.available_replicas:
            return await self._take_back(current, current.previous, state.reason)
        return False

    async def _take_back(self, record: ServiceRecord, previous: ServiceRecord, reason: str) -> bool:
        """Go back; False when somebody changed the service meanwhile."""
        told = f"the update to {record.reference} was taken back: {reason}"
        logger.warning("service %s: %s", record.id, told)
        old = previous.model_copy(update={"updated_at": self._clock.now(), "taken_back": told})
        if not await self._records.replace(record, old):
            return False
        await asyncio.to_thread(self._apps.deploy, old, wait=False)
        return True

    async def _watch(self, record: ServiceRecord) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                if await self.settle(record):
                    return
            except (AenvError, RuntimeError) as exc:
                logger.warning("how the update of %s went is not known: %s", record.id, exc)
