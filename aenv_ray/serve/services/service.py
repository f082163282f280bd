"""Create, update and delete services, for the gateway and for Python code (`python_api`).

The hub stores the desired state of each service; Serve brings the application to that state.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

from pydantic import ValidationError

from aenv_ray import ids
from aenv_ray.actors.fabric.engine_choice import (
    WITH_CONTAINERS,
    likely_engine,
    possible_engines,
)
from aenv_ray.background_tasks import end_task, shielded
from aenv_ray.clock import Clock
from aenv_ray.errors import (
    AenvError,
    CatalogConflict,
    ConfigError,
    FabricUnavailable,
    ServiceNotFound,
)
from aenv_ray.hub.api import Hub
from aenv_ray.hub.services import (
    ServiceRecord,
    ServiceRecords,
    check_name,
    check_room,
    is_alone,
    not_found,
)
from aenv_ray.hub.storages import StorageRecord
from aenv_ray.policy import Policy
from aenv_ray.project import process_strings, project
from aenv_ray.project.config import DeployChanges
from aenv_ray.project.project import Project
from aenv_ray.serve.services.apps import Apps, ServiceState, ServiceStatus
from aenv_ray.serve.services.storage import DeleteData, StorageRequest, Storages, check_writers
from aenv_ray.validation import problems_of

logger = logging.getLogger(__name__)

_MASK: Final = "***"
_SUFFIX_BYTES: Final = 3
_ROLLBACK_POLL_S: Final = 1.0

Resolve = Callable[[str], Awaitable[Project]]
CheckEngines = Callable[[Sequence[str]], Awaitable[None]]
"""Raises FabricUnavailable if no node can run one of these engines, and none that can may join."""


class Services:
    """The services of one cluster.

    Args:
        hub: Stores the records.
        resolve: Finds projects by reference.
        clock: Clock for times in records.
        apps: The applications of services.
        delete_data: Deletes the data of a storage volume.
        check_engines: Asks the cluster.
        policy: Returns what environments may request.
    """

    def __init__(
        self,
        hub: Hub,
        resolve: Resolve,
        clock: Clock,
        apps: Apps,
        delete_data: DeleteData,
        check_engines: CheckEngines,
        policy: Callable[[], Policy] = Policy,
    ) -> None:
        self._hub = hub
        self._policy = policy
        self._check_engines = check_engines
        self._storages = Storages(hub, clock, delete_data)
        self.records = ServiceRecords(hub)
        self._apps = _CheckedApps(self.records, apps)
        self._rollbacks = _Rollbacks(self.records, self._apps, clock)
        self._deletions: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._resolve = resolve
        self._clock = clock

    async def create(
        self,
        reference: str,
        owner: str,
        *,
        name: str | None = None,
        wait: bool,
        storage: StorageRequest,
        **options: Any,
    ) -> ServiceRecord:
        """Create a service.

        Args:
            reference: The service's environment.
            owner: The service's owner.
            name: None makes one up from the environment's name.
            wait: Return once all replicas are healthy, instead of immediately.
            storage: The requested storage; one with this service name and owner is reused.
            options: Other fields of `ServiceRecord`; ``changes`` as a mapping, "" for none.

        Raises:
            CatalogConflict: A service has this name, the storage is being deleted, or the owner has
                as many services as it may.
            PolicyRefused, QuotaTooSmall: Its owner's services may not have that many replicas.
            ConfigError: The name or an option is invalid.
            EnvironmentNotFound: The environment does not exist.
            FabricUnavailable: No node can run its sandboxes. Or, with `wait`, the service did not
                become healthy; it exists anyway.
        """
        if name is not None:
            check_name(name)
        source = await self._resolve(reference)
        now = self._clock.now()
        record = _checked(
            source, self._policy(),
            id=name or _made_up(source.config.name), uid=secrets.token_hex(8),
            reference=_reference(reference, source), digest=source.digest, owner=owner,
            created_at=now, updated_at=now, **_with_changes(options, DeployChanges()),
        )  # fmt: skip
        await self._check_room(record, None)
        await self._check_engines(self._engines_of(record, source))
        kept = None
        if storage.wants(source.config.deploy.service):
            kept, record = await self._with_new(record, storage, source)
        await self.records.add(record)
        try:
            await self._check_room(record, None)  # with what was added concurrently
            if kept is not None:
                await self._storages.keep(kept)
        except AenvError:
            await self.records.delete(record)
            raise
        await self._bring_up(record, wait=wait)
        return record

    async def update(
        self,
        record: ServiceRecord,
        *,
        wait: bool,
        storage: StorageRequest,
        reference: str | None = None,
        **changes: Any,
    ) -> ServiceRecord:
        """Update a service. Sandboxes that change are replaced: new ones are healthy first.

        With a single-writer storage the old sandbox ends first; the update is rolled back if the
        new one does not become healthy.

        Args:
            record: The current record.
            wait: As for `create`.
            storage: A storage volume for a service without one, or a larger size.
            reference: Another version, or None.
            changes: Other fields of `ServiceRecord`. Variables are added to the current ones, and
                unnamed fields of ``changes`` keep their values.

        Raises:
            ConfigError: The reference names another environment, or an option is invalid.
            PolicyRefused, QuotaTooSmall: As for `create`.
            CatalogConflict: The service, or its storage, is being deleted.
            EnvironmentNotFound: The version does not exist.
            FabricUnavailable: As for `create`; replicas that were healthy keep running.
            ServiceNotFound: The service was deleted in the meantime.
        """
        while True:
            changed = await self._changed(record, reference, storage, changes)
            if await self.records.replace(record, changed):
                try:
                    await self._check_room(changed, record)  # with concurrent changes of others
                except AenvError:
                    await self.records.replace(changed, record)
                    raise
                break
            record = await self._reread(record)  # changed concurrently
        await self._bring_up(changed, wait=wait)
        return changed

    async def _changed(
        self,
        record: ServiceRecord,
        reference: str | None,
        storage: StorageRequest,
        changes: Mapping[str, Any],
    ) -> ServiceRecord:
        if record.is_leaving:
            raise CatalogConflict(
                f"service {record.id} is being deleted",
                hint="create it again once aenv service list no longer shows it",
            )
        source = await self._resolve(reference or record.reference)
        old, new = _environment(record), source.config.name
        if reference is not None and old not in (None, new):
            raise ConfigError(
                f"service {record.id} belongs to environment {old!r}, not {new!r}",
                hint="create another service for that environment",
            )
        variables = changes.get("environment_variables") or {}
        found: dict[str, Any] = record.model_dump() | {
            "updated_at": self._clock.now(),
            **_with_changes(changes, record.changes),
            "environment_variables": {**record.environment_variables, **variables},
        }
        if reference is not None:
            found |= {"reference": _reference(reference, source), "digest": source.digest}
        changed = _checked(source, self._policy(), **found)
        await self._check_room(changed, record)
        if _needs(changed) != _needs(record):
            await self._check_engines(self._engines_of(changed, source))
        kept = None
        if changed.storage is not None:
            engine = await _engine_of(changed, source, self._policy())
            kept, mount = await self._storages.of_changed(changed.storage, storage, engine)
            changed = changed.model_copy(update={"storage": mount})
            check_writers(changed)
        elif storage.wants(source.config.deploy.service):
            kept, changed = await self._with_new(changed, storage, source)
        if kept is not None:
            await self._storages.keep(kept)
        return _with_previous(changed, record)

    async def _check_room(self, record: ServiceRecord, before: ServiceRecord | None) -> None:
        """Refuse a service for which its owner has no room; see `check_room`."""
        known = (await self.records.all()).values()
        others = [one for one in known if one.owner == record.owner and one.id != record.id]
        _, quota = (await self._hub.quotas()).get(f"owner:{record.owner}", (0, None))
        check_room(record, before, others, quota, self._policy())

    def _engines_of(self, record: ServiceRecord, source: Project) -> list[str]:
        """Return the engines that the sandboxes of a service may run on."""
        policy = self._policy()
        return list(possible_engines(source, policy, record.engine, record.changes).names)

    async def _reread(self, record: ServiceRecord) -> ServiceRecord:
        """Return the current record of a service.

        Raises:
            ServiceNotFound: It was deleted, even if another service has its name.
        """
        current = await self.records.get(record.id)
        if current.uid != record.uid:
            raise not_found(record.id)
        return current

    async def _with_new(
        self, record: ServiceRecord, request: StorageRequest, source: Project
    ) -> tuple[StorageRecord, ServiceRecord]:
        """Return a storage volume for a service without one, and the service with that storage."""
        engine = await _engine_of(record, source, self._policy())
        kept, mount = await self._storages.of_new(
            request, source.config.deploy.service, record.id, record.owner, engine
        )
        # Its replicas stay on the engine that has its storage, whatever engines join later.
        record = record.model_copy(update={"storage": mount, "engine": engine})
        check_writers(record)
        return kept, record

    async def delete(
        self, record: ServiceRecord, *, wait: bool = False, delete_storage: bool = False
    ) -> None:
        """End a service: first its running calls, then its sandboxes, then its storage.

        Args:
            record: The service.
            wait: Return once all of it is gone, instead of immediately.
            delete_storage: Delete its storage. Otherwise it remains for a service with this name
                and owner.

        Raises:
            FabricUnavailable: `wait`, and its storage could not be deleted yet.
            ServiceNotFound: It was deleted concurrently.
        """
        leaving = None
        # One after another: the first one frees the name, of which the others must not delete
        # the application.
        async with self._deletions.setdefault(record.uid, asyncio.Lock()):
            record = await self._reread(record)
            if delete_storage and record.storage is not None:
                leaving = await self._storages.leave(record.storage)
            while not record.is_leaving:
                marked = record.model_copy(update={"is_leaving": True, "previous": None})
                is_kept = await self.records.replace(record, marked)
                record = marked if is_kept else await self._reread(record)
            await self._apps.delete(record, wait=wait)
            await self.records.delete(record)
        if leaving is not None and wait:
            await self._storages.finish(leaving)
        elif leaving is not None:
            self._storages.finish_soon(leaving)

    async def close(self) -> None:
        """Stop background work; the next process that starts continues it."""
        await self._rollbacks.close()
        await self._storages.close()

    async def restore(self) -> None:
        """Deploy the services that the hub knows and Serve does not, as after a restart of Ray.

        Also continues rollbacks and deletions that another process began. Services that cannot be
        deployed are logged, and their state says so.
        """
        records = list((await self.records.all()).values())
        for record, state in zip(records, await self.states(records), strict=True):
            if record.previous is not None:
                self._rollbacks.watch(record)
            try:
                if record.is_leaving:  # the process that began to delete it may have died
                    await self.delete(record)
                elif state.status is ServiceStatus.TERMINATED:
                    await self._bring_up(await self._reread(record), wait=False)
            except ServiceNotFound:
                continue  # deleted meanwhile
            except AenvError as exc:
                logger.warning("service %s is not restored: %s", record.id, exc.message)
        await self._storages.finish_left()

    async def states(self, records: list[ServiceRecord]) -> list[ServiceState]:
        """Return the state of each service."""
        states = await self._apps.states(records)
        return [
            state.model_copy(update={"reason": state.reason or record.taken_back})
            for state, record in zip(states, records, strict=True)
        ]

    async def _bring_up(self, record: ServiceRecord, *, wait: bool) -> None:
        try:
            await self._apps.deploy(record, wait=wait)
        except RuntimeError as exc:
            reason = (await self.states([record]))[0].reason or str(exc)
            await self._watch_update(record, at_once=True)
            raise FabricUnavailable(
                f"service {record.id} did not become healthy: {_last_line(reason)}",
                hint=f"aenv service get {record.id} shows its state; old replicas keep running",
            ) from exc
        await self._watch_update(record, at_once=wait)

    async def _watch_update(self, record: ServiceRecord, *, at_once: bool) -> None:
        if record.previous is None or (at_once and await self._rollbacks.settle(record)):
            return
        self._rollbacks.watch(record)


class _CheckedApps:
    """The applications of services, which several processes change at the same time.

    Serve knows an application only by the name of its service. After each change, the process that
    made it therefore reads the stored record, and repeats the change until Serve has what the
    record asks for. Meanwhile the record may have changed, be gone, or belong to another service of
    that name, whose change may have come before this one.

    A caller that is cancelled waits for the change, so that it can still look.

    Args:
        records: The records of all services.
        apps: The applications of all services.
    """

    def __init__(self, records: ServiceRecords, apps: Apps) -> None:
        self._records = records
        self._apps = apps

    async def deploy(self, record: ServiceRecord, *, wait: bool) -> None:
        """See `Apps.deploy`.

        Raises:
            RuntimeError: `wait`, and the replicas do not become healthy.
            AenvError: The hub does not answer.
        """
        try:
            await shielded(asyncio.to_thread(self._apps.deploy, record, wait=wait))
        finally:
            await self._follow(record.id, record)

    async def delete(self, record: ServiceRecord, *, wait: bool) -> None:
        """See `Apps.delete`.

        Raises:
            DeadlineExceeded: `wait`, and the replicas do not end.
            AenvError: The hub does not answer.
        """
        try:
            await shielded(asyncio.to_thread(self._apps.delete, record.id, wait=wait))
        finally:
            await self._follow(record.id, None)

    async def states(self, records: Sequence[ServiceRecord]) -> list[ServiceState]:
        """See `Apps.states`."""
        return await asyncio.to_thread(self._apps.states, records)

    async def _follow(self, service_id: str, deployed: ServiceRecord | None) -> None:
        """Deploy or delete until the stored record is what was deployed; None: nothing was."""
        while True:
            current = (await self._records.all()).get(service_id)
            if current is not None and current.is_leaving:
                current = None
            if _deployed_state(current) == _deployed_state(deployed):
                return
            if current is None:
                await asyncio.to_thread(self._apps.delete, service_id, wait=False)
            else:
                await asyncio.to_thread(self._apps.deploy, current, wait=False)
            deployed = current


# --- rollback of updates ----------------------------------------------------------------------
#
# With a storage volume that has a single writer, the old sandbox ends before the new one starts, so
# nothing old can continue to serve. The record of an update therefore holds the previous record
# until the new sandbox is healthy; if it never is, the previous record is deployed again.


def _with_previous(changed: ServiceRecord, before: ServiceRecord) -> ServiceRecord:
    """Return the record of an update, with the previous record if a rollback may be needed."""
    known = before.previous or before  # the last record that was healthy
    ends_old = is_alone(before) and is_alone(changed) and known.revision != changed.revision
    is_needed = ends_old and known.replicas > 0 and changed.replicas > 0
    previous = known.model_copy(update={"taken_back": ""}) if is_needed else None
    return changed.model_copy(update={"previous": previous, "taken_back": ""})


class _Rollbacks:
    """Watches updates until they are healthy, and rolls back those that fail.

    Args:
        records: The records of all services.
        apps: The applications of all services.
        clock: Clock for times in records.
    """

    def __init__(self, records: ServiceRecords, apps: _CheckedApps, clock: Clock) -> None:
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
        (state,) = await self._apps.states([current])
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
        await self._apps.deploy(old, wait=False)
        return True

    async def _watch(self, record: ServiceRecord) -> None:
        while True:
            await asyncio.sleep(_ROLLBACK_POLL_S)
            try:
                if await self.settle(record):
                    return
            except (AenvError, RuntimeError) as exc:
                logger.warning("cannot check the update of service %s: %s", record.id, exc)


# --- records --------------------------------------------------------------------------------------


def _needs(record: ServiceRecord) -> tuple[Any, ...]:
    """Return what decides on which engines the sandboxes of a service can run."""
    return record.digest, record.engine, record.changes


def _deployed_state(record: ServiceRecord | None) -> tuple[Any, ...] | None:
    """Return what an application depends on; None if there is none to be."""
    if record is None:
        return None
    return record.revision, record.replicas, record.autoscale, record.healthy_within_s


def masked_variables(record: ServiceRecord) -> dict[str, str]:
    """Return the variables of a service with masked values, which are secrets."""
    return dict.fromkeys(record.environment_variables, _MASK)


async def _engine_of(record: ServiceRecord, source: Project, policy: Policy) -> str:
    return await asyncio.to_thread(likely_engine, source, policy, record.engine, record.changes)


def _checked(source: Project, policy: Policy, **fields: Any) -> ServiceRecord:
    """Return a validated record.

    Raises:
        ConfigError: A field has an invalid value, or the policy does not allow it.
    """
    try:
        record = ServiceRecord.model_validate(fields)
    except ValidationError as exc:
        raise ConfigError(problems_of(exc), hint="correct these fields") from None
    process_strings.checked_variables(record.environment_variables, what="environment_variables")
    engine = possible_engines(source, policy, record.engine, record.changes).names[0]
    policy.check(record.changes.made_to(source.config), engine)
    if record.changes.image and engine not in WITH_CONTAINERS:
        raise ConfigError(
            f"service {record.id} cannot use image {record.changes.image!r}: engine {engine} "
            "runs no containers",
            hint="use engine docker or kubernetes, or publish a new version of the environment",
        )
    return record


def _with_changes(fields: Mapping[str, Any], before: DeployChanges) -> dict[str, Any]:
    """Return fields of a record, with the given ``changes`` merged into the previous ones."""
    given = fields.get("changes") or {}
    merged = before.model_dump() | given
    return {**fields, "changes": {name: value or None for name, value in merged.items()}}


def _made_up(environment: str) -> str:
    """Return a new service name."""
    stem = re.sub(r"[^a-z0-9-]+", "-", environment.lower()).strip("-")[:40]
    return check_name(f"{stem or 'env'}-svc-{secrets.token_hex(_SUFFIX_BYTES)}")


def _reference(reference: str, source: Project) -> str:
    if project.looks_like_path(reference):
        return str(Path(reference).resolve())
    return source.reference


def _environment(record: ServiceRecord) -> str | None:
    """Return the environment's name; None if a path was deployed."""
    if project.looks_like_path(record.reference):
        return None
    return ids.split_reference(record.reference)[0]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "Serve gives no reason"
