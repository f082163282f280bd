"""Control routes of environments: AEnvironment's EnvHub, and ours."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from starlette.responses import Response

from aenv_ray import ids
from aenv_ray.errors import (
    CatalogConflict,
    ConfigError,
    EnvironmentInUse,
    EnvironmentNotFound,
    Forbidden,
)
from aenv_ray.hub.records import (
    EnvironmentQuery,
    EnvironmentStatus,
    EnvironmentVersion,
    FunctionSchema,
    Page,
)
from aenv_ray.project import project
from aenv_ray.serve.gateway.deps import Principal
from aenv_ray.serve.gateway.envelope import success
from aenv_ray.serve.gateway.routes.control import Control
from aenv_ray.serve.gateway.routes.endpoint import Asked, Endpoint
from aenv_ray.serve.gateway.routes.shapes import (
    EnvironmentFilter,
    EnvironmentObject,
    ExistsObject,
    StatusChange,
    StatusObject,
)

TAG: Final = "environments"
_NONE: Final = (EnvironmentNotFound,)
_SKIPPED_AT_ONCE: Final = 1000


def endpoints(control: Control) -> list[Endpoint]:
    """Return the routes."""
    routes = EnvironmentRoutes(control)
    one = "/env/{name}/{version}"
    return [
        *(
            Endpoint("GET", path, routes.page, "List versions", TAG, query=EnvironmentFilter,
                     data=list[EnvironmentObject])
            for path in ("/env/", "/env")
        ),
        Endpoint("GET", f"{one}/exists", routes.exists, "Whether a version is there", TAG,
                 data=ExistsObject),
        Endpoint("GET", f"{one}/status", routes.status, "A version's status", TAG,
                 data=StatusObject, errors=_NONE),
        Endpoint("GET", f"{one}/functions", routes.functions, "What a version registers", TAG,
                 data=list[FunctionSchema], errors=_NONE),
        Endpoint("POST", f"{one}/status", routes.set_status, "Move a version to a status", TAG,
                 body=StatusChange, data=EnvironmentObject, errors=(*_NONE, CatalogConflict)),
        Endpoint("POST", f"{one}/release", routes.release, "Release a version", TAG, data=bool,
                 errors=(*_NONE, CatalogConflict)),
        Endpoint("GET", "/env/{name}/versions", routes.versions, "All versions of a name, the "
                 "highest first", TAG, data=list[EnvironmentObject], errors=_NONE),
        Endpoint("GET", one, routes.get, "Show a version", TAG, data=EnvironmentObject,
                 errors=_NONE),
        Endpoint("GET", "/env/{name}", routes.get, "Show the highest version", TAG,
                 data=EnvironmentObject, errors=_NONE),
        Endpoint("DELETE", one, routes.delete, "Delete a version", TAG, data=bool,
                 errors=(*_NONE, EnvironmentInUse)),
    ]  # fmt: skip


class EnvironmentRoutes:
    """The handlers."""

    def __init__(self, control: Control) -> None:
        self._hub = control.deps.hub

    async def page(self, asked: Asked[EnvironmentFilter, None]) -> Response:
        """List a page."""
        query = asked.query
        wanted = EnvironmentQuery(
            name=query.name,
            tag=query.tag,
            text=query.text,
            status=None if query.status is None else status_of(query.status),
            latest_only=query.latest,
            limit=query.limit,
            cursor=query.cursor,
        )
        page = await self._after(wanted, query.offset)
        headers = {"X-Total-Count": str(page.total)}
        if page.cursor is not None:
            headers["X-Next-Cursor"] = page.cursor
        return success([EnvironmentObject.of(entry) for entry in page.items], headers=headers)

    async def _after(self, query: EnvironmentQuery, offset: int) -> Page[EnvironmentVersion]:
        """Return the page after the first `offset` rows."""
        while offset > 0:
            limit = min(offset, _SKIPPED_AT_ONCE)
            page = await self._hub.environments(query.model_copy(update={"limit": limit}))
            if page.cursor is None:
                return page.model_copy(update={"items": ()})
            offset -= limit
            query = query.model_copy(update={"cursor": page.cursor})
        return await self._hub.environments(query)

    async def exists(self, asked: Asked[Any, None]) -> ExistsObject:
        """Tell whether it is there."""
        try:
            entry = await self._entry(asked)
        except EnvironmentNotFound:
            return ExistsObject(exists=False)
        return ExistsObject(exists=True, status=entry.status.number)

    async def status(self, asked: Asked[Any, None]) -> StatusObject:
        """Tell its status."""
        return StatusObject(status=(await self._entry(asked)).status.value)

    async def functions(self, asked: Asked[Any, None]) -> tuple[FunctionSchema, ...]:
        """Tell what it registers."""
        return (await self._entry(asked)).functions

    async def versions(self, asked: Asked[Any, None]) -> list[EnvironmentObject]:
        """Tell all versions."""
        name = ids.check_environment_name(asked.path["name"])
        found = await self._hub.versions(name)
        if not found:
            raise EnvironmentNotFound(f"nobody published an environment {name!r}")
        return [EnvironmentObject.of(entry) for entry in found]

    async def get(self, asked: Asked[Any, None]) -> EnvironmentObject:
        """Show one."""
        return EnvironmentObject.of(await self._entry(asked), is_whole=True)

    async def set_status(self, asked: Asked[Any, StatusChange]) -> EnvironmentObject:
        """Move one to a status."""
        entry = await self._own(asked)
        status = status_of(asked.body.status)
        return EnvironmentObject.of(await self._hub.set_status(entry.name, entry.version, status))

    async def release(self, asked: Asked[Any, None]) -> bool:
        """Release one."""
        entry = await self._own(asked)
        if entry.status is EnvironmentStatus.RELEASED:
            raise CatalogConflict(f"{entry.reference} is released already")
        await self._hub.set_status(entry.name, entry.version, EnvironmentStatus.RELEASED)
        return True

    async def delete(self, asked: Asked[Any, None]) -> bool:
        """Delete one."""
        entry = await self._own(asked)
        await self._hub.delete_environment(entry.name, entry.version)
        return True

    async def _entry(self, asked: Asked[Any, Any]) -> EnvironmentVersion:
        name, version = asked.path["name"], asked.path.get("version")
        ids.split_reference(name if version is None else f"{name}@{version}")
        try:
            return await self._hub.environment(name, version)
        except EnvironmentNotFound:
            if name not in project.builtins() or await self._hub.versions(name):
                raise
            if version is not None:  # one that is not built in either is told as that
                await asyncio.to_thread(project.resolve, f"{name}@{version}")
            raise EnvironmentNotFound(
                f"{name} is built in, and nobody published it",
                hint="instances are made of it by its name; GET /instances/{id} of one shows it",
            ) from None

    async def _own(self, asked: Asked[Any, Any]) -> EnvironmentVersion:
        entry = await self._entry(asked)
        check_publisher(asked.principal, entry)
        return entry


def check_publisher(principal: Principal, entry: EnvironmentVersion) -> None:
    """Refuse who did not push a version.

    Raises:
        Forbidden: Another owner did.
    """
    if not principal.is_admin and entry.owner != principal.owner:
        raise Forbidden(f"{entry.reference} was published by another owner")


def status_of(text: str) -> EnvironmentStatus:
    """Return a status by its name or AEnvironment's number.

    Raises:
        ConfigError: There is no such status.
    """
    for status in EnvironmentStatus:
        if text.lower() == status.value.lower() or text == str(status.number):
            return status
    raise ConfigError(f"there is no status {text!r}", hint=f"one of {', '.join(EnvironmentStatus)}")
