"""One replica of a service: a sandbox of the environment, and calls to it.

Its methods are what ``serve.get_app_handle("aenv-service-<name>")`` offers inside the cluster.
Calls of a handle made by ``.options(session_id=…)`` stay with the sandbox that the first reached.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, Final

from aenv_ray.actors.calls.call_batching import Reports
from aenv_ray.actors.calls.handle import bare_tool_name
from aenv_ray.actors.calls.json_calls import InstanceCalls, JsonCall
from aenv_ray.actors.calls.parameters import object_of
from aenv_ray.actors.calls.wire import decode_json
from aenv_ray.actors.fabric import entrance
from aenv_ray.actors.fabric.catalog import Catalog
from aenv_ray.actors.fabric.create_options import CreateOptions, chosen_engine
from aenv_ray.actors.fabric.fabric import Fabric
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.client.over_ray import RayInstance
from aenv_ray.clock import SystemClock
from aenv_ray.config import settings as process_settings
from aenv_ray.errors import (
    CallOutcomeUnknown,
    CatalogConflict,
    FabricUnavailable,
    InstanceError,
    InstanceNotFound,
)
from aenv_ray.hub.artifacts import open_artifact_store
from aenv_ray.hub.client import RemoteHub
from aenv_ray.hub.hub_actor import ensure_hub
from aenv_ray.hub.services import ServiceRecord, is_alone
from aenv_ray.hub.storages import StorageRecords
from aenv_ray.models import InstanceStatus, ToolResult
from aenv_ray.project import project
from aenv_ray.project.config import DeployChanges
from aenv_ray.project.project import Project
from aenv_ray.runtime.door.async_calls import CALL_ID, TIMEOUT_S, Departure
from aenv_ray.runtime.door.calls import DEFAULT_TIMEOUT_S
from aenv_ray.serve.gateway.ray_instances import RayInstances
from aenv_ray.serve.services import storage as service_storage
from aenv_ray.serve.services.orphan_sandboxes import LeftSandboxes
from aenv_ray.serve.services.sandbox import GONE, LEASE_S, ReplicaSandbox
from aenv_ray.serve.services.sessions import Sessions

logger = logging.getLogger(__name__)

SERVICE_LABEL: Final = "aenv.service"
"""On every sandbox of a service: its id."""
REPLICA_LABEL: Final = "aenv.replica"
"""On every sandbox of a service: the name of the actor that owns it."""

STORAGE_S: Final = 180.0
"""A replica that ends may have calls under way for two minutes, and has the storage until then."""


class ServiceReplica:
    """Owns a sandbox, and ends with it.

    Args:
        record: `ServiceRecord` as JSON data.
        artifacts_url: Where source archives are kept; None: as its node says.
    """

    async def __init__(self, record: dict[str, Any], artifacts_url: str | None = None) -> None:  # type: ignore[misc]  # Serve awaits it
        self._record = ServiceRecord.model_validate(record)
        self._fabric, hub = await asyncio.to_thread(_connected)
        self._instances = RayInstances(self._fabric)
        self._calls = InstanceCalls(self._instances)
        self._sessions = Sessions(hub, self._record.uid, self._is_alive)
        self._project = await _project(self._record, hub, artifacts_url)
        self._storages = StorageRecords(hub)
        self._name, is_there = _own_name(), _is_there
        self._left = LeftSandboxes(self._name, self._sandboxes, self._instances.release, is_there)
        self._sandbox = ReplicaSandbox(self._make, SystemClock(), self._record.healthy_within_s)
        await self._sandbox.open()

    async def __del__(self) -> None:
        """End the sandbox; Serve calls it once no call is under way."""
        sandbox = getattr(self, "_sandbox", None)
        if sandbox is not None:
            await sandbox.close()

    async def check_health(self) -> None:
        """Let Serve replace a replica whose environment is not healthy."""
        await self._sandbox.check()

    async def facts(self) -> dict[str, str]:
        """Return which sandbox it has, and of which revision it is."""
        instance = await self._sandbox.instance()
        return {"instance_id": instance.instance_id, "revision": self._record.revision}

    # --- what handles call ------------------------------------------------------------------

    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        call_id: str | None = None,
    ) -> ToolResult:
        """Call a tool; one that raises is a result."""
        bare = bare_tool_name(name, self._project.reference)
        params = {"name": bare, "arguments": object_of(bare, arguments)}
        result = await self._call("tools/call", params, timeout_s, call_id)
        assert isinstance(result, ToolResult)
        return result

    async def call_function(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        call_id: str | None = None,
    ) -> Any:
        """Return what a function returned."""
        params = {"name": name, "arguments": object_of(name, arguments)}
        return await self._call("aenv/function", params, timeout_s, call_id)

    async def call_reward(
        self,
        arguments: Mapping[str, Any] | None = None,
        name: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        call_id: str | None = None,
    ) -> Any:
        """Return what a reward returned; `name` None is the default one."""
        params = {"name": name, "arguments": object_of(name or "reward", arguments)}
        return await self._call("aenv/reward", params, timeout_s, call_id)

    async def list_tools(self) -> list[dict[str, Any]]:
        """Return MCP tool objects."""
        return list(await self._call("tools/list", {}))

    async def list_functions(self) -> dict[str, Any]:
        """Return functions, rewards and health checks."""
        return dict(await self._call("aenv/functions", {}))

    async def health(self, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return what the environment's health function says: ``status`` and more."""
        return dict(await self._call("aenv/health", {"arguments": object_of("health", arguments)}))

    async def _call(
        self,
        method: str,
        params: Mapping[str, Any],
        timeout_s: float = DEFAULT_TIMEOUT_S,
        call_id: str | None = None,
    ) -> Any:
        meta = {TIMEOUT_S: timeout_s} | ({} if call_id is None else {CALL_ID: call_id})
        return decode_json(method, await self.call_json(method, params, meta))

    # --- what the gateway calls -------------------------------------------------------------

    async def call_json(
        self, method: str, params: Mapping[str, Any], meta: Mapping[str, Any]
    ) -> bytes:
        """Run a call of the data side and return its result as JSON text.

        Raises:
            SessionLost: The sandbox that kept the session's state is gone; told once.
            CallOutcomeUnknown: The sandbox went while a named call ran.
            AenvError: As `InstanceCalls.call`.
        """
        call = await self._placed(method, params, meta)
        try:
            return await self._calls.call(call, Departure())
        except GONE as exc:
            raise await self._told(exc, call) from exc

    async def follow_json(
        self, method: str, params: Mapping[str, Any], meta: Mapping[str, Any], name: str
    ) -> AsyncGenerator[Reports | bytes]:
        """Run a call; yield what it reports, then its result as JSON text.

        Raises:
            AenvError: As `call_json`.
        """
        call = await self._placed(method, params, meta)
        try:
            async for news in self._calls.follow(call, name, Departure()):
                yield news
        except GONE as exc:
            raise await self._told(exc, call) from exc

    async def sandbox(self) -> str:
        """Return the instance that the caller's session is bound to, else this replica's.

        Raises:
            SessionLost: The sandbox that kept the session's state is gone; told once.
        """
        own = (await self._sandbox.instance()).instance_id
        session = _session()
        return await self._sessions.holder(session, own) if session else own

    async def cancel_named(self, name: str) -> None:
        """Stop a followed call that this replica's sandbox runs; an unknown name does nothing."""
        instance = await self._sandbox.instance()
        await self._calls.cancel(instance.instance_id, name)

    async def _placed(
        self, method: str, params: Mapping[str, Any], meta: Mapping[str, Any]
    ) -> JsonCall:
        """Return a call for the sandbox that it has to run in."""
        own = (await self._sandbox.instance()).instance_id
        session, call_id = _session(), meta.get(CALL_ID)
        holder = own
        if session:
            holder = await self._sessions.holder(session, own)
        elif call_id is not None:
            holder = await self._sessions.holder_of_call(str(call_id), own)
        return JsonCall(holder, method, params, meta, session)

    async def _told(self, error: InstanceError, call: JsonCall) -> InstanceError:
        """Return what the caller of a call is told whose sandbox went."""
        self._sandbox.lose(call.target)
        if call.session:
            told = await self._sessions.note_gone(call.session, call.target)
            return error if told is None else told
        if call.has_id:
            return CallOutcomeUnknown(
                f"{call.what}: {error.message}",
                instance_id=call.target,
                hint="whether it ran cannot be known; if it may run again, ask with another id",
            )
        return error

    # --- the sandbox ------------------------------------------------------------------------

    async def _make(self) -> RayInstance:
        record, storage = self._record, self._record.storage
        node_ids: tuple[str, ...] = ()
        engine = chosen_engine(self._project, record.engine)
        await self._end_left()
        if storage is not None:
            storage, node_ids = await service_storage.placed(self._storages, storage, engine)
        options = CreateOptions(
            actor="shared",
            lifetime="detached",
            ttl=LEASE_S,
            engine=record.engine,
            environment_variables=record.environment_variables,
            labels={SERVICE_LABEL: record.id, REPLICA_LABEL: self._name},
            owner=record.owner,
            changes=None if record.changes == DeployChanges() else record.changes,
            storage=storage,
            node_ids=node_ids,
        )
        (handle,) = await asyncio.to_thread(self._fabric.create, self._project, 1, options)
        if storage is not None and not storage.is_made:
            await service_storage.note_made(self._storages, storage)
        return RayInstance(handle)

    async def _end_left(self) -> None:
        """End the sandboxes that nobody has any more; of a storage with one writer, await the rest.

        Raises:
            FabricUnavailable: Another sandbox has the storage still, or that is not known.
        """
        if is_alone(self._record):
            await self._left.end_all(SystemClock(), STORAGE_S)
            return
        try:
            await self._left.end()
        except FabricUnavailable as exc:  # they end with their leases
            logger.warning("what %s left is not known: %s", self._record.id, exc.message)

    async def _sandboxes(self) -> dict[str, str]:
        """Return the replicas of this service's sandboxes, by instance id."""
        return {
            info.id: info.labels.get(REPLICA_LABEL, "")
            for info in await self._instances.list_instances()
            if info.labels.get(SERVICE_LABEL) == self._record.id
        }

    async def _is_alive(self, instance_id: str) -> bool:
        try:
            info = await self._instances.info(instance_id)
        except InstanceNotFound:
            return False
        return info.status is InstanceStatus.RUNNING


