"""Control routes of operators: tokens, quotas, pools, the hub."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

from fastapi import Query

from aenv_ray import ids
from aenv_ray.actors.controller.draining import NodeState
from aenv_ray.actors.fabric.warm_api import warm
from aenv_ray.errors import CapacityExceeded, CatalogConflict, EnvironmentNotFound
from aenv_ray.hub.records import AuditRecord, Quota, TokenRecord
from aenv_ray.serve.gateway.data.document import failures
from aenv_ray.serve.gateway.routes.control import RouteCall
from aenv_ray.serve.gateway.routes.routing import AdminCall, UserCall, control_router
from aenv_ray.serve.gateway.routes.schemas import (
    AuditFilter,
    PoolObject,
    PoolRequest,
    QuotaObject,
    QuotaRequest,
    TokenObject,
    TokenRequest,
)
from aenv_ray.units import parse_duration_s

tokens, quotas, pools, nodes, hub = map(
    control_router, ("tokens", "quotas", "pools", "nodes", "hub")
)
POOLS: Final = "pool"
"""Kind of the hub's documents that say how many sandboxes to keep ready."""


@tokens.post("/tokens", responses=failures(CatalogConflict))
async def create_token(call: AdminCall, body: TokenRequest) -> TokenObject:
    """Create a token; only this answer contains its secret."""
    call.note(role=body.role, owner=body.owner)
    secret, record = await call.hub.create_token(
        body.role,
        body.owner,
        instance_id=body.instance_id,
        ttl_s=None if body.ttl is None else parse_duration_s(body.ttl, what="ttl"),
        note=body.note,
        maker=await call.token(),
    )
    call.note(subject=record.id)
    return TokenObject(token=secret, **record.model_dump())


@tokens.get("/tokens")
async def list_tokens(call: UserCall) -> tuple[TokenRecord, ...]:
    """List the caller's tokens, or all of them for an administrator."""
    return await _visible_tokens(call)


@tokens.delete("/tokens/{id}")
async def revoke_token(call: UserCall, id: str) -> bool:
    """Revoke a token; false: the caller has no such token, or its own role is lower."""
    known = await _visible_tokens(call)
    exists = any(one.id == id and call.caller.role.includes(one.role) for one in known)
    if exists:
        await call.hub.revoke_token(id)
        call.control.deps.authenticate.forget()
    else:
        call.note(outcome="not_found")
    return exists


async def _visible_tokens(call: RouteCall) -> tuple[TokenRecord, ...]:
    return await call.hub.tokens(None if call.caller.is_admin else call.caller.owner)


@quotas.get("/quotas")
async def list_quotas(call: UserCall) -> list[QuotaObject]:
    """List quotas and their use."""
    found = await call.hub.quotas()
    return [
        QuotaObject(subject=subject, instances=used, max_instances=allowed)
        for subject, (used, allowed) in sorted(found.items())
        if call.caller.is_admin or subject == f"owner:{call.caller.owner}"
    ]


@quotas.put("/quotas/{subject:path}")
async def set_quota(call: AdminCall, subject: str, body: QuotaRequest) -> bool:
    """Set the quota of owner:NAME or label:KEY=VALUE."""
    call.note(max_instances=str(body.max_instances))
    await call.hub.set_quota(Quota(subject=subject, max_instances=body.max_instances))
    return True


@quotas.delete("/quotas/{subject:path}")
async def delete_quota(call: AdminCall, subject: str) -> bool:
    """Delete a quota."""
    await call.hub.delete_quota(subject)
    return True


@pools.get("/pools")
async def list_pools(call: UserCall) -> list[PoolObject]:
    """List the sandboxes that are kept ready."""
    requested = await call.hub.documents(POOLS)
    ready = await call.control.deps.fabric.pools()
    return [
        PoolObject(
            environment=name,
            count=int(requested.get(name, {}).get("count", 0)),
            ready=ready.get(name, 0),
        )
        for name in sorted(requested.keys() | ready.keys())
        if await call.may_use(name.partition("@")[0])
    ]


@pools.put(
    "/pools",
    responses=failures(EnvironmentNotFound, CapacityExceeded),
)
async def set_pool(call: AdminCall, body: PoolRequest) -> PoolObject:
    """Keep a number of sandboxes of an environment ready; 0 ends that."""
    call.note(subject=body.environment, count=str(body.count))
    ids.split_reference(body.environment)  # refuses paths of this machine
    source = await call.control.deps.resolve(body.environment)
    ready = await asyncio.to_thread(warm, source.path, body.count, lifetime="detached")
    if body.count:
        await call.hub.put_document(POOLS, source.reference, {"count": body.count})
    else:
        await call.hub.delete_document(POOLS, source.reference)
    return PoolObject(environment=source.reference, count=body.count, ready=ready)


@nodes.get("/nodes")
async def list_nodes(call: AdminCall) -> list[NodeState]:
    """List the nodes of the cluster, and whether they take instances."""
    return await call.control.deps.fabric.nodes()


@hub.get("/audit")
async def audit_log(
    call: AdminCall, query: Annotated[AuditFilter, Query()]
) -> tuple[AuditRecord, ...]:
    """Show the audit log, the latest record first."""
    return await call.hub.audit_log(query.limit, query.before)


@hub.get("/hub")
async def show_hub(call: AdminCall) -> dict[str, Any]:
    """Show the state of the hub."""
    return await call.hub.status()
