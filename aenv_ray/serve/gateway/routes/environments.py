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
from aenv_ray.hub import catalog
from aenv_ray.hub.api import Hub
from aenv_ray.hub.records import (
    EnvironmentQuery,
    EnvironmentStatus,
    EnvironmentVersion,
    FunctionSchema,
    NameRecord,
    Page,
    Right,
)
from aenv_ray.project import project
from aenv_ray.serve.gateway.data.document import failures
from aenv_ray.serve.gateway.routes.control import RouteCall, page_answer
from aenv_ray.serve.gateway.routes.routing import Envelope, PublisherCall, UserCall, control_router
from aenv_ray.serve.gateway.routes.schemas import (
    EnvironmentFilter,
    EnvironmentObject,
    ExistsObject,
    GrantRequest,
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
async def list_versions(call: UserCall, query: Annotated[EnvironmentFilter, Query()]) -> Response:
    """List environment versions."""
    wanted = EnvironmentQuery(
        name=query.name,
        tag=query.tag,
        text=query.text,
        status=None if query.status is None else status_of(query.status),
        latest_only=query.latest,
        visible_to=call.visible_to,
        limit=query.limit,
        cursor=query.cursor,
    )
    page = await _page_after(call.hub, wanted, query.offset)
    return page_answer(page, [EnvironmentObject.of(entry) for entry in page.items])


@router.get(f"{_VERSION}/exists")
async def exists(call: UserCall, name: str, version: str) -> ExistsObject:
    """Tell whether a version exists."""
    try:
        entry = await _find(call, name, version)
    except EnvironmentNotFound:
        return ExistsObject(exists=False)
    return ExistsObject(exists=True, status=entry.status.number)


@router.get(f"{_VERSION}/status", responses=_MISSING)
async def status(call: UserCall, name: str, version: str) -> StatusObject:
    """Show the status of a version."""
    return StatusObject(status=(await _find(call, name, version)).status.value)


@router.get(f"{_VERSION}/functions", responses=_MISSING)
async def functions(call: UserCall, name: str, version: str) -> tuple[FunctionSchema, ...]:
    """List what a version registers: tools, functions, rewards, health checks."""
    return (await _find(call, name, version)).functions


@router.post(f"{_VERSION}/status", responses=failures(EnvironmentNotFound, CatalogConflict))
async def set_status(
    call: PublisherCall, name: str, version: str, body: StatusChange
) -> EnvironmentObject:
    """Change the status of a version."""
    call.note(status=body.status)
    hub = call.hub
    entry = await _find_own(call, name, version)
    changed = await hub.set_status(entry.name, entry.version, status_of(body.status))
    return EnvironmentObject.of(changed)


@router.post(f"{_VERSION}/release", responses=failures(EnvironmentNotFound, CatalogConflict))
async def release(call: PublisherCall, name: str, version: str) -> bool:
    """Release a version."""
    hub = call.hub
    entry = await _find_own(call, name, version)
    if entry.status is EnvironmentStatus.RELEASED:
        raise CatalogConflict(
            f"{entry.reference} is already released",
            hint="nothing is left to do; to change it, publish a new version",
        )
    await hub.set_status(entry.name, entry.version, EnvironmentStatus.RELEASED)
    return True


@router.get("/env/{name}/versions", responses=_MISSING)
async def all_versions(call: UserCall, name: str) -> list[EnvironmentObject]:
    """List all versions of a name, the highest first."""
    ids.check_environment_name(name)
    found = await call.hub.versions(name) if await call.may_use(name) else ()
    if not found:
        raise EnvironmentNotFound(
            f"no environment {name!r} is published", hint="list what is published: aenv list"
        )
    return [EnvironmentObject.of(entry) for entry in found]


@router.get(_VERSION, responses=_MISSING)
async def get_version(call: UserCall, name: str, version: str) -> EnvironmentObject:
    """Show a version."""
    return await _shown(call, await _find(call, name, version))


@router.get("/env/{name}", responses=_MISSING)
async def get_latest(call: UserCall, name: str) -> EnvironmentObject:
    """Show the highest version of a name."""
    return await _shown(call, await _find(call, name, None))


@router.delete(_VERSION, responses=failures(EnvironmentNotFound, EnvironmentInUse))
async def delete(call: PublisherCall, name: str, version: str) -> bool:
    """Delete a version."""
    entry = await _find_own(call, name, version)
    await call.hub.delete_environment(entry.name, entry.version)
    return True


async def _shown(call: RouteCall, entry: EnvironmentVersion) -> EnvironmentObject:
    """Return a version with its functions; its variables are for those who may change it."""
    is_private = call.caller.is_admin or call.caller.owner in await _owners(call, entry)
    return EnvironmentObject.of(entry, is_whole=True, is_private=is_private)


async def _owners(call: RouteCall, entry: EnvironmentVersion) -> set[str | None]:
    """Return who may change a version: its publisher and the owner of its name."""
    return {entry.owner, (await call.hub.name(entry.name)).owner}


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


async def _find(call: RouteCall, name: str, version: str | None) -> EnvironmentVersion:
    """Return a version that the caller may use; None: the highest.

    Raises:
        ConfigError: The name or the version is malformed.
        EnvironmentNotFound: It is not published, or belongs to another owner; the error says so if
            it is built in.
    """
    ids.split_reference(name if version is None else f"{name}@{version}")
    may_use = await call.may_use(name)
    try:
        if not may_use:
            raise catalog.unpublished(name)
        return await call.hub.environment(name, version)
    except EnvironmentNotFound:
        if name not in project.builtins() or (may_use and await call.hub.versions(name)):
            raise
        if version is not None:  # raises the fitting error if this version is not built in
            await asyncio.to_thread(project.resolve, f"{name}@{version}")
        raise EnvironmentNotFound(
            f"{name} is built in, not published",
            hint="create instances by its name; GET /instances/{id} shows the environment",
        ) from None


async def _find_own(call: RouteCall, name: str, version: str) -> EnvironmentVersion:
    """Return a version that the caller may change: its publisher, its name's owner, or an admin.

    Raises:
        Forbidden: The caller is none of them.
        ConfigError, EnvironmentNotFound: As `_find`.
    """
    entry = await _find(call, name, version)
    if not call.caller.is_admin and call.caller.owner not in await _owners(call, entry):
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


# --- names and grants ----------------------------------------------------------------------------


@router.get("/names/{name}", responses=_MISSING)
async def show_name(call: UserCall, name: str) -> NameRecord:
    """Show the owner and the grants of a name."""
    return await _own_name(call, name)


@router.put(
    "/names/{name}/grants/{owner:path}", responses=failures(EnvironmentNotFound, CatalogConflict)
)
async def grant(call: PublisherCall, name: str, owner: str, body: GrantRequest) -> NameRecord:
    """Let another owner, or * for everybody, use a name or publish under it."""
    return await _set_grant(call, name, owner, body.right)


@router.delete("/names/{name}/grants/{owner:path}", responses=_MISSING)
async def revoke(call: PublisherCall, name: str, owner: str) -> NameRecord:
    """Revoke a grant."""
    return await _set_grant(call, name, owner, None)


async def _set_grant(call: RouteCall, name: str, owner: str, right: Right | None) -> NameRecord:
    call.note(owner=owner, right=right or "none")
    await _own_name(call, name)
    catalog.check_may_grant(name, right, is_admin=call.caller.is_admin)
    await call.hub.grant(name, owner, right)
    call.control.environments.forget(name)
    return await call.hub.name(name)


async def _own_name(call: RouteCall, name: str) -> NameRecord:
    """Return the record of a name that belongs to the caller, or to anybody for an admin.

    Raises:
        EnvironmentNotFound: It belongs to nobody, or the caller may not even use it.
        Forbidden: It belongs to another owner.
    """
    record = await call.hub.name(name)
    if record.owner is None or not await call.may_use(name):
        raise catalog.unpublished(name)
    if not call.caller.is_admin and record.owner != call.caller.owner:
        raise Forbidden(
            f"the name {name!r} belongs to another owner",
            hint="use a token of its owner or of an administrator",
        )
    return record