def _own_name() -> str:
    """Return the name of the actor that this replica is."""
    from ray import serve

    return serve.get_replica_context().replica_id.to_full_id_str()


async def _is_there(replica: str) -> bool:
    """Whether the actor of a replica lives, as Ray's head knows; a busy one does."""
    return await asyncio.to_thread(ray_api.is_replica_there, replica)


def _connected() -> tuple[Fabric, RemoteHub]:
    return entrance.init(), ensure_hub()


async def _project(record: ServiceRecord, hub: RemoteHub, artifacts_url: str | None) -> Project:
    """Return the project on this node.

    Raises:
        CatalogConflict: It is not what it was when the service was deployed.
        AenvError: As `Catalog`.
    """
    if project.looks_like_path(record.reference):
        found = project.load(Path(record.reference))
    else:
        own = process_settings()
        url = artifacts_url or own.artifacts_url
        store = open_artifact_store(own.model_copy(update={"artifacts_url": url}))
        try:
            found = await Catalog(hub, store, own.data_dir)(record.reference)
        finally:
            store.close()
    if found.digest != record.digest:
        raise CatalogConflict(
            f"{record.reference} is not what service {record.id} was deployed with",
            hint="deploy or update the service again to have what is there now",
        )
    return found


def _session() -> str:
    """Return the session of the call that is being served; empty: it has none."""
    from ray.serve.context import _get_serve_request_context

    return str(_get_serve_request_context().session_id)
