"""Routes of services: AEnvironment's ``/env-service``, and those of a service's own tools."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from aenv_ray import ids
from aenv_ray.actors.calls.json_calls import InstanceCalls
from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.errors import (
    AenvError,
    ArtifactDamaged,
    CatalogConflict,
    EnvironmentNotFound,
    Forbidden,
    ServiceNotFound,
)
from aenv_ray.hub.records import EnvironmentVersion
from aenv_ray.hub.services import Autoscale, ServiceRecord, not_found
from aenv_ray.runtime.public.requests import BodyLimit
from aenv_ray.serve.gateway.data import mcp_wire
from aenv_ray.serve.gateway.data.functions import FunctionDoor
from aenv_ray.serve.gateway.data.http import door_app
from aenv_ray.serve.gateway.data.mcp import McpDoor
from aenv_ray.serve.gateway.data.ports import PortDoor
from aenv_ray.serve.gateway.data.sockets import port_routes
from aenv_ray.serve.gateway.data.targets import Target
from aenv_ray.serve.gateway.deps import Deps, Principal
from aenv_ray.serve.gateway.routes.control import Control
from aenv_ray.serve.gateway.routes.endpoint import Asked, Endpoint
from aenv_ray.serve.gateway.routes.service_shapes import (
    ServiceCreateRequest,
    ServiceDeletion,
    ServiceFilter,
    ServiceLogs,
    ServiceObject,
    ServiceUpdateRequest,
    service_object,
)
from aenv_ray.serve.services.calls import ServiceCalls, target_of
from aenv_ray.serve.services.service import Services
from aenv_ray.serve.services.service_replica import SERVICE_LABEL
from aenv_ray.serve.services.storage import StorageWish

TAG: Final = "services"
SESSION_HEADER: Final = "x-session-id"
"""Chosen by a client: its calls stay with one replica. Without it, an MCP session does."""
_RECORD_CACHE_S: Final = 1.0
_CHANGE: Final = (CatalogConflict, EnvironmentNotFound, ArtifactDamaged)


class ServiceTargets:
    """Finds the service of a request, and refuses who may not use it.

    Args:
        services: Has the records.
        deps: Knows tokens.
        calls: Find a service's sandboxes.
    """

    def __init__(self, services: Services, deps: Deps, calls: ServiceCalls) -> None:
        self._services = services
        self._calls = calls
        self._deps = deps
        self._known: tuple[float, dict[str, ServiceRecord]] = (0.0, {})

    async def of_request(self, request: HTTPConnection) -> Target:
        """Return the service that the path names.

        Raises:
            Unauthorized: No token, or none that holds.
            Forbidden: An agent's token.
            ServiceNotFound: There is none, or it is somebody else's.
            CatalogConflict: It is parked.
        """
        record, session = await self._found(request)
        return Target(target_of(record.id, record.revision), is_agent=False, session=session)

    async def sandbox_of_request(self, request: HTTPConnection) -> Target:
        """Return a sandbox of the service that the path names: its session's, else any.

        Raises:
            Unauthorized, Forbidden, ServiceNotFound, CatalogConflict: As `of_request`.
            SessionLost, FabricUnavailable: As `ServiceCalls.sandbox`.
        """
        record, session = await self._found(request)
        instance_id = await self._calls.sandbox(record.id, session)
        ports = () if record.changes.port is None else (record.changes.port,)
        return Target(instance_id, is_agent=False, session=session, ports=ports)

    async def _found(self, request: HTTPConnection) -> tuple[ServiceRecord, str]:
        principal = await self._deps.authenticate(request)
        record = owned(principal, request.path_params["id"], await self._records())
        if not record.replicas:
            raise CatalogConflict(
                f"service {record.id} is parked: it has 0 replicas",
                hint=f"aenv service update {record.id} --replicas 1",
            )
        headers = request.headers
        session = headers.get(SESSION_HEADER) or headers.get(mcp_wire.SESSION_HEADER) or ""
        return record, session

    async def _records(self) -> dict[str, ServiceRecord]:
        now = self._deps.clock.now()
        if now >= self._known[0]:
            self._known = (now + _RECORD_CACHE_S, await self._services.records.all())
        return self._known[1]


def owned(
    principal: Principal, service_id: str, records: dict[str, ServiceRecord]
) -> ServiceRecord:
    """Return a service that somebody may use.

    Raises:
        Forbidden: An agent asks.
        ServiceNotFound: There is none, or it is another owner's.
    """
    principal.check_not_agent()
    record = records.get(service_id)
    if record is None or not (principal.is_admin or record.owner == principal.owner):
        raise not_found(service_id)
    return record


def data_routes(services: Services, deps: Deps) -> list[BaseRoute]:
    """Return the routes of services' tools and functions."""
    calls = ServiceCalls()
    targets = ServiceTargets(services, deps, calls)
    limit = deps.settings.max_body_bytes
    functions = door_app(FunctionDoor(targets.of_request, calls).serve, limit)
    ports = PortDoor(targets.sandbox_of_request, InstanceCalls(deps.fabric), deps)
    return [
        *port_routes("/services/{id}", ports),
        Route("/services/{id}/mcp", BodyLimit(McpDoor(targets.of_request, calls), limit)),
        Route("/services/{id}/{path:path}", _Below(functions)),
    ]


