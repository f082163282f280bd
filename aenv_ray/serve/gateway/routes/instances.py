"""Control routes of instances: AEnvironment's ``/env-instance``, and ours."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import re
from typing import Any, Final, Literal

from starlette.requests import Request
from starlette.responses import Response

from aenv_ray import ids
from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.actors.fabric.create_protocol import CREATE_DEADLINE_S
from aenv_ray.errors import (
    ArtifactDamaged,
    CapacityExceeded,
    CatalogConflict,
    ConfigError,
    DeadlineExceeded,
    EnvironmentNotFound,
    Forbidden,
    InstanceExpired,
    InstanceNotFound,
    InstanceReleased,
    SandboxLost,
    SandboxStartFailed,
    ToolTimeout,
)
from aenv_ray.hub.records import Lease, LeaseQuery, Role
from aenv_ray.models import ExecResult, InstanceStatus
from aenv_ray.serve.gateway.creation import Wish
from aenv_ray.serve.gateway.deps import Principal
from aenv_ray.serve.gateway.envelope import success
from aenv_ray.serve.gateway.http import unless_left
from aenv_ray.serve.gateway.routes.control import Control
from aenv_ray.serve.gateway.routes.endpoint import Asked, Endpoint
from aenv_ray.serve.gateway.routes.shapes import (
    AgentTokenRequest,
    CreateManyRequest,
    CreateRequest,
    ExecObject,
    ExecRequest,
    InstanceFilter,
    InstanceObject,
    ReferenceFilter,
    RenewRequest,
    TokenObject,
    Waiting,
)
from aenv_ray.units import parse_duration_s

TAG: Final = "instances"
IDEMPOTENCY_KEY: Final = "Idempotency-Key"
_KEY = re.compile(r"[\x21-\x7e]{1,200}")
_LOOK_S: Final = 0.25
"""How often a long poll looks."""
_GONE: Final = (InstanceNotFound, InstanceExpired, InstanceReleased, SandboxLost)
_CREATE: Final = (
    EnvironmentNotFound,
    CatalogConflict,
    ArtifactDamaged,
    SandboxStartFailed,
    CapacityExceeded,
    InstanceReleased,
    DeadlineExceeded,
)


def endpoints(control: Control) -> list[Endpoint]:
    """Return the routes."""
    routes = InstanceRoutes(control)
    key = {IDEMPOTENCY_KEY: "Repeat a create with the same key: it gives the same instances."}
    return [
        Endpoint("POST", "/env-instance", routes.create_one, "Make an instance (AEnvironment)",
                 TAG, body=CreateRequest, data=InstanceObject, errors=_CREATE, headers=key),
        Endpoint("GET", "/env-instance/{reference}/list", routes.list_by_reference, "List "
                 "instances of *, a name or name@version (AEnvironment)", TAG,
                 query=ReferenceFilter, data=list[InstanceObject]),
        Endpoint("GET", "/env-instance/{id}", routes.get, "Show an instance (AEnvironment)", TAG,
                 query=Waiting, data=InstanceObject, errors=(InstanceNotFound,)),
        Endpoint("DELETE", "/env-instance/{id}", routes.delete, "End an instance (AEnvironment)",
                 TAG, data=bool, errors=(InstanceNotFound,)),
        Endpoint("POST", "/instances", routes.create_many, "Make instances, all or none", TAG,
                 body=CreateManyRequest, data=list[InstanceObject], errors=_CREATE, headers=key),
        Endpoint("GET", "/instances", routes.list_by_filters, "List instances, the newest first",
                 TAG, query=InstanceFilter, data=list[InstanceObject]),
        Endpoint("GET", "/instances/{id}", routes.get, "Show an instance; wait_s: a long poll",
                 TAG, query=Waiting, data=InstanceObject, errors=(InstanceNotFound,)),
        Endpoint("DELETE", "/instances/{id}", routes.delete, "End an instance", TAG, data=bool,
                 errors=(InstanceNotFound,)),
        Endpoint("POST", "/instances/{id}/renew", routes.renew, "Give an instance more time", TAG,
                 body=RenewRequest, data=InstanceObject, errors=_GONE),
        Endpoint("POST", "/instances/{id}/exec", routes.exec, "Run a command in an instance", TAG,
                 body=ExecRequest, data=ExecObject, errors=(*_GONE, ToolTimeout)),
        Endpoint("POST", "/instances/{id}/token", routes.token, "Make an agent's token for an "
                 "instance", TAG, body=AgentTokenRequest, data=TokenObject,
                 errors=(InstanceNotFound,)),
    ]  # fmt: skip


class InstanceRoutes:
    """The handlers."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._deps = control.deps

    # --- creating -----------------------------------------------------------------------------

    async def create_one(self, asked: Asked[Any, CreateRequest]) -> InstanceObject:
        """Answer when it runs, or after a while, before AEnvironment's client gives up."""
        body = asked.body
        options = _options(body, asked.principal, actor="shared")
        wish = _wish(body, asked.principal, options, 1)
        (lease,) = await self._create(asked.request, wish, self._deps.settings.create_wait_s)
        return await self._shown(asked, lease)

    async def create_many(self, asked: Asked[Any, CreateManyRequest]) -> list[InstanceObject]:
        """Answer when they run, or at once."""
        body = asked.body
        options = _options(
            body, asked.principal,
            engine=body.engine, idle_timeout=body.idle_timeout, actor=body.actor,
        )  # fmt: skip
        wish = _wish(body, asked.principal, options, body.count)
        leases = await self._create(asked.request, wish, CREATE_DEADLINE_S if body.wait else 0.0)
        return await self._control.shown(asked.request, *leases)

    async def _create(self, request: Request, wish: Wish, patience_s: float) -> list[Lease]:
        key = request.headers.get(IDEMPOTENCY_KEY)
        creator = self._control.creator
        if key is not None:
            if not _KEY.fullmatch(key):
                raise ConfigError(f"{IDEMPOTENCY_KEY} is not 1-200 printable characters")
            # Whoever left may come back with the key: what it asked for is made all the same.
            task = asyncio.create_task(creator.create_once(wish, key, patience_s))
            self._control.keep(task)
            return await asyncio.shield(task)
        return await unless_left(request, creator.create(wish, patience_s))

    async def _shown(self, asked: Asked[Any, Any], lease: Lease) -> InstanceObject:
        (shown,) = await self._control.shown(asked.request, lease)
        return shown

    # --- looking ------------------------------------------------------------------------------

    async def list_by_reference(self, asked: Asked[ReferenceFilter, None]) -> Response:
        """List by reference."""
        reference = asked.path["reference"]
        name, version = (None, None) if reference == "*" else ids.split_reference(reference)
        return await self._page(
            asked,
            LeaseQuery(
                owner=_visible_owner(asked.principal, None),
                name=name,
                version=version,
                limit=asked.query.limit,
                cursor=asked.query.cursor,
            ),
        )

    async def list_by_filters(self, asked: Asked[InstanceFilter, None]) -> Response:
        """List by filters."""
        query = asked.query
        name, version = (None, None) if query.env is None else ids.split_reference(query.env)
        key, _, value = (query.label or "").partition("=")
        return await self._page(
            asked,
            LeaseQuery(
                owner=_visible_owner(asked.principal, query.owner),
                name=name,
                version=version,
                status=query.status,
                label=(key, value) if query.label else None,
                limit=query.limit,
                cursor=query.cursor,
            ),
        )

    async def _page(self, asked: Asked[Any, Any], query: LeaseQuery) -> Response:
        page = await self._deps.hub.leases(query)
        items = [await self._control.listed(asked.request, lease) for lease in page.items]
        headers = {"X-Total-Count": str(page.total)}
        if page.cursor is not None:
            headers["X-Next-Cursor"] = page.cursor
        return success(items, headers=headers)

    async def get(self, asked: Asked[Waiting, None]) -> InstanceObject:
        """Show one, once it is no longer Pending."""
        until = self._deps.clock.now() + asked.query.wait_s
        while True:
            lease = await self._control.owned(asked.principal, asked.path["id"])
            is_over = self._deps.clock.now() >= until
            if lease.status is not InstanceStatus.PENDING or is_over:
                break
            if await asked.request.is_disconnected():
                break
            await asyncio.sleep(_LOOK_S)
        lease = await self._control.looked_at(lease)
        return await self._shown(asked, lease)

    # --- living -------------------------------------------------------------------------------

    async def delete(self, asked: Asked[Any, None]) -> bool:
        """End one."""
        lease = await self._control.owned(asked.principal, asked.path["id"])
        await self._control.end([lease.id])
        return True

    async def renew(self, asked: Asked[Any, RenewRequest]) -> InstanceObject:
        """Renew one."""
        instance = await self._control.live(asked.principal, asked.path["id"])
        info = await instance.renew(asked.body.ttl)
        lease = await self._deps.hub.update_lease(asked.path["id"], deadline=info.deadline)
        return await self._shown(asked, lease)

    async def exec(self, asked: Asked[Any, ExecRequest]) -> ExecObject:
        """Run a command; it is stopped when the client leaves."""
        instance = await self._control.live(asked.principal, asked.path["id"])
        body = asked.body
        running = instance.exec(
            body.command,
            body.timeout,
            cwd=body.cwd,
            env=body.env,
            stdin=_decoded(body.stdin),
        )
        result = await unless_left(asked.request, running)
        return _exec_object(result, is_base64=body.encoding == "base64")

    async def token(self, asked: Asked[Any, AgentTokenRequest]) -> TokenObject:
        """Make an agent's token; it ends with the instance at the latest by what it is for."""
        lease = await self._control.owned(asked.principal, asked.path["id"])
        ttl = asked.body.ttl
        secret, record = await self._deps.hub.create_token(
            Role.AGENT,
            lease.owner,
            instance_id=lease.id,
            ttl_s=None if ttl is None else parse_duration_s(ttl, what="ttl"),
            note=asked.body.note,
        )
        return TokenObject(token=secret, **record.model_dump())


