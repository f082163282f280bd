"""One replica of a service: its sandbox, and calls to it.

``serve.get_app_handle("aenv-service-<name>")`` gives callers inside the cluster a handle with the
methods of `ServiceReplica`. Calls of ``handle.options(session_id=…)`` reach the same sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from aenv_ray import logs
from aenv_ray.actors.calls.call_batching import Reports
from aenv_ray.actors.calls.handle import bare_tool_name
from aenv_ray.actors.calls.json_calls import InstanceCalls, JsonCall
from aenv_ray.actors.calls.parameters import object_of
from aenv_ray.actors.calls.wire import decode_json
from aenv_ray.actors.fabric import driver_api
from aenv_ray.actors.fabric.async_fabric import AsyncFabric
from aenv_ray.actors.fabric.catalog import Catalog
from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.actors.fabric.engine_choice import likely_engine
from aenv_ray.actors.fabric.fabric import Fabric
from aenv_ray.actors.ray_shell import operator_policy, ray_api, ray_serve
from aenv_ray.background_tasks import end_task
from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.clock import SystemClock
from aenv_ray.config import settings as process_settings
from aenv_ray.errors import (
    GONE,
    CallCancelled,
    CallOutcomeUnknown,
    CatalogConflict,
    FabricUnavailable,
    InstanceError,
    InstanceNotFound,
    ServiceUnavailable,
    ToolError,
    ToolTimeout,
)
from aenv_ray.hub.artifacts import open_artifact_store
from aenv_ray.hub.client import HubClient
from aenv_ray.hub.hub_actor import ensure_hub
from aenv_ray.hub.services import ServiceRecord, is_alone
from aenv_ray.hub.storages import StorageRecords
from aenv_ray.models import InstanceStatus, ToolResult
from aenv_ray.project import project
from aenv_ray.project.config import DeployChanges
from aenv_ray.project.project import Project
from aenv_ray.runtime.door.async_calls import CALL_ID, TIMEOUT_S, Disconnect, timeout_of
from aenv_ray.runtime.door.caller import DEFAULT_TIMEOUT_S
from aenv_ray.serve.services import storage as service_storage
from aenv_ray.serve.services.sandbox import LEASE_S, OrphanSandboxes, ReplicaSandbox
from aenv_ray.serve.services.sessions import Sessions

logger = logging.getLogger(__name__)

SERVICE_LABEL: Final = "aenv.service"
"""Label with the service id, on every sandbox of a service."""
UID_LABEL: Final = "aenv.service-uid"
"""Label with the uid of the service, which tells apart services that had the same id."""
REPLICA_LABEL: Final = "aenv.replica"
"""Label with the actor name of the replica, on every sandbox of a service."""

SERVICE_UID: Final = "aenv/service_uid"
"""Key of a call's ``_meta`` for the uid of the service that the gateway means. A replica of an
earlier version ignores it."""
STORAGE_S: Final = 180.0
"""How long to wait for a storage volume: a stopping replica keeps it until its calls end."""
_LOOK_S: Final = 5.0
"""Interval at which a replica asks which nodes are leaving."""


class ServiceReplica:
    """Owns one sandbox at a time, and releases it when it ends.

    Args:
        record: `ServiceRecord` as JSON data.
        artifacts_url: Artifact store with the source archives. None means the node's setting.
    """

    async def __init__(self, record: dict[str, Any], artifacts_url: str | None = None) -> None:  # type: ignore[misc]  # Serve awaits it
        logs.configure("service")
        self._record = ServiceRecord.model_validate(record)
        self._fabric, hub = await asyncio.to_thread(_connected)
        self._instances = AsyncFabric(self._fabric)
        self._calls = InstanceCalls(self._instances.handle, self._instances.forget)
        self._sessions = Sessions(hub, self._record.owner, self._record.uid, self._is_alive)
        self._project = await _project(self._record, hub, artifacts_url)
        self._storages = StorageRecords(hub)
        self._name = ray_serve.current_replica()
        self._orphans = OrphanSandboxes(
            self._name, self._sandboxes, self._instances.release, _is_replica_alive
        )
        self._sandbox = ReplicaSandbox(
            self._make, SystemClock(), self._record.healthy_within_s, self._record.owner
        )
        await self._sandbox.open()
        self._is_displaced = False
        self._watching = asyncio.create_task(self._watch_nodes())

    async def __del__(self) -> None:
        """Release the sandbox; Serve calls this once all calls have ended."""
        watching = getattr(self, "_watching", None)
        if watching is not None:
            await end_task(watching)
        sandbox = getattr(self, "_sandbox", None)
        if sandbox is not None:
            await sandbox.close()
            self._calls.close()

    async def check_health(self) -> None:
        """Raise if the environment is unhealthy, so that Serve replaces the replica.

        It is replaced as well if its node or that of its sandbox is to be stopped, unless Serve
        replaces it anyway.
        """
        if self._is_displaced:
            raise FabricUnavailable(
                "its node is to be stopped: another replica takes over",
                hint="aenv cluster nodes shows the node",
            )
        await self._sandbox.check()

    async def _watch_nodes(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                self._is_displaced = await self._loses_node()
            except Exception as exc:  # noqa: BLE001  # the head may be restarting; it is asked again
                logger.info("it is unknown whether the sandbox's node leaves: %r", exc)

    async def _loses_node(self) -> bool:
        """Whether this replica must end because its node, or that of its sandbox, is to be stopped.

        From a node that is to be stopped Serve itself moves replicas: it starts another one before
        it ends this one. But that one would wait in vain for a storage volume with a single writer,
        which the sandbox of this one has, wherever it is.
        """
        leaving = await asyncio.to_thread(ray_api.leaving_nodes)
        if not leaving:
            return False
        if ray_api.node_id() in leaving:
            return is_alone(self._record)
        instance = await self._sandbox.instance()
        return (await self._instances.info(instance.instance_id)).node_id in leaving

    async def facts(self) -> dict[str, str]:
        """Return the instance id of the sandbox, and the revision of the service."""
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
        """Call a tool; a tool that raises gives a result with ``is_error``."""
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
        """Return the return value of a function."""
        params = {"name": name, "arguments": object_of(name, arguments)}
        return await self._call("aenv/function", params, timeout_s, call_id)

    async def call_reward(
        self,
        arguments: Mapping[str, Any] | None = None,
        name: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        call_id: str | None = None,
    ) -> Any:
        """Return the return value of a reward; `name` None means the default reward."""
        params = {"name": name, "arguments": object_of(name or "reward", arguments)}
        return await self._call("aenv/reward", params, timeout_s, call_id)

    async def list_tools(self) -> list[dict[str, Any]]:
        """Return MCP tool objects."""
        return list(await self._call("tools/list", {}))

    async def list_functions(self) -> dict[str, Any]:
        """Return functions, rewards and health checks."""
        return dict(await self._call("aenv/functions", {}))

    async def health(self, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer of the environment's health check: ``status`` and more."""
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
    #
    # Serve finds replicas by the name of their service, which another owner may have taken while a
    # call waited. So the gateway says which service it means.

    async def call_json(
        self, method: str, params: Mapping[str, Any], meta: Mapping[str, Any]
    ) -> bytes:
        """Run a call and return its result as JSON text.

        Raises:
            ServiceUnavailable: The call is for another service that had, or has, the same name.
            SessionLost: The sandbox with the session's state is gone. Raised once.
            CallOutcomeUnknown: The sandbox ended during a call with a client's id.
            AenvError: As `JsonCalls.call`.
        """
        call = await self._placed(method, params, meta)
        with self._noting_end(call):
            try:
                return await self._calls.call(call, Disconnect())
            except GONE as exc:
                raise await self._lost_error(exc, call) from exc

    async def follow_json(
        self, method: str, params: Mapping[str, Any], meta: Mapping[str, Any], name: str
    ) -> AsyncGenerator[Reports | bytes]:
        """Run a call; yield batches of progress reports, then the result as JSON text.

        Raises:
            AenvError: As `call_json`.
        """
        call = await self._placed(method, params, meta)
        with self._noting_end(call):
            try:
                async for news in self._calls.follow(call, name, Disconnect()):
                    yield news
            except GONE as exc:
                raise await self._lost_error(exc, call) from exc

    async def sandbox(self, uid: str = "") -> str:
        """Return the instance of the caller's session, or else that of this replica.

        Args:
            uid: The service that the caller means; "" means whichever has the name.

        Raises:
            ServiceUnavailable: It is another service.
            SessionLost: The sandbox with the session's state is gone. Raised once.
        """
        self._check_uid(uid)
        own = (await self._sandbox.instance()).instance_id
        session = ray_serve.current_session()
        return await self._sessions.holder(session, own) if session else own

    async def cancel_named(self, name: str, uid: str = "") -> str:
        """Cancel a call in this replica's sandbox by its name, and return the sandbox's id.

        Unknown names do nothing. `uid` and errors are those of `sandbox`.
        """
        self._check_uid(uid)
        own = (await self._sandbox.instance()).instance_id
        await self._calls.cancel(own, name)
        return own

    async def _placed(
        self, method: str, params: Mapping[str, Any], meta: Mapping[str, Any]
    ) -> JsonCall:
        """Return the call, addressed to the sandbox that must run it."""
        self._check_uid(str(meta.get(SERVICE_UID) or ""))
        own = (await self._sandbox.instance()).instance_id
        session, call_id = ray_serve.current_session(), meta.get(CALL_ID)
        holder = await self._sessions.holder(session, own) if session else own
        if call_id is not None:
            timeout_s = timeout_of(meta.get(TIMEOUT_S))
            holder = await self._sessions.holder_of_call(str(call_id), holder, timeout_s)
        return JsonCall(holder, method, params, meta, session)

    def _check_uid(self, uid: str) -> None:
        if uid and uid != self._record.uid:
            raise ServiceUnavailable(
                f"a replica of another service {self._record.id} got the call; nothing ran",
                hint="the service was deleted, and its name is in use again: aenv service list",
            )

    @contextlib.contextmanager
    def _noting_end(self, call: JsonCall) -> Iterator[None]:
        """Note that a call with a client's id has ended, if the block has its outcome."""
        has_ended = False
        try:
            yield
            has_ended = True
        except ToolError as exc:
            # A repeated call may time out, or be cancelled, while the first one runs.
            has_ended = not isinstance(exc, ToolTimeout | CallCancelled)
            raise
        finally:
            if has_ended and call.has_id:
                self._sessions.note_ended(str(call.meta[CALL_ID]))

    async def _lost_error(self, error: InstanceError, call: JsonCall) -> InstanceError:
        """Return the error for the caller of a call whose sandbox is gone."""
        self._sandbox.lose(call.target)
        if call.session:
            lost = await self._sessions.note_gone(call.session, call.target)
            return error if lost is None else lost
        if call.has_id:
            return CallOutcomeUnknown(
                f"{call.what}: {error.message}",
                instance_id=call.target,
                hint="it is unknown whether the call ran; if it may run twice, use a new call id",
            )
        return error

    # --- the sandbox ------------------------------------------------------------------------

    async def _make(self) -> AsyncEnvHandle:
        record, storage = self._record, self._record.storage
        node_ids: tuple[str, ...] = ()
        await self._end_orphans()
        if storage is not None:
            engine = await asyncio.to_thread(
                lambda: likely_engine(
                    self._project, operator_policy.current(), record.engine, record.changes
                )
            )
            storage, node_ids = await service_storage.placed(self._storages, storage, engine)
        options = CreateOptions(
            actor="shared",
            lifetime="detached",
            ttl=LEASE_S,
            engine=record.engine,
            environment_variables=record.environment_variables,
            fabric_labels={
                SERVICE_LABEL: record.id,
                UID_LABEL: record.uid,
                REPLICA_LABEL: self._name,
            },
            owner=record.owner,
            changes=None if record.changes == DeployChanges() else record.changes,
            storage=storage,
            node_ids=node_ids,
        )
        options.near_node = ray_api.node_id()  # calls to it then pass through no other process
        instance = await AsyncEnvHandle.create_of(self._fabric, self._project, options)
        try:
            if storage is not None and not storage.is_made:
                await service_storage.note_made(self._storages, storage)
        except BaseException:
            await asyncio.shield(instance.release())
            raise
        return instance

    async def _end_orphans(self) -> None:
        """End orphan sandboxes; before using a single-writer storage volume, wait for all others.

        Raises:
            FabricUnavailable: Another sandbox still has the storage, or the state is unknown.
        """
        if is_alone(self._record):
            await self._orphans.end_all(SystemClock(), STORAGE_S)
            return
        try:
            await self._orphans.end()
        except FabricUnavailable as exc:  # they expire with their leases
            logger.warning("orphan sandboxes of %s not ended: %s", self._record.id, exc.message)

    async def _sandboxes(self) -> dict[str, str]:
        """Return the sandboxes of this service: instance ids with the names of their replicas."""
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


async def _is_replica_alive(name: str) -> bool:
    return await asyncio.to_thread(ray_serve.is_replica_alive, name)


def _connected() -> tuple[Fabric, HubClient]:
    return driver_api.init(), ensure_hub()


async def _project(record: ServiceRecord, hub: HubClient, artifacts_url: str | None) -> Project:
    """Return the project, with its files on this node.

    Raises:
        CatalogConflict: It has changed since the service was deployed.
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
            f"{record.reference} has changed since service {record.id} was deployed",
            hint="deploy or update the service again to use the current content",
        )
    return found
