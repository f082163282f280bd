"""The data side of services: MCP, functions and ports, routed to one of a service's sandboxes."""

from __future__ import annotations

from typing import Final

from starlette.requests import HTTPConnection
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from aenv_ray.errors import CatalogConflict
from aenv_ray.hub.services import ServiceRecord, not_found
from aenv_ray.serve.gateway.auth import Principal
from aenv_ray.serve.gateway.data import mcp_wire
from aenv_ray.serve.gateway.data.functions import FunctionProxy
from aenv_ray.serve.gateway.data.http import proxy_app
from aenv_ray.serve.gateway.data.mcp import McpProxy, mcp_app
from aenv_ray.serve.gateway.data.ports import PortProxy
from aenv_ray.serve.gateway.data.sockets import port_routes
from aenv_ray.serve.gateway.data.targets import Target
from aenv_ray.serve.gateway.deps import Deps
from aenv_ray.serve.services.calls import ServiceCalls, service_target
from aenv_ray.serve.services.service import Services

SESSION_HEADER: Final = "x-session-id"
"""A client sends it to keep its calls on one replica; without it, its MCP session does that."""
_RECORD_CACHE_S: Final = 1.0
_RECORDED: Final = ("aenv.principal", "aenv.error")
"""Keys of a scope that the access log reads after the request."""


def service_routes(services: Services, deps: Deps) -> list[BaseRoute]:
    """Return the routes of services' tools, functions and ports."""
    calls = ServiceCalls(deps.fabric, deps.calls)
    targets = ServiceTargets(services, deps, calls)
    limit = deps.settings.max_body_bytes
    functions = proxy_app(FunctionProxy(targets.of_request, calls).serve, limit)
    ports = PortProxy(targets.sandbox_of_request, deps)
    return [
        *port_routes("/services/{id}", ports),
        Route("/services/{id}/mcp", mcp_app(McpProxy(targets.of_request, calls), limit)),
        Route("/services/{id}/{path:path}", _Below(functions)),
    ]


class ServiceTargets:
    """Finds the service of a request, and checks that the sender may use it."""

    def __init__(self, services: Services, deps: Deps, calls: ServiceCalls) -> None:
        self._services = services
        self._calls = calls
        self._deps = deps
        self._cached: tuple[float, dict[str, ServiceRecord]] = (0.0, {})

    async def of_request(self, request: HTTPConnection) -> Target:
        """Return the service that the path names.

        Raises:
            Unauthorized: The token is missing or invalid.
            Forbidden: The token is an agent's.
            ServiceNotFound: The service does not exist, or belongs to another owner.
            CatalogConflict: The service is paused.
        """
        record, session = await self._found(request)
        return Target(_target(record), is_agent=False, session=session)

    async def sandbox_of_request(self, request: HTTPConnection) -> Target:
        """Return a sandbox of the service that the path names: the session's, or any.

        Raises:
            Unauthorized, Forbidden, ServiceNotFound, CatalogConflict: As `of_request`.
            SessionLost, FabricUnavailable: As `ServiceCalls.sandbox`.
        """
        record, session = await self._found(request)
        instance_id = await self._calls.sandbox(_target(record), session)
        ports = () if record.changes.port is None else (record.changes.port,)
        return Target(instance_id, is_agent=False, session=session, ports=ports)

    async def _found(self, request: HTTPConnection) -> tuple[ServiceRecord, str]:
        principal = await self._deps.authenticate(request)
        record = owned_service(principal, request.path_params["id"], await self._records())
        if not record.replicas:
            raise CatalogConflict(
                f"service {record.id} is paused: it has 0 replicas",
                hint=f"aenv service update {record.id} --replicas 1",
            )
        headers = request.headers
        session = headers.get(SESSION_HEADER) or headers.get(mcp_wire.SESSION_HEADER) or ""
        return record, session

    async def _records(self) -> dict[str, ServiceRecord]:
        now = self._deps.clock.now()
        if now >= self._cached[0]:
            self._cached = (now + _RECORD_CACHE_S, await self._services.records.all())
        return self._cached[1]


def _target(record: ServiceRecord) -> str:
    return service_target(record.id, record.uid, record.revision)


def owned_service(
    principal: Principal, service_id: str, records: dict[str, ServiceRecord]
) -> ServiceRecord:
    """Return a service that the principal may use.

    Raises:
        Forbidden: The principal is an agent.
        ServiceNotFound: The service does not exist, or belongs to another owner.
    """
    principal.check_not_agent()
    record = records.get(service_id)
    if record is None or not (principal.is_admin or record.owner == principal.owner):
        raise not_found(service_id)
    return record


class _Below:
    """Gives an application the part of the path below a service as the whole path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = "/" + scope["path_params"]["path"]
        below = {**scope, "path": path, "raw_path": path.encode()}
        try:
            await self._app(below, receive, send)
        finally:
            scope.update({key: below[key] for key in _RECORDED if key in below})
