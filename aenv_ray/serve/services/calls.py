"""Calls of the gateway's clients to services. Serve chooses a replica, and gets each call once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

from aenv_ray.actors.calls.call_batching import Reports
from aenv_ray.actors.calls.json_calls import HOST_GRACE_S, InstanceCalls, JsonCall
from aenv_ray.actors.fabric.async_fabric import AsyncFabric
from aenv_ray.actors.ray_shell import ray_api, ray_serve
from aenv_ray.background_tasks import Tasks
from aenv_ray.bounded_cache import BoundedCache
from aenv_ray.errors import AenvError, DeadlineExceeded, FabricUnavailable, ServiceUnavailable
from aenv_ray.models import InstanceInfo
from aenv_ray.runtime.door.async_calls import Disconnect
from aenv_ray.serve.services.apps import app_name
from aenv_ray.serve.services.service_replica import SERVICE_LABEL, SERVICE_UID, UID_LABEL

_CANCEL_S: Final = 10.0
_TRIES: Final = 5
"""How many replicas are tried, if each one ends after it was chosen and before it has the call."""
_REPLICA_WAIT_S: Final = 60.0
"""How long a call waits for a free replica."""
MAX_HANDLES: Final = 1000
"""Handles of services that one process keeps. Beyond it, the least recently used one is ended."""


def service_target(service_id: str, uid: str, revision: str) -> str:
    """Return the `JsonCall.target` of a service.

    Args:
        service_id: Finds the application.
        uid: Replicas of another service of that name, created later or before, refuse the call.
        revision: A new one empties caches.
    """
    return f"{service_id}@{uid}@{revision}"


def service_of(target: str) -> tuple[str, str]:
    """Return id and uid of the service in a target."""
    service_id, uid, _ = target.split("@")
    return service_id, uid


class ServiceCalls:
    """Calls to services; a `JsonCalls`.

    Serve finds an application by its name, which a service of another owner may have taken while a
    call waited. So each call carries the uid of its service, and a replica of another one refuses.

    Args:
        fabric: Lists the sandboxes of services.
        instances: Reaches them past their replicas.
    """

    def __init__(self, fabric: AsyncFabric, instances: InstanceCalls) -> None:
        self._fabric = fabric
        self._instances = instances
        self._ending = Tasks()
        self._handles: BoundedCache[str, Any] = BoundedCache(MAX_HANDLES, on_evict=self._end)

    async def call(self, call: JsonCall, disconnect: Disconnect, name: str = "") -> bytes:
        """See `JsonCalls.call`.

        Raises:
            CallOutcomeUnknown: The replica died during the call.
            ServiceUnavailable: No replica is free or healthy, or the service was deleted, or
                another one has its name; nothing ran.
            AenvError: As `ServiceReplica.call_json`.
            CallCancelled: The client disconnected, or `cancel` stopped the call.
        """
        if name:
            async with contextlib.aclosing(self.follow(call, name, disconnect)) as rounds:
                async for news in rounds:
                    if isinstance(news, bytes):
                        return news
        call.message()  # rejects an invalid call here
        handle = (await self._handle(call)).options(method_name="call_json")
        with ray_serve.translated_call(_what(call)):
            for left in reversed(range(_TRIES)):
                try:
                    async with self._dispatched(handle, call, disconnect) as response:
                        result: bytes = await response
                        return result
                except Exception as exc:
                    if not (left and ray_serve.was_not_sent(exc)):
                        raise
        raise AssertionError("a call returns or raises")

    async def follow(
        self, call: JsonCall, name: str, disconnect: Disconnect
    ) -> AsyncGenerator[Reports | bytes]:
        """See `JsonCalls.follow`; raises as `call`."""
        call.message()
        handle = (await self._handle(call)).options(method_name="follow_json", stream=True)
        with ray_serve.translated_call(_what(call)):
            for left in reversed(range(_TRIES)):
                try:
                    async with self._dispatched(handle, call, disconnect, name) as response:
                        async for news in response:
                            yield news
                        return
                except Exception as exc:
                    if not (left and ray_serve.was_not_sent(exc)):
                        raise

    async def sandbox(self, target: str, session: str) -> str:
        """Return the instance for a client's connection: that of its session, or else any.

        Raises:
            ServiceUnavailable: No replica is free or healthy.
            SessionLost: The sandbox with the session's state is gone. Raised once.
        """
        service_id, uid = service_of(target)
        handle = (await self._handle_of(service_id)).options(method_name="sandbox")
        if session:
            handle = handle.options(session_id=session)
        what = f"finding a sandbox of service {service_id}"
        with ray_serve.translated_call(what):
            async with ray_api.deadline(_REPLICA_WAIT_S, _no_replica(what, service_id)):
                try:
                    return str(await handle.remote(uid))
                except TypeError:  # a replica of an earlier version, which knows no uid
                    return str(await handle.remote())

    async def cancel(self, target: str, name: str) -> None:
        """See `JsonCalls.cancel`; all replicas are asked.

        Serve asks no replica that it is stopping, whose calls run on: their sandboxes are found in
        the list of instances.
        """
        service_id, uid = service_of(target)
        asked: list[str] = []
        try:
            handle = await self._handle_of(service_id)
            with ray_serve.translated_call(f"cancelling a call of service {service_id}"):
                try:
                    asked = await _ask_all(handle, name, uid)
                except TypeError:  # some are of an earlier version, which knows no uid
                    asked = await _ask_all(handle, name)
        finally:
            live = await self._fabric.list_instances()
            ours = [one for one in live if _is_of(one, service_id, uid)]
            async with asyncio.TaskGroup() as group:
                for sandbox in {one.requested_id or one.id for one in ours} - set(asked):
                    group.create_task(self._cancel_in(sandbox, name))

    async def _cancel_in(self, sandbox: str, name: str) -> None:
        with contextlib.suppress(AenvError):  # one that ends meanwhile, or hangs
            await self._instances.cancel(sandbox, name)

    @contextlib.asynccontextmanager
    async def _dispatched(
        self, handle: Any, call: JsonCall, disconnect: Disconnect, *more: Any
    ) -> AsyncIterator[Any]:
        """Send a call to one replica and yield the response.

        With a plain call, Serve sends it to another replica if the first one dies before it
        acknowledges the call, though the tool may have run. So the replica is chosen first.
        """
        service_id, uid = service_of(call.target)
        meta = {**call.meta, SERVICE_UID: uid}
        arguments = (call.method, dict(call.params), meta, *more)
        choosing = handle.choose_replica(*arguments)
        none_free = _no_replica(call.what, service_id)
        async with ray_api.deadline(_REPLICA_WAIT_S, none_free):
            selection = await choosing.__aenter__()
        deadline_s = call.timeout_s + HOST_GRACE_S
        late = DeadlineExceeded(
            f"{_what(call)} had no answer within {deadline_s:g} s",
            hint="raise the timeout of the call",
        )
        try:
            async with ray_api.deadline(deadline_s, late):
                response = handle.dispatch(selection, *arguments)
                if not call.has_id:
                    disconnect.listen(response.cancel)
                yield response
        finally:
            await choosing.__aexit__(None, None, None)

    async def _handle(self, call: JsonCall) -> Any:
        handle = await self._handle_of(service_of(call.target)[0])
        return handle.options(session_id=call.session) if call.session else handle

    async def _handle_of(self, service_id: str) -> Any:
        known = self._handles.get(service_id)
        if known is not None:
            return known
        try:
            found = await asyncio.to_thread(ray_serve.own_handle, app_name(service_id))
        except FabricUnavailable as exc:
            raise ServiceUnavailable(
                f"service {service_id} is not deployed: {exc.message}",
                hint=f"it is being created, or was deleted: aenv service get {service_id}",
            ) from exc
        known = self._handles.get(service_id)
        if known is None:  # else a concurrent call was first; the other handle was never used
            self._handles.put(service_id, found)
        return known or found

    def _end(self, handle: Any) -> None:
        self._ending.spawn(asyncio.to_thread(ray_serve.end_handle, handle))


async def _ask_all(handle: Any, *arguments: str) -> list[str]:
    response = handle.broadcast("cancel_named", *arguments)
    return await asyncio.to_thread(response.results, timeout_s=_CANCEL_S)


def _is_of(info: InstanceInfo, service_id: str, uid: str) -> bool:
    """Whether a sandbox belongs to a service; those of an earlier version have no uid."""
    labels = info.labels
    return labels.get(SERVICE_LABEL) == service_id and labels.get(UID_LABEL, uid) == uid


def _what(call: JsonCall) -> str:
    return f"{call.what} of service {service_of(call.target)[0]}"


def _no_replica(what: str, service_id: str) -> ServiceUnavailable:
    return ServiceUnavailable(
        f"{what}: no replica of service {service_id} was free within {_REPLICA_WAIT_S:g} s",
        hint=f"aenv service get {service_id} shows their state; more replicas take more calls",
    )
