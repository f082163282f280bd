"""Control routes of operators: tokens, quotas, pools, the hub."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from aenv_ray import ids
from aenv_ray.actors.fabric.warm_api import warm
from aenv_ray.errors import CapacityExceeded, ConfigError, EnvironmentNotFound
from aenv_ray.hub.records import Quota, TokenRecord
from aenv_ray.serve.gateway.routes.control import Control
from aenv_ray.serve.gateway.routes.endpoint import Access, Asked, Endpoint
from aenv_ray.serve.gateway.routes.shapes import (
    PoolObject,
    PoolRequest,
    QuotaObject,
    QuotaRequest,
    TokenObject,
    TokenRequest,
)
from aenv_ray.units import parse_duration_s

POOLS: Final = "pool"
"""Kind of the hub's documents of pools."""


def endpoints(control: Control) -> list[Endpoint]:
    """Return the routes."""
    routes, quota = AdminRoutes(control), "/quotas/{subject:path}"
    return [
        Endpoint("POST", "/tokens", routes.create_token, "Make a token; its secret is told this "
                 "once", "tokens", Access.ADMIN, body=TokenRequest, data=TokenObject),
        Endpoint("GET", "/tokens", routes.tokens, "List one's tokens; all of them for "
                 "administrators", "tokens", data=list[TokenRecord]),
        Endpoint("DELETE", "/tokens/{id}", routes.revoke, "Revoke a token; false: there "
                 "is none", "tokens", data=bool),
        Endpoint("GET", "/quotas", routes.quotas, "Quotas and their use", "quotas",
                 data=list[QuotaObject]),
        Endpoint("PUT", quota, routes.set_quota, "Set the quota of owner:NAME or label:KEY=VALUE",
                 "quotas", Access.ADMIN, body=QuotaRequest, data=bool),
        Endpoint("DELETE", quota, routes.delete_quota, "Delete a quota", "quotas", Access.ADMIN,
                 data=bool),
        Endpoint("GET", "/pools", routes.pools, "Sandboxes that are kept ready", "pools",
                 data=list[PoolObject]),
        Endpoint("PUT", "/pools", routes.set_pool, "Keep sandboxes ready; 0: none", "pools",
                 Access.ADMIN, body=PoolRequest, data=PoolObject,
                 errors=(EnvironmentNotFound, CapacityExceeded)),
        Endpoint("GET", "/hub", routes.hub, "Facts of the hub", "hub", Access.ADMIN,
                 data=dict[str, Any]),
    ]  # fmt: skip


class AdminRoutes:
    """The handlers."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._hub = control.deps.hub

    async def create_token(self, asked: Asked[Any, TokenRequest]) -> TokenObject:
        """Make one."""
        body = asked.body
        secret, record = await self._hub.create_token(
            body.role,
            body.owner,
            instance_id=body.instance_id,
            ttl_s=None if body.ttl is None else parse_duration_s(body.ttl, what="ttl"),
            note=body.note,
        )
        return TokenObject(token=secret, **record.model_dump())

    async def tokens(self, asked: Asked[Any, None]) -> tuple[TokenRecord, ...]:
        """List those one may see."""
        principal = asked.principal
        return await self._hub.tokens(None if principal.is_admin else principal.owner)

    async def revoke(self, asked: Asked[Any, None]) -> bool:
        """Revoke one, and tell whether it was there; another owner's never was."""
        own = await self.tokens(asked)
        was_there = any(record.id == asked.path["id"] for record in own)
        if was_there:
            await self._hub.revoke_token(asked.path["id"])
            self._control.tokens.forget()
        return was_there

    async def quotas(self, asked: Asked[Any, None]) -> list[QuotaObject]:
        """List those one may see."""
        principal = asked.principal
        found = await self._hub.quotas()
        return [
            QuotaObject(subject=subject, instances=has, max_instances=may)
            for subject, (has, may) in sorted(found.items())
            if principal.is_admin or subject == f"owner:{principal.owner}"
        ]

    async def set_quota(self, asked: Asked[Any, QuotaRequest]) -> bool:
        """Set one."""
        subject = _subject(asked.path["subject"])
        await self._hub.set_quota(Quota(subject=subject, max_instances=asked.body.max_instances))
        return True

    async def delete_quota(self, asked: Asked[Any, None]) -> bool:
        """Delete one."""
        await self._hub.delete_quota(_subject(asked.path["subject"]))
        return True

    async def pools(self, asked: Asked[Any, None]) -> list[PoolObject]:
        """List what was asked for here, and what is ready for other reasons."""
        del asked
        found = await self._hub.documents(POOLS)
        ready = await self._control.deps.fabric.pools()
        return [
            PoolObject(
                environment=name,
                count=int(found.get(name, {}).get("count", 0)),
                ready=ready.get(name, 0),
            )
            for name in sorted(found.keys() | ready.keys())
        ]

    async def set_pool(self, asked: Asked[Any, PoolRequest]) -> PoolObject:
        """Ask the hosts, and note what was asked."""
        body = asked.body
        ids.split_reference(body.environment)
        source = await self._control.deps.resolve(body.environment)
        ready = await asyncio.to_thread(warm, source.path, body.count, lifetime="detached")
        if body.count:
            await self._hub.put_document(POOLS, source.reference, {"count": body.count})
        else:
            await self._hub.delete_document(POOLS, source.reference)
        return PoolObject(environment=source.reference, count=body.count, ready=ready)

    async def hub(self, asked: Asked[Any, None]) -> dict[str, Any]:
        """Tell facts."""
        del asked
        return await self._hub.status()


def _subject(text: str) -> str:
    """Return a quota's subject.

    Raises:
        ConfigError: It is none.
    """
    kind, colon, rest = text.partition(":")
    is_owner = kind == "owner" and rest
    is_label = kind == "label" and rest.partition("=")[0] and "=" in rest
    if not colon or not (is_owner or is_label):
        raise ConfigError(f"{text!r} has no quota", hint="write owner:NAME or label:KEY=VALUE")
    return text
