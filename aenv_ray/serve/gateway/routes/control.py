"""What the control routes share beyond `Deps`: creation, and instances as clients see them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.requests import Request

from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.errors import FabricUnavailable, InstanceNotFound
from aenv_ray.hub.records import Lease
from aenv_ray.models import InstanceStatus
from aenv_ray.serve.gateway.auth import HubAuthenticator
from aenv_ray.serve.gateway.creation import Creator
from aenv_ray.serve.gateway.deps import Deps, Principal
from aenv_ray.serve.gateway.known_environments import KnownEnvironments
from aenv_ray.serve.gateway.routes.shapes import InstanceObject, instance_object

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Control:
    """The control side of one replica."""

    deps: Deps
    creator: Creator
    tokens: HubAuthenticator
    environments: KnownEnvironments
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Let a task end though nobody waits for it."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def owned(self, principal: Principal, instance_id: str) -> Lease:
        """Return the lease of an instance that somebody may use.

        Raises:
            InstanceNotFound: There is none, or it is another owner's.
            Forbidden: An agent asks.
        """
        lease = await self.deps.hub.lease(instance_id)
        principal.check_owns(lease)
        return lease

    async def looked_at(self, lease: Lease) -> Lease:
        """Return a lease with what its host says of the instance now."""
        if lease.status is not InstanceStatus.RUNNING:
            return lease
        try:
            info = await self.deps.fabric.info(lease.id)
        except InstanceNotFound:
            return lease.model_copy(update={"status": InstanceStatus.TERMINATED})
        except FabricUnavailable:
            return lease  # as far as is known
        reason = "its sandbox, its host or its node died"
        return lease.model_copy(
            update={
                "status": info.status,
                "deadline": info.deadline,
                "reason": reason if info.status is InstanceStatus.FAILED else lease.reason,
            }
        )

    async def live(self, principal: Principal, instance_id: str) -> AsyncEnvHandle:
        """Return an instance to work with.

        Raises:
            AenvError: As `owned`, and as `Instances.handle`.
        """
        await self.owned(principal, instance_id)
        return AsyncEnvHandle(await self.deps.fabric.handle(instance_id))

    async def shown(self, request: Request, *leases: Lease) -> list[InstanceObject]:
        """Return instances of one environment as their owner sees them alone."""
        entry = await self.environments.find(leases[0].reference)
        return [
            instance_object(
                lease, mcp_url=self.mcp_url(request, lease.id), entry=entry, is_private=True
            )
            for lease in leases
        ]

    async def listed(self, request: Request, lease: Lease) -> InstanceObject:
        """Return an instance as lists show it: without its capability, and the configuration."""
        entry = await self.environments.find(lease.reference)
        if entry is not None:
            entry = entry.model_copy(update={"config": {}, "artifacts": ()})
        url = self.mcp_url(request, lease.id)
        return instance_object(lease, mcp_url=url, entry=entry, is_private=False)

    def mcp_url(self, request: Request, instance_id: str) -> str:
        """Return where MCP clients reach an instance."""
        return f"{self._data_url(request)}/instances/{instance_id}/mcp"

    def service_url(self, request: Request, service_id: str) -> str:
        """Return where clients reach a service: MCP and functions are below it."""
        return f"{self._data_url(request)}/services/{service_id}"

    def _data_url(self, request: Request) -> str:
        settings = self.deps.settings
        base = settings.public_mcp_url
        if base is None:
            url = request.url
            host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname
            is_control = (url.port or _DEFAULT_PORTS.get(url.scheme)) == settings.port
            port = settings.mcp_port if is_control else url.port
            base = f"{url.scheme}://{host}" + (f":{port}" if port else "")
        return base.rstrip("/")

    async def end(self, ids: list[str]) -> None:
        """End instances, and then their leases.

        Raises:
            FabricUnavailable: The fabric or the hub does not answer; they may live.
        """
        await self.deps.fabric.release(ids)
        await self.deps.hub.end_leases(ids)
