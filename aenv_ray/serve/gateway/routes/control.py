"""What the handlers of control routes share: the parts of a replica, and instances as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from aenv_ray.bounded_cache import BoundedCache
from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.clock import Clock
from aenv_ray.errors import EnvironmentNotFound, FabricUnavailable, InstanceNotFound
from aenv_ray.hub.api import Hub
from aenv_ray.hub.records import EnvironmentVersion, Lease, Page
from aenv_ray.models import InstanceStatus
from aenv_ray.serve.gateway.auth import Principal, RequestRate, principal_of
from aenv_ray.serve.gateway.creation import Creator
from aenv_ray.serve.gateway.deps import Deps
from aenv_ray.serve.gateway.envelope import success
from aenv_ray.serve.gateway.metrics import Metrics
from aenv_ray.serve.gateway.routes.schemas import InstanceObject, instance_object
from aenv_ray.serve.gateway.signing import Signer
from aenv_ray.serve.services.service import Services

ENVIRONMENT_CACHE_S: Final = 10.0
"""How old the status of an environment may be that is shown with an instance."""
_MAX_ENVIRONMENTS: Final = 1000
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class Publish(Protocol):
    """Publishes an untrusted source archive; see `aenv_ray.actors.fabric.publishing.publish`."""

    async def __call__(
        self, archive: bytes, owner: str, *, allow: Sequence[str] = ()
    ) -> EnvironmentVersion:
        """Return the published version."""
        ...


class EnvironmentCache:
    """Environment versions by reference, cached because every answer about an instance has one."""

    def __init__(self, hub: Hub, clock: Clock) -> None:
        self._hub = hub
        # In a tuple, because None is an answer: the version was never published.
        self._versions: BoundedCache[str, tuple[EnvironmentVersion | None]] = BoundedCache(
            _MAX_ENVIRONMENTS, ttl_s=ENVIRONMENT_CACHE_S, clock=clock
        )

    async def find(self, reference: str) -> EnvironmentVersion | None:
        """Return a version, at most `ENVIRONMENT_CACHE_S` old; None: it was never published.

        Raises:
            FabricUnavailable: The hub does not answer.
        """
        cached = self._versions.get(reference)
        if cached is None:
            cached = (await self._published(reference),)
            self._versions.put(reference, cached)
        return cached[0]

    async def _published(self, reference: str) -> EnvironmentVersion | None:
        name, _, version = reference.partition("@")
        try:
            return await self._hub.environment(name, version)
        except EnvironmentNotFound:
            return None


@dataclass(frozen=True)
class Control:
    """The control side of one replica."""

    deps: Deps
    creator: Creator
    services: Services
    environments: EnvironmentCache
    rate: RequestRate
    signer: Signer
    publish: Publish
    metrics: Metrics
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def keep_running(self, task: asyncio.Task[Any]) -> None:
        """Let a task finish even if nobody waits for it."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def refreshed(self, lease: Lease) -> Lease:
        """Return a lease with the status and deadline that the instance's host reports now."""
        if lease.status is not InstanceStatus.RUNNING:
            return lease
        try:
            info = await self.deps.fabric.info(lease.id)
        except InstanceNotFound:
            return lease.model_copy(update={"status": InstanceStatus.TERMINATED})
        except FabricUnavailable:
            return lease  # the hub's word is the latest known
        reason = "its sandbox, its host or its node died"
        return lease.model_copy(
            update={
                "status": info.status,
                "deadline": info.deadline,
                "reason": reason if info.status is InstanceStatus.FAILED else lease.reason,
            }
        )


@dataclass(frozen=True)
class Call:
    """A request to a control route, as its handler receives it."""

    control: Control
    request: Request

    @property
    def caller(self) -> Principal:
        """The sender; public routes have none."""
        return principal_of(self.request)

    @property
    def hub(self) -> Hub:
        """The hub."""
        return self.control.deps.hub

    async def owned(self, instance_id: str) -> Lease:
        """Return the lease of an instance that the caller may use.

        Raises:
            InstanceNotFound: It does not exist, or belongs to another owner.
            Forbidden: The caller is an agent.
        """
        lease = await self.hub.lease(instance_id)
        self.caller.check_owns(lease)
        return lease

    async def live(self, instance_id: str) -> AsyncEnvHandle:
        """Return an instance that the caller may use, to call it.

        Raises:
            AenvError: As `owned` and `AsyncFabric.handle`.
        """
        await self.owned(instance_id)
        return AsyncEnvHandle(await self.control.deps.fabric.handle(instance_id))

    async def shown(self, lease: Lease) -> InstanceObject:
        """Return an instance as only its owner may see it."""
        entry = await self.control.environments.find(lease.reference)
        url = self.mcp_url(lease.id)
        return instance_object(lease, mcp_url=url, entry=entry, is_private=True)

    async def listed(self, lease: Lease) -> InstanceObject:
        """Return an instance as lists show it: without its capability and configuration."""
        entry = await self.control.environments.find(lease.reference)
        if entry is not None:
            entry = entry.model_copy(update={"config": {}, "artifacts": ()})
        url = self.mcp_url(lease.id)
        return instance_object(lease, mcp_url=url, entry=entry, is_private=False)

    def mcp_url(self, instance_id: str) -> str:
        """Return the MCP endpoint of an instance."""
        return f"{self._data_url()}/instances/{instance_id}/mcp"

    def service_url(self, service_id: str) -> str:
        """Return the base URL of a service's MCP endpoint and functions."""
        return f"{self._data_url()}/services/{service_id}"

    def _data_url(self) -> str:
        settings = self.control.deps.settings
        base = settings.public_mcp_url
        if base is None:
            url = self.request.url
            host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname
            is_control = (url.port or _DEFAULT_PORTS.get(url.scheme)) == settings.port
            port = settings.mcp_port if is_control else url.port
            base = f"{url.scheme}://{host}" + (f":{port}" if port else "")
        return base.rstrip("/")


def page_answer(page: Page[Any], items: Sequence[BaseModel]) -> Response:
    """Return one page of a list, with the total and the next cursor in headers."""
    headers = {"X-Total-Count": str(page.total)}
    if page.cursor is not None:
        headers["X-Next-Cursor"] = page.cursor
    return success(items, headers=headers)
