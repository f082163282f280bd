"""Control routes of operators: tokens, quotas, pools, the hub."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from aenv_ray import ids
from aenv_ray.actors.fabric.warm_api import warm
from aenv_ray.errors import CapacityExceeded, EnvironmentNotFound
from aenv_ray.hub.records import Quota, TokenRecord
from aenv_ray.serve.gateway.auth import Principal
from aenv_ray.serve.gateway.routes.control import Control
from aenv_ray.serve.gateway.routes.routing import (
    ADMIN_ONLY,
    OWNERS,
    Caller,
    GatewayControl,
    control_router,
    failures,
)
from aenv_ray.serve.gateway.routes.schemas import (
    PoolObject,
    PoolRequest,
    QuotaObject,
    QuotaRequest,
    TokenObject,
    TokenRequest,
)
from aenv_ray.units import parse_duration_s

tokens, quotas, pools, hub = map(control_router, ("tokens", "quotas", "pools", "hub"))
POOLS: Final = "pool"
"""Kind of the hub's documents that say how many sandboxes to keep ready."""


@tokens.post("/tokens", dependencies=[ADMIN_ONLY])
async def create_token(control: GatewayControl, body: TokenRequest) -> TokenObject:
    """Create a token; only this answer contains its secret."""
    secret, record = await control.deps.hub.create_token(
        body.role,
        body.owner,
        instance_id=body.instance_id,
        ttl_s=None if body.ttl is None else parse_duration_s(body.ttl, what="ttl"),
        note=body.note,
    )
    return TokenObject(token=secret, **record.model_dump())


@tokens.get("/tokens")
async def list_tokens(control: GatewayControl, caller: Caller) -> tuple[TokenRecord, ...]:
    """List the caller's tokens, or all of them for an administrator."""
    return await _visible_tokens(control, caller)


@tokens.delete("/tokens/{id}")
async def revoke_token(control: GatewayControl, caller: Caller, id: str) -> bool:
    """Revoke a token; false: the caller has no such token."""
    exists = any(record.id == id for record in await _visible_tokens(control, caller))
    if exists:
        await control.deps.hub.revoke_token(id)
        control.deps.authenticate.forget()
    return exists


async def _visible_tokens(control: Control, caller: Principal) -> tuple[TokenRecord, ...]:
    return await control.deps.hub.tokens(None if caller.is_admin else caller.owner)


@quotas.get("/quotas")
async def list_quotas(control: GatewayControl, caller: Caller) -> list[QuotaObject]:
    """List quotas and their use."""
    found = await control.deps.hub.quotas()
    return [
        QuotaObject(subject=subject, instances=used, max_instances=allowed)
        for subject, (used, allowed) in sorted(found.items())
        if caller.is_admin or subject == f"owner:{caller.owner}"
    ]


@quotas.put("/quotas/{subject:path}", dependencies=[ADMIN_ONLY])
async def set_quota(control: GatewayControl, subject: str, body: QuotaRequest) -> bool:
    """Set the quota of owner:NAME or label:KEY=VALUE."""
    await control.deps.hub.set_quota(Quota(subject=subject, max_instances=body.max_instances))
    return True


@quotas.delete("/quotas/{subject:path}", dependencies=[ADMIN_ONLY])
async def delete_quota(control: GatewayControl, subject: str) -> bool:
    """Delete a quota."""
    await control.deps.hub.delete_quota(subject)
    return True


@pools.get("/pools", dependencies=[OWNERS])
async def list_pools(control: GatewayControl) -> list[PoolObject]:
    """List the sandboxes that are kept ready."""
    requested = await control.deps.hub.documents(POOLS)
    ready = await control.deps.fabric.pools()
    return [
        PoolObject(
            environment=name,
            count=int(requested.get(name, {}).get("count", 0)),
            ready=ready.get(name, 0),
        )
        for name in sorted(requested.keys() | ready.keys())
    ]


@pools.put(
    "/pools",
    dependencies=[ADMIN_ONLY],
    responses=failures(EnvironmentNotFound, CapacityExceeded),
)
async def set_pool(control: GatewayControl, body: PoolRequest) -> PoolObject:
    """Keep a number of sandboxes of an environment ready; 0 ends that."""
    ids.split_reference(body.environment)  # refuses paths of this machine
    source = await control.deps.resolve(body.environment)
    ready = await asyncio.to_thread(warm, source.path, body.count, lifetime="detached")
    if body.count:
        await control.deps.hub.put_document(POOLS, source.reference, {"count": body.count})
    else:
        await control.deps.hub.delete_document(POOLS, source.reference)
    return PoolObject(environment=source.reference, count=body.count, ready=ready)


@hub.get("/hub", dependencies=[ADMIN_ONLY])
async def show_hub(control: GatewayControl) -> dict[str, Any]:
    """Show the state of the hub."""
    return await control.deps.hub.status()
