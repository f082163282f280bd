"""Control routes of instances: AEnvironment's ``/env-instance``, and ours."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import re
from typing import Annotated, Any, Final, Literal

from fastapi import Header, Query
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
    InstanceExpired,
    InstanceNotFound,
    InstanceReleased,
    SandboxLost,
    SandboxStartFailed,
    ToolTimeout,
)
from aenv_ray.hub.records import Lease, LeaseQuery, Role
from aenv_ray.models import ExecResult, InstanceStatus
from aenv_ray.serve.gateway.auth import Principal
from aenv_ray.serve.gateway.creation import Creation
from aenv_ray.serve.gateway.data.document import failures
from aenv_ray.serve.gateway.requests import unless_left
from aenv_ray.serve.gateway.routes.control import RouteCall, page_answer
from aenv_ray.serve.gateway.routes.routing import Envelope, UserCall, control_router
from aenv_ray.serve.gateway.routes.schemas import (
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
    WaitQuery,
)
from aenv_ray.units import parse_duration_s

router = control_router("instances")

_KEY = re.compile(r"[\x21-\x7e]{1,200}")
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        description="A create repeated with the same key returns the same instances.",
        json_schema_extra={"minLength": 1, "pattern": "^[!-~]{1,200}$"},
    ),
]
_POLL_S: Final = 0.25
"""How often a long poll checks the instance."""

_MISSING: Final = failures(InstanceNotFound)
_ENDED: Final = (InstanceNotFound, InstanceExpired, InstanceReleased, SandboxLost)
_CREATE: Final = failures(
    EnvironmentNotFound,
    CatalogConflict,
    ArtifactDamaged,
    SandboxStartFailed,
    CapacityExceeded,
    InstanceReleased,
    DeadlineExceeded,
)


# --- creating ------------------------------------------------------------------------------------


@router.post("/env-instance", responses=_CREATE)
async def create_one(
    call: UserCall, body: CreateRequest, key: IdempotencyKey = None
) -> InstanceObject:
    """Create an instance (AEnvironment).

    Answers when it runs, or Pending shortly before AEnvironment's client would give up.
    """
    creation = await _creation(call, body, _options(body, call.caller, actor="shared"), 1)
    wait_s = call.control.deps.settings.create_wait_s
    (lease,) = await _create(call, creation, key, wait_s)
    return await call.shown(lease)


@router.post("/instances", responses=_CREATE)
async def create_many(
    call: UserCall, body: CreateManyRequest, key: IdempotencyKey = None
) -> list[InstanceObject]:
    """Create instances, all or none."""
    options = _options(
        body, call.caller, engine=body.engine, idle_timeout=body.idle_timeout, actor=body.actor
    )
    creation = await _creation(call, body, options, body.count)
    wait_s = CREATE_DEADLINE_S if body.wait else 0.0
    return [await call.shown(lease) for lease in await _create(call, creation, key, wait_s)]


async def _create(
    call: RouteCall, creation: Creation, key: str | None, wait_s: float
) -> list[Lease]:
    if key is None:
        return await unless_left(call.request, call.control.creator.create(creation, wait_s))
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"invalid Idempotency-Key of {len(key)} characters",
            hint="send 1 to 200 printable ASCII characters without spaces",
        )
    # A client that leaves may come back with its key, so the create continues without it.
    task = asyncio.create_task(call.control.creator.create_once(creation, key, wait_s))
    call.control.keep_running(task)
    return await asyncio.shield(task)


# --- listing and showing -------------------------------------------------------------------------


@router.get("/env-instance/{reference}/list", response_model=Envelope[list[InstanceObject]])
async def list_by_reference(
    call: UserCall, reference: str, query: Annotated[ReferenceFilter, Query()]
) -> Response:
    """List the instances of a name, of name@version, or of * (AEnvironment)."""
    name, version = (None, None) if reference == "*" else ids.split_reference(reference)
    wanted = LeaseQuery(
        owner=_visible_owner(call.caller, None),
        name=name,
        version=version,
        limit=query.limit,
        cursor=query.cursor,
    )
    return await _list(call, wanted)


@router.get("/instances", response_model=Envelope[list[InstanceObject]])
async def list_by_filters(call: UserCall, query: Annotated[InstanceFilter, Query()]) -> Response:
    """List instances, the newest first."""
    name, version = (None, None) if query.env is None else ids.split_reference(query.env)
    key, _, value = (query.label or "").partition("=")
    wanted = LeaseQuery(
        owner=_visible_owner(call.caller, query.owner),
        name=name,
        version=version,
        status=query.status,
        label=(key, value) if query.label else None,
        limit=query.limit,
        cursor=query.cursor,
    )
    return await _list(call, wanted)


async def _list(call: RouteCall, query: LeaseQuery) -> Response:
    page = await call.hub.leases(query)
    return page_answer(page, [await call.listed(lease) for lease in page.items])


@router.get("/env-instance/{id}", responses=_MISSING)
@router.get("/instances/{id}", responses=_MISSING)
async def get(call: UserCall, id: str, query: Annotated[WaitQuery, Query()]) -> InstanceObject:
    """Show an instance; with wait_s, as soon as it is no longer Pending."""
    until = call.control.deps.clock.now() + query.wait_s
    while True:
        lease = await call.owned(id)
        is_late = call.control.deps.clock.now() >= until
        if lease.status is not InstanceStatus.PENDING or is_late:
            break
        if await call.request.is_disconnected():
            break
        await asyncio.sleep(_POLL_S)
    return await call.shown(await call.control.refreshed(lease))


def _visible_owner(caller: Principal, requested: str | None) -> str | None:
    """Return the owner whose instances are listed; None: those of all owners."""
    return (requested or None) if caller.is_admin else caller.acting_owner(requested)


# --- using ---------------------------------------------------------------------------------------


@router.delete("/env-instance/{id}", responses=_MISSING)
@router.delete("/instances/{id}", responses=_MISSING)
async def delete(call: UserCall, id: str) -> bool:
    """End an instance."""
    lease = await call.owned(id)
    await call.control.deps.fabric.release([lease.id])
    await call.hub.end_leases([lease.id])
    return True


@router.post("/instances/{id}/renew", responses=failures(*_ENDED))
async def renew(call: UserCall, id: str, body: RenewRequest) -> InstanceObject:
    """Extend the lifetime of an instance."""
    instance = await call.live(id)
    info = await instance.renew(body.ttl)
    lease = await call.hub.update_lease(id, deadline=info.deadline)
    return await call.shown(lease)


@router.post("/instances/{id}/exec", responses=failures(*_ENDED, ToolTimeout))
async def execute(call: UserCall, id: str, body: ExecRequest) -> ExecObject:
    """Run a command in an instance; it is stopped when the client leaves."""
    instance = await call.live(id)
    running = instance.exec(
        body.command, body.timeout, cwd=body.cwd, env=body.env, stdin=_decoded(body.stdin)
    )
    result = await unless_left(call.request, running)
    await call.control.deps.authenticate.check_again(call.request)
    return _exec_object(result, is_base64=body.encoding == "base64")


@router.post("/instances/{id}/token", responses=failures(InstanceNotFound, CatalogConflict))
async def create_agent_token(call: UserCall, id: str, body: AgentTokenRequest) -> TokenObject:
    """Create an agent token for an instance."""
    lease = await call.owned(id)
    call.note(role=Role.AGENT, owner=lease.owner, instance=lease.id)
    secret, record = await call.hub.create_token(
        Role.AGENT,
        lease.owner,
        instance_id=lease.id,
        ttl_s=None if body.ttl is None else parse_duration_s(body.ttl, what="ttl"),
        note=body.note,
        maker=await call.token(),
    )
    call.note(subject=record.id)
    return TokenObject(token=secret, **record.model_dump())


def _options(body: CreateRequest, caller: Principal, **more: Any) -> CreateOptions:
    return CreateOptions(
        lifetime="detached",
        ttl=body.ttl,
        environment_variables=body.environment_variables,
        arguments=body.arguments,
        labels=body.labels,
        owner=caller.acting_owner(body.owner),
        datasource=body.datasource,
        **more,
    )


async def _creation(
    call: RouteCall, body: CreateRequest, options: CreateOptions, count: int
) -> Creation:
    await call.check_use(body.env_name)  # also refuses paths of this machine
    return Creation(body.env_name, options, count, call.caller.acting_owner(body.owner))


def _decoded(stdin: str | None) -> bytes | None:
    if stdin is None:
        return None
    try:
        return base64.b64decode(stdin, validate=True)
    except binascii.Error as exc:
        raise ConfigError(
            f"field stdin is not valid base64: {exc}", hint="encode the bytes with base64"
        ) from None


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