class _Below:
    """An application that sees the path below a service as the whole path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = "/" + scope["path_params"]["path"]
        await self._app({**scope, "path": path, "raw_path": path.encode()}, receive, send)


def endpoints(control: Control, services: Services) -> list[Endpoint]:
    """Return the control routes."""
    routes = ServiceRoutes(control, services)
    missing = (ServiceNotFound,)
    return [
        Endpoint("POST", "/env-service", routes.create, "Make a service", TAG,
                 body=ServiceCreateRequest, data=ServiceObject, errors=_CHANGE),
        Endpoint("GET", "/env-service/{reference}/list", routes.find, "List services of *, a name "
                 "or name@version", TAG, query=ServiceFilter, data=list[ServiceObject]),
        Endpoint("GET", "/env-service/{id}", routes.get, "Show a service", TAG,
                 data=ServiceObject, errors=missing),
        Endpoint("PUT", "/env-service/{id}", routes.update, "Change a service", TAG,
                 body=ServiceUpdateRequest, data=ServiceObject, errors=(*missing, *_CHANGE)),
        Endpoint("DELETE", "/env-service/{id}", routes.delete, "End a service", TAG,
                 query=ServiceDeletion, data=bool, errors=missing),
        Endpoint("GET", "/env-service/{id}/logs", routes.logs, "What the replicas of a service "
                 "printed", TAG, query=ServiceLogs, errors=missing, media="text/plain"),
    ]  # fmt: skip


class ServiceRoutes:
    """The handlers."""

    def __init__(self, control: Control, services: Services) -> None:
        self._control = control
        self._services = services

    async def create(self, asked: Asked[Any, ServiceCreateRequest]) -> ServiceObject:
        """Answer at once; it is Creating."""
        body, principal = asked.body, asked.principal
        ids.split_reference(body.env_name)  # a path of this machine is no reference
        source = await self._control.deps.resolve(body.env_name)
        replicas = body.replicas
        if replicas is None:
            replicas = source.config.deploy.service.replicas
        record = await self._services.create(
            body.env_name,
            _owner(principal, body.owner),
            name=body.service_name or None,
            wait=False,
            replicas=replicas,
            autoscale=Autoscale.parse(body.autoscale) if body.autoscale else None,
            environment_variables=body.environment_variables or {},
            engine=body.engine or None,
            changes=body.changes(),
            storage=StorageWish(
                is_wanted=body.enable_storage, size=body.storage_size or None,
                mount_path=body.mount_path or None, label=body.pvc_name or None,
            ),
        )  # fmt: skip
        return await self._shown(asked.request, record)

    async def find(self, asked: Asked[ServiceFilter, None]) -> list[ServiceObject]:
        """List one's own, or all for an administrator."""
        reference, principal = asked.path["reference"], asked.principal
        name, version = (None, None) if reference == "*" else ids.split_reference(reference)
        wanted = [
            record
            for record in (await self._services.records.all()).values()
            if (principal.is_admin or record.owner == principal.owner)
            and (name is None or _is_of(record, name, version))
        ]
        wanted.sort(key=lambda record: record.created_at, reverse=True)
        return await self._objects(asked.request, wanted)

    async def get(self, asked: Asked[Any, None]) -> ServiceObject:
        """Show one."""
        return await self._shown(asked.request, await self._owned(asked))

    async def update(self, asked: Asked[Any, ServiceUpdateRequest]) -> ServiceObject:
        """Answer at once; replicas roll."""
        record, body = await self._owned(asked), asked.body
        if body.env_name is not None:
            ids.split_reference(body.env_name)
        changes: dict[str, Any] = {}
        if body.replicas is not None:
            changes["replicas"] = body.replicas
        if body.autoscale is not None:
            changes["autoscale"] = Autoscale.parse(body.autoscale) if body.autoscale else None
        if body.engine is not None:
            changes["engine"] = body.engine or None
        changed = await self._services.update(
            record,
            wait=False,
            reference=body.env_name,
            environment_variables=body.environment_variables,
            changes=body.changes(),
            storage=StorageWish(
                is_wanted=body.enable_storage, size=body.storage_size or None,
                mount_path=body.mount_path or None,
            ),
            **changes,
        )  # fmt: skip
        return await self._shown(asked.request, changed)

    async def delete(self, asked: Asked[ServiceDeletion, None]) -> bool:
        """End one; calls under way end first."""
        record = await self._owned(asked)
        await self._services.delete(record, delete_storage=asked.query.delete_storage)
        return True

    async def logs(self, asked: Asked[ServiceLogs, None]) -> Response:
        """Answer with what is kept of each sandbox's output, its id before each line."""
        record = await self._owned(asked)
        live = await self._control.deps.fabric.list_instances()
        mine = sorted(one.id for one in live if one.labels.get(SERVICE_LABEL) == record.id)
        async with asyncio.TaskGroup() as group:
            reading = [group.create_task(self._log(one, asked.query.tail)) for one in mine]
        return Response("".join(task.result() for task in reading), media_type="text/plain")

    async def _log(self, instance_id: str, tail: int | None) -> str:
        try:
            instance = AsyncEnvHandle(await self._control.deps.fabric.handle(instance_id))
            text = "".join([piece async for piece in instance.logs(tail, False)])
        except AenvError as exc:  # one that ends meanwhile keeps no other from being read
            text = exc.message
        return "".join(f"{instance_id}: {line}\n" for line in text.splitlines())

    # --- answers ----------------------------------------------------------------------------

    async def _owned(self, asked: Asked[Any, Any]) -> ServiceRecord:
        return owned(asked.principal, asked.path["id"], await self._services.records.all())

    async def _shown(self, request: Request, record: ServiceRecord) -> ServiceObject:
        return (await self._objects(request, [record]))[0]

    async def _objects(self, request: Request, records: list[ServiceRecord]) -> list[ServiceObject]:
        states = await self._services.states(records)
        entries: dict[str, EnvironmentVersion | None] = {}
        for record in records:
            if record.reference not in entries:
                entries[record.reference] = await self._entry(record)
        return [
            service_object(
                record, state, self._control.service_url(request, record.id),
                entries[record.reference],
            )
            for record, state in zip(records, states, strict=True)
        ]  # fmt: skip

    async def _entry(self, record: ServiceRecord) -> EnvironmentVersion | None:
        name, _, version = record.reference.partition("@")
        try:
            return await self._control.deps.hub.environment(name, version)
        except EnvironmentNotFound:
            return None  # built in, or a path


def _is_of(record: ServiceRecord, name: str, version: str | None) -> bool:
    own_name, _, own_version = record.reference.partition("@")
    return own_name == name and version in (None, own_version)


def _owner(principal: Principal, asked: str | None) -> str:
    """Return whose a service is.

    Raises:
        Forbidden: An owner asks in another's name.
    """
    if not asked or asked == principal.owner:
        return principal.owner
    if not principal.is_admin:
        raise Forbidden(
            f"this token is of {principal.owner!r}, and cannot act for {asked!r}",
            hint="leave the owner out, or use that owner's token",
        )
    return asked
