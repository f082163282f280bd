"""Control routes of environments: AEnvironment's EnvHub, and ours."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

from fastapi import Query
from starlette.responses import Response

from aenv_ray import ids
from aenv_ray.errors import (
    CatalogConflict,
    ConfigError,
    EnvironmentInUse,
    EnvironmentNotFound,
    Forbidden,
)
from aenv_ray.hub.api import Hub
from aenv_ray.hub.records import (
    EnvironmentQuery,
    EnvironmentStatus,
    EnvironmentVersion,
    FunctionSchema,
    Page,
)
from aenv_ray.project import project
from aenv_ray.serve.gateway.data.document import failures
from aenv_ray.serve.gateway.routes.control import Call, page_answer
from aenv_ray.serve.gateway.routes.routing import Envelope, OwnerCall, control_router
from aenv_ray.serve.gateway.routes.schemas import (
    EnvironmentFilter,
    EnvironmentObject,
    ExistsObject,
    StatusChange,
    StatusObject,
)

router = control_router("environments")
_VERSION: Final = "/env/{name}/{version}"
_MISSING: Final = failures(EnvironmentNotFound)
_SKIP_AT_ONCE: Final = 1000
"""Rows of an offset that are skipped with one request to the hub."""


@router.get("/env", response_model=Envelope[list[EnvironmentObject]])
@router.get("/env/", response_model=Envelope[list[EnvironmentObject]])
async def list_versions(call: OwnerCall, query: Annotated[EnvironmentFilter, Query()]) -> Response:
    """List environment versions."""
    wanted = EnvironmentQuery(
        name=query.name,
        tag=query.tag,
        text=query.text,
        status=None if query.status is None else status_of(query.status),
        latest_only=query.latest,
        limit=query.limit,
        cursor=query.cursor,
    )
    page = await _page_after(call.hub, wanted, query.offset)
    return page_answer(page, [EnvironmentObject.of(entry) for entry in page.items])


@router.get(f"{_VERSION}/exists")
async def exists(call: OwnerCall, name: str, version: str) -> ExistsObject:
    """Tell whether a version exists."""
    try:
        entry = await _find(call.hub, name, version)
    except EnvironmentNotFound:
        return ExistsObject(exists=False)
    return ExistsObject(exists=True, status=entry.status.number)


@router.get(f"{_VERSION}/status", responses=_MISSING)
async def status(call: OwnerCall, name: str, version: str) -> StatusObject:
    """Show the status of a version."""
    return StatusObject(status=(await _find(call.hub, name, version)).status.value)


@router.get(f"{_VERSION}/functions", responses=_MISSING)
async def functions(call: OwnerCall, name: str, version: str) -> tuple[FunctionSchema, ...]:
    """List what a version registers: tools, functions, rewards, health checks."""
    return (await _find(call.hub, name, version)).functions


@router.post(f"{_VERSION}/status", responses=failures(EnvironmentNotFound, CatalogConflict))
async def set_status(
    call: OwnerCall, name: str, version: str, body: StatusChange
) -> EnvironmentObject:
    """Change the status of a version."""
    hub = call.hub
    entry = await _find_own(call, name, version)
    changed = await hub.set_status(entry.name, entry.version, status_of(body.status))
    return EnvironmentObject.of(changed)


@router.post(f"{_VERSION}/release", responses=failures(EnvironmentNotFound, CatalogConflict))
async def release(call: OwnerCall, name: str, version: str) -> bool:
    """Release a version."""
    hub = call.hub
    entry = await _find_own(call, name, version)
    if entry.status is EnvironmentStatus.RELEASED:
        raise CatalogConflict(f"{entry.reference} is already released")
    await hub.set_status(entry.name, entry.version, EnvironmentStatus.RELEASED)
    return True


@router.get("/env/{name}/versions", responses=_MISSING)
async def all_versions(call: OwnerCall, name: str) -> list[EnvironmentObject]:
    """List all versions of a name, the highest first."""
    found = await call.hub.versions(ids.check_environment_name(name))
    if not found:
        raise EnvironmentNotFound(f"no environment {name!r} is published")
    return [EnvironmentObject.of(entry) for entry in found]


@router.get(_VERSION, responses=_MISSING)
async def get_version(call: OwnerCall, name: str, version: str) -> EnvironmentObject:
    """Show a version."""
    return EnvironmentObject.of(await _find(call.hub, name, version), is_whole=True)


@router.get("/env/{name}", responses=_MISSING)
async def get_latest(call: OwnerCall, name: str) -> EnvironmentObject:
    """Show the highest version of a name."""
    return EnvironmentObject.of(await _find(call.hub, name, None), is_whole=True)


@router.delete(_VERSION, responses=failures(EnvironmentNotFound, EnvironmentInUse))
async def delete(call: OwnerCall, name: str, version: str) -> bool:
    """Delete a version."""
    entry = await _find_own(call, name, version)
    await call.hub.delete_environment(entry.name, entry.version)
    return True


async def _page_after(hub: Hub, query: EnvironmentQuery, offset: int) -> Page[EnvironmentVersion]:
    """Return the page after the first `offset` rows."""
    while offset > 0:
        limit = min(offset, _SKIP_AT_ONCE)
        page = await hub.environments(query.model_copy(update={"limit": limit}))
        if page.cursor is None:
            return page.model_copy(update={"items": ()})
        offset -= limit
        query = query.model_copy(update={"cursor": page.cursor})
    return await hub.environments(query)


async def _find(hub: Hub, name: str, version: str | None) -> EnvironmentVersion:
    """Return a version; None: the highest.

    Raises:
        ConfigError: The name or the version is malformed.
        EnvironmentNotFound: It is not published; the error says so if it is built in.
    """
    ids.split_reference(name if version is None else f"{name}@{version}")
    try:
        return await hub.environment(name, version)
    except EnvironmentNotFound:
        if name not in project.builtins() or await hub.versions(name):
            raise
        if version is not None:  # raises the fitting error if this version is not built in
            await asyncio.to_thread(project.resolve, f"{name}@{version}")
        raise EnvironmentNotFound(
            f"{name} is built in, not published",
            hint="create instances by its name; GET /instances/{id} shows the environment",
        ) from None


async def _find_own(call: Call, name: str, version: str) -> EnvironmentVersion:
    """Return a version that the caller published; an administrator may change every version.

    Raises:
        Forbidden: Another owner published it.
        ConfigError, EnvironmentNotFound: As `_find`.
    """
    entry = await _find(call.hub, name, version)
    if not call.caller.is_admin and entry.owner != call.caller.owner:
        raise Forbidden(
            f"{entry.reference} was published by another owner",
            hint="use the token of its publisher or of an administrator",
        )
    return entry


def status_of(text: str) -> EnvironmentStatus:
    """Return a status by its name or by AEnvironment's number.

    Raises:
        ConfigError: The status does not exist.
    """
    for known in EnvironmentStatus:
        if text.lower() == known.value.lower() or text == str(known.number):
            return known
    raise ConfigError(
        f"unknown environment status {text!r}", hint=f"one of {', '.join(EnvironmentStatus)}"
    )
