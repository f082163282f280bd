"""Which instance a request of the data side is for, and whether it may use it.

Three ways to say so: the path with a token, the header ``AEnvCore-EnvInstance-ID`` with a token, or
the two headers of AEnvironment's clients, which carry no token: the address that we gave them for
the instance is an unguessable name, and naming it is the credential. Nothing is ever sent to an
address that a request names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from aenv_ray.errors import ConfigError, Forbidden, InstanceNotFound
from aenv_ray.hub.records import Lease, Role
from aenv_ray.serve.gateway.deps import Deps

INSTANCE_HEADER: Final = "aenvcore-envinstance-id"
ADDRESS_HEADER: Final = "aenvcore-mcpproxy-url"
LEASE_CACHE_S: Final = 10.0
"""Whose an instance is and by which name never changes; that it has ended its host says itself."""
LEASES_KEPT: Final = 10_000


@dataclass(frozen=True)
class Target:
    """An instance, and what its caller may do with it."""

    instance_id: str
    """Of a service: its id and revision."""
    is_agent: bool
    session: str = ""
    """Of a service: what its client's calls stay together by; empty: nothing."""
    ports: tuple[int, ...] = ()
    """Of a sandbox of a service: ports that the service passes on to, besides its environment's."""

    def check_not_agent(self) -> None:
        """Refuse an agent.

        Raises:
            Forbidden: It is one (invariant 8).
        """
        if self.is_agent:
            raise Forbidden(
                "an agent's token lists and calls the tools of its instance, nothing else",
                hint="use the token of an owner",
            )


class Targets:
    """Finds the instance of a request.

    Args:
        deps: Knows tokens and leases.
    """

    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._leases: OrderedDict[str, tuple[float, Lease]] = OrderedDict()

    async def of_path(self, request: HTTPConnection) -> Target:
        """Return the instance that the path names.

        Raises:
            Unauthorized: No token, or none that holds.
            Forbidden: An agent's token of another instance.
            InstanceNotFound: There is none, or it is somebody else's.
        """
        return await self._by_token(request, request.path_params["instance_id"])

    async def of_headers(self, request: HTTPConnection) -> Target:
        """Return the instance that the headers name.

        Raises:
            ConfigError: They name none.
            Unauthorized, Forbidden, InstanceNotFound: As for `of_path`.
        """
        instance_id = request.headers.get(INSTANCE_HEADER)
        address = request.headers.get(ADDRESS_HEADER)
        if "authorization" in request.headers and instance_id:
            return await self._by_token(request, instance_id)
        if not address:
            raise ConfigError(
                f"{request.url.path}: the request has no token, and no AEnvCore-MCPProxy-URL",
                hint="send the ip of the instance as AEnvCore-MCPProxy-URL: http://<ip>:8081",
            )
        capability = capability_of(address)
        lease = await self._lease(
            f"capability {capability}", lambda: self._deps.hub.lease_of_capability(capability)
        )
        if instance_id and instance_id != lease.id:
            raise InstanceNotFound(
                f"the address in AEnvCore-MCPProxy-URL is not that of {instance_id}",
                instance_id=instance_id,
            )
        return Target(lease.id, is_agent=False)

    async def _by_token(self, request: HTTPConnection, instance_id: str) -> Target:
        principal = await self._deps.authenticate(request)
        if principal.role is Role.AGENT:
            if principal.instance_id != instance_id:
                raise Forbidden(f"this agent's token is not for {instance_id}")
            return Target(instance_id, is_agent=True)
        if not principal.is_admin:
            lease = await self._lease(
                f"id {instance_id}", lambda: self._deps.hub.lease(instance_id)
            )
            principal.check_owns(lease)
        return Target(instance_id, is_agent=False)

    async def _lease(self, key: str, find: Callable[[], Awaitable[Lease]]) -> Lease:
        now = self._deps.clock.now()
        known = self._leases.get(key)
        if known is not None and now < known[0]:
            return known[1]
        lease = await find()
        self._leases[key] = (now + LEASE_CACHE_S, lease)
        self._leases.move_to_end(key)
        if len(self._leases) > LEASES_KEPT:
            self._leases.popitem(last=False)
        return lease


def capability_of(address: str) -> str:
    """Return the name in an address such as ``http://<name>:8081``.

    Raises:
        ConfigError: There is none.
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
