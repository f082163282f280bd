"""Control routes of services: AEnvironment's ``/env-service``."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

from fastapi import Query
from starlette.responses import PlainTextResponse, Response

from aenv_ray import ids
from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.errors import (
    AenvError,
    ArtifactDamaged,
    CatalogConflict,
    EnvironmentNotFound,
    QuotaTooSmall,
    ServiceNotFound,
)
from aenv_ray.hub.services import Autoscale, ServiceRecord
from aenv_ray.models import InstanceInfo
from aenv_ray.project import project
from aenv_ray.serve.gateway.data.document import failures
from aenv_ray.serve.gateway.data.services import owned_service
from aenv_ray.serve.gateway.routes.control import RouteCall
from aenv_ray.serve.gateway.routes.routing import UserCall, control_router
from aenv_ray.serve.gateway.routes.schemas import LogsTail, NoQuery
from aenv_ray.serve.gateway.routes.service_schemas import (
    ServiceCreateRequest,
    ServiceDeletion,
    ServiceObject,
    ServiceUpdateRequest,
    service_object,
)
from aenv_ray.serve.services.service_replica import SERVICE_LABEL
from aenv_ray.serve.services.storage import StorageRequest

router = control_router("services")
_MISSING: Final = failures(ServiceNotFound)
_CONFLICTS: Final = (CatalogConflict, EnvironmentNotFound, ArtifactDamaged, QuotaTooSmall)


@router.post("/env-service", responses=failures(*_CONFLICTS))
async def create(call: UserCall, body: ServiceCreateRequest) -> ServiceObject:
    """Create a service; the answer comes while its status is still Creating."""
    await call.check_use(body.env_name)  # also refuses paths of this machine
    source = await call.control.deps.resolve(body.env_name)
    replicas = body.replicas
    if replicas is None:
        replicas = source.config.deploy.service.replicas
    record = await call.control.services.create(
        body.env_name,
        call.caller.acting_owner(body.owner),
        name=body.service_name or None,
        wait=False,
        replicas=replicas,
        autoscale=Autoscale.parse(body.autoscale) if body.autoscale else None,
        environment_variables=body.environment_variables or {},
        engine=body.engine or None,
        changes=body.changes(),
        storage=StorageRequest(
            is_wanted=body.enable_storage, size=body.storage_size or None,
            mount_path=body.mount_path or None, label=body.pvc_name or None,
        ),
    )  # fmt: skip
    return await _shown(call, record)


@router.get("/env-service/{reference}/list")
async def find(
    call: UserCall, reference: str, query: Annotated[NoQuery, Query()]
) -> list[ServiceObject]:
    """List the services of *, a name or name@version."""
    del query  # has no parameters; it refuses unknown ones
    name, version = (None, None) if reference == "*" else ids.split_reference(reference)
    found = [
        record
        for record in (await call.control.services.records.all()).values()
        if (call.caller.is_admin or record.owner == call.caller.owner)
        and (name is None or _is_of(record, name, version))
    ]
    found.sort(key=lambda record: record.created_at, reverse=True)
    return await _objects(call, found)


@router.get("/env-service/{id}", responses=_MISSING)
async def get(call: UserCall, id: str) -> ServiceObject:
    """Show a service."""
    record = await _owned(call, id)
    shown = await _shown(call, record)
    if shown.engine or not shown.available_replicas:
        return shown
    engines = {one.engine for one in await _sandboxes(call, record)}
    return shown.model_copy(update={"chosen_engine": ", ".join(sorted(engines))})


@router.put("/env-service/{id}", responses=failures(ServiceNotFound, *_CONFLICTS))
async def update(call: UserCall, id: str, body: ServiceUpdateRequest) -> ServiceObject:
    """Change a service; the answer comes while its replicas are still being replaced."""
    record = await _owned(call, id)
    if body.env_name is not None:
        await call.check_use(body.env_name)  # also refuses paths of this machine
    elif body.may_start(record) and not project.looks_like_path(record.reference):
        await call.check_use(record.reference)  # its owner's grant may have been revoked
    changes: dict[str, Any] = {}
    if body.replicas is not None:
        changes["replicas"] = body.replicas
    if body.autoscale is not None:
        changes["autoscale"] = Autoscale.parse(body.autoscale) if body.autoscale else None
    if body.engine is not None:
        changes["engine"] = body.engine or None
    changed = await call.control.services.update(
        record,
        wait=False,
        reference=body.env_name,
        environment_variables=body.environment_variables,
        changes=body.changes(),
        storage=StorageRequest(
            is_wanted=body.enable_storage, size=body.storage_size or None,
            mount_path=body.mount_path or None,
        ),
        **changes,
    )  # fmt: skip
    return await _shown(call, changed)


@router.delete("/env-service/{id}", responses=_MISSING)
async def delete(call: UserCall, id: str, query: Annotated[ServiceDeletion, Query()]) -> bool:
    """Delete a service; calls in progress are finished first."""
    record = await _owned(call, id)
    await call.control.services.delete(record, delete_storage=query.deleteStorage)
    return True


@router.get("/env-service/{id}/logs", response_class=PlainTextResponse, responses=_MISSING)
async def logs(call: UserCall, id: str, query: Annotated[LogsTail, Query()]) -> Response:
    """Show the output of a service's sandboxes, each line after its sandbox's id."""
    record = await _owned(call, id)
    mine = sorted(one.id for one in await _sandboxes(call, record))
    async with asyncio.TaskGroup() as group:
        reads = [group.create_task(_log(call, one, query.tail)) for one in mine]
    return PlainTextResponse("".join(read.result() for read in reads))


async def _sandboxes(call: RouteCall, record: ServiceRecord) -> list[InstanceInfo]:
    live = await call.control.deps.fabric.list_instances()
    # Sandboxes of a deleted service, whose name another owner has since taken, may still run.
    return [
        one
        for one in live
        if one.labels.get(SERVICE_LABEL) == record.id and one.owner == record.owner
    ]


async def _log(call: RouteCall, instance_id: str, tail: int | None) -> str:
    try:
        instance = AsyncEnvHandle(await call.control.deps.fabric.handle(instance_id))
        text = "".join([piece async for piece in instance.logs(tail, False)])
    except AenvError as exc:  # one sandbox that ends meanwhile must not hide the others
        text = exc.message
    return "".join(f"{instance_id}: {line}\n" for line in text.splitlines())


async def _owned(call: RouteCall, service_id: str) -> ServiceRecord:
    return owned_service(call.caller, service_id, await call.control.services.records.all())


async def _shown(call: RouteCall, record: ServiceRecord) -> ServiceObject:
    return (await _objects(call, [record]))[0]


async def _objects(call: RouteCall, records: list[ServiceRecord]) -> list[ServiceObject]:
    states = await call.control.services.states(records)
    return [
        service_object(
            record,
            state,
            call.service_url(record.id),
            await call.control.environments.find(record.reference),
        )
        for record, state in zip(records, states, strict=True)
    ]


def _is_of(record: ServiceRecord, name: str, version: str | None) -> bool:
    own_name, _, own_version = record.reference.partition("@")
    return own_name == name and version in (None, own_version)