def _options(body: CreateRequest, principal: Principal, **more: Any) -> CreateOptions:
    return CreateOptions(
        lifetime="detached",
        ttl=body.ttl,
        environment_variables=body.environment_variables,
        arguments=body.arguments,
        labels=body.labels,
        owner=_owner(principal, body.owner),
        datasource=body.datasource,
        **more,
    )


def _wish(body: CreateRequest, principal: Principal, options: CreateOptions, count: int) -> Wish:
    ids.split_reference(body.env_name)  # a path of this machine is no reference
    return Wish(body.env_name, options, count, _owner(principal, body.owner))


def _owner(principal: Principal, asked: str | None) -> str:
    """Return whose an instance is.

    Raises:
        Forbidden: An owner asks in another's name.
    """
    if not asked or asked == principal.owner:
        return principal.owner
    if not principal.is_admin:
        raise Forbidden(
            f"this token is of {principal.owner!r}, and cannot act for {asked!r}",
            hint="leave the owner out, or use that owner's token; labels are free",
        )
    return asked


def _visible_owner(principal: Principal, asked: str | None) -> str | None:
    """Return whose instances are listed; None: everybody's."""
    return (asked or None) if principal.is_admin else _owner(principal, asked)


def _decoded(stdin: str | None) -> bytes | None:
    if stdin is None:
        return None
    try:
        return base64.b64decode(stdin, validate=True)
    except binascii.Error as exc:
        raise ConfigError(f"field stdin is no base64: {exc}") from None


def _exec_object(result: ExecResult, *, is_base64: bool) -> ExecObject:
    encoding: Literal["utf-8", "base64"] = "base64"
    stdout = base64.b64encode(result.stdout).decode()
    stderr = base64.b64encode(result.stderr).decode()
    if not is_base64:
        with contextlib.suppress(UnicodeDecodeError):
            stdout, stderr = result.stdout.decode(), result.stderr.decode()
            encoding = "utf-8"
    return ExecObject(
        exit_code=result.exit_code,
        stdout=stdout,
        stderr=stderr,
        encoding=encoding,
        truncated=result.truncated,
        duration_s=result.duration_s,
    )
