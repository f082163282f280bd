"""Find the instance of a data request, and check the caller's access to it.

A request names its instance in one of three ways: the path with a token; the header
``AEnvCore-EnvInstance-ID`` with a token; or the two headers of AEnvironment's clients, which carry
no token. Those clients send the address that we gave them for the instance: an unguessable name,
which is the credential. No bytes are ever sent to an address in a request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from aenv_ray.bounded_cache import BoundedCache
from aenv_ray.errors import ConfigError, Forbidden, InstanceNotFound
from aenv_ray.hub.records import Lease, Role
from aenv_ray.runtime.door.async_calls import CALL_ID
from aenv_ray.serve.gateway.deps import Deps

INSTANCE_HEADER: Final = "aenvcore-envinstance-id"
ADDRESS_HEADER: Final = "aenvcore-mcpproxy-url"
LEASE_CACHE_S: Final = 10.0
"""Owner and capability of an instance never change; that it has ended, its host says."""
MAX_LEASES: Final = 10_000


@dataclass(frozen=True)
class Target:
    """An instance or service, and the rights of the caller."""

    instance_id: str
    """For a service, see `services.calls.service_target`."""
    is_agent: bool
    session: str = ""
    """For a service: calls with the same session reach the same sandbox. "" means no session."""
    ports: tuple[int, ...] = ()
    """For a sandbox of a service: ports of the service, in addition to its environment's."""

    def scoped(self, meta: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the metadata of a call; an agent's call ids are apart from those of owners.

        An agent that names the id of an owner's call neither gets its outcome nor takes the id.
        """
        call_id = meta.get(CALL_ID)
        if not (self.is_agent and isinstance(call_id, str) and call_id):
            return meta
        return {**meta, CALL_ID: f"agent {call_id}"}

    def check_not_agent(self) -> None:
        """Reject an agent (invariant 8).

        Raises:
            Forbidden: The caller is an agent.
        """
        if self.is_agent:
            raise Forbidden(
                "an agent's token can only list and call the tools of its instance",
                hint="use a token with the role user, publisher or admin",
            )


class Targets:
    """Finds the instance of a request."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._leases: BoundedCache[str, Lease] = BoundedCache(
            MAX_LEASES, ttl_s=LEASE_CACHE_S, clock=deps.clock
        )

    async def of_path(self, request: HTTPConnection) -> Target:
        """Return the instance that the path names.

        Raises:
            Unauthorized: The request has no valid token.
            Forbidden: The token is an agent's for another instance.
            InstanceNotFound: The instance does not exist, or belongs to another owner.
        """
        return await self._by_token(request, request.path_params["instance_id"])

    async def of_headers(self, request: HTTPConnection) -> Target:
        """Return the instance that the headers name.

        Raises:
            ConfigError: They name no instance.
            Unauthorized, Forbidden, InstanceNotFound: As for `of_path`.
        """
        instance_id = request.headers.get(INSTANCE_HEADER)
        address = request.headers.get(ADDRESS_HEADER)
        if "authorization" in request.headers and instance_id:
            return await self._by_token(request, instance_id)
        if not address:
            raise ConfigError(
                f"{request.url.path}: the request has neither a token nor AEnvCore-MCPProxy-URL",
                hint="send the ip of the instance as AEnvCore-MCPProxy-URL: http://<ip>:8081",
            )
        capability = capability_of(address)
        lease = await self._lease(
            f"capability {capability}", lambda: self._deps.hub.lease_of_capability(capability)
        )
        if instance_id and instance_id != lease.id:
            raise InstanceNotFound(
                f"the address in AEnvCore-MCPProxy-URL does not belong to {instance_id}",
                instance_id=instance_id,
                hint="leave the header out: the instance is found by its id",
            )
        return Target(lease.id, is_agent=False)

    async def _by_token(self, request: HTTPConnection, instance_id: str) -> Target:
        principal = await self._deps.authenticate(request)
        if principal.role is Role.AGENT:
            if principal.instance_id != instance_id:
                raise Forbidden(
                    f"this agent's token is for another instance than {instance_id}",
                    hint="use the token of this instance",
                )
            return Target(instance_id, is_agent=True)
        if not principal.is_admin:
            lease = await self._lease(
                f"id {instance_id}", lambda: self._deps.hub.lease(instance_id)
            )
            principal.check_owns(lease)
        return Target(instance_id, is_agent=False)

    async def _lease(self, key: str, find: Callable[[], Awaitable[Lease]]) -> Lease:
        lease = self._leases.get(key)
        if lease is None:
            lease = await find()
            self._leases.put(key, lease)
        return lease


def capability_of(address: str) -> str:
    """Return the capability in an address such as ``http://<capability>:8081``.

    Raises:
        ConfigError: The address contains none.
    """
    try:
        host = urlsplit(address if "://" in address else f"http://{address}").hostname
    except ValueError:
        host = None
    if not host:
        raise ConfigError(
            f"AEnvCore-MCPProxy-URL {address[:200]!r} names no instance",
            hint="send http://<ip>:8081 with the ip of the instance",
        )
    return host
