"""Calls of the gateway's clients to services: to a replica that Serve chooses, once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any, Final

from ray import exceptions as ray_exceptions
from ray.serve.exceptions import RayServeException, ReplicaUnavailableError

from aenv_ray.actors.calls.call_batching import Reports
from aenv_ray.actors.calls.json_calls import HOST_GRACE_S, JsonCall
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.errors import (
    AenvError,
    CallCancelled,
    CallOutcomeUnknown,
    DeadlineExceeded,
    FabricUnavailable,
)
from aenv_ray.runtime.door.async_calls import Departure
from aenv_ray.serve.services.apps import app_name

_CANCEL_S: Final = 10.0
_TRIES: Final = 5
"""Replicas that may go, one after the other, just when a call has chosen them."""
_NO_REPLICA_S: Final = 60.0
"""A call waits so long for a replica that is free."""


def service_of(target: str) -> str:
    """Return the id of the service that a target names."""
    return target.partition("@")[0]


def target_of(service_id: str, revision: str) -> str:
    """Return what names a service and which revision of it, for what is remembered of it."""
    return f"{service_id}@{revision}"


class ServiceCalls:
    """`aenv_ray.serve.gateway.data.calls.Calls` to services."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}

    async def call(self, call: JsonCall, departure: Departure, name: str = "") -> bytes:
        """Run a call and return its result as JSON text.

        Args:
            call: The call.
            departure: Of its client.
            name: By which `cancel` stops it; empty: it cannot.

        Raises:
            CallOutcomeUnknown: Its replica died while it ran.
            FabricUnavailable: No replica is free, or healthy; nothing ran.
            AenvError: As `ServiceReplica.call_json`.
            CallCancelled: The client went away.
        """
        if name:
            async with contextlib.aclosing(self.follow(call, name, departure)) as rounds:
                async for news in rounds:
                    if isinstance(news, bytes):
                        return news
        call.message()  # what cannot be is refused here
        handle = (await self._handle(call)).options(method_name="call_json")
        with _errors(call.what, call.target):
            for left in reversed(range(_TRIES)):
                try:
                    async with self._dispatched(handle, call, departure) as response:
                        result: bytes = await response
                        return result
                except ReplicaUnavailableError:
                    if not left:
                        raise
                    # It went before anything was sent to it.
        raise AssertionError("a call returns or raises")

    async def follow(
        self, call: JsonCall, name: str, departure: Departure
    ) -> AsyncGenerator[Reports | bytes]:
        """Run a call; yield what it reports, in rounds, then its result as JSON text.

        Raises:
            AenvError: As `call`.
        """
        call.message()
        handle = (await self._handle(call)).options(method_name="follow_json", stream=True)
        with _errors(call.what, call.target):
            for left in reversed(range(_TRIES)):
                try:
                    async with self._dispatched(handle, call, departure, name) as response:
                        async for news in response:
                            yield news
                        return
                except ReplicaUnavailableError:
                    if not left:
                        raise

    async def sandbox(self, service_id: str, session: str) -> str:
        """Return the instance that a client's connection goes to: its session's, else any.

        Raises:
            FabricUnavailable: No replica is free, or healthy.
            SessionLost: The one that had the session's state is gone; told once.
        """
        handle = (await self._found(service_id)).options(method_name="sandbox")
        if session:
            handle = handle.options(session_id=session)
        what = f"finding a sandbox of {service_id}"
        with _errors(what, service_id):
            try:
                async with asyncio.timeout(_NO_REPLICA_S):
                    return str(await handle.remote())
            except TimeoutError as exc:
                if isinstance(exc, AenvError | ray_exceptions.RayError):
                    raise
                raise FabricUnavailable(
                    f"{what}: no replica is free", hint="aenv service get tells why"
                ) from None

    async def cancel(self, instance_id: str, name: str) -> None:
        """Stop a followed call by its name, whichever replica runs it."""
        handle = await self._found(service_of(instance_id))
        response = handle.broadcast("cancel_named", name)
        with _errors("cancelling", instance_id):
            await asyncio.to_thread(response.results, timeout_s=_CANCEL_S)

    @contextlib.asynccontextmanager
    async def _dispatched(
        self, handle: Any, call: JsonCall, departure: Departure, *more: Any
    ) -> AsyncIterator[Any]:
        """Yield the response to a call that one replica gets.

        Serve would send a plain call again, elsewhere, when its replica died before it said that
        it took the call. The tool may have run by then; so a replica is chosen first.
        """
        arguments = (call.method, dict(call.params), dict(call.meta), *more)
        choosing = handle.choose_replica(*arguments)
        try:
            async with asyncio.timeout(_NO_REPLICA_S):
                selection = await choosing.__aenter__()
        except TimeoutError:
            raise FabricUnavailable(
                f"{call.what}: no replica of {service_of(call.target)} is free",
                hint="aenv service get tells why; more replicas take more calls",
            ) from None
        try:
            async with asyncio.timeout(call.timeout_s + HOST_GRACE_S):
                response = handle.dispatch(selection, *arguments)
                if not call.has_id:
                    departure.listen(response.cancel)
                yield response
        except TimeoutError as exc:
            if isinstance(exc, AenvError | ray_exceptions.RayError):
                raise
            raise DeadlineExceeded(f"{call.what} had no answer in time") from exc
        finally:
            await choosing.__aexit__(None, None, None)

    async def _handle(self, call: JsonCall) -> Any:
        handle = await self._found(service_of(call.target))
        return handle.options(session_id=call.session) if call.session else handle

    async def _found(self, service_id: str) -> Any:
        known = self._handles.get(service_id)
        if known is None:
            known = self._handles[service_id] = await asyncio.to_thread(_app_handle, service_id)
        return known


def _app_handle(service_id: str) -> Any:
    from ray import serve

    try:
        return serve.get_app_handle(app_name(service_id))
    except RayServeException as exc:
        raise FabricUnavailable(
            f"service {service_id} is not deployed: {exc}", hint="it is being made, or it ended"
        ) from exc


@contextlib.contextmanager
def _errors(what: str, target: str) -> Iterator[None]:
    """Turn what Serve and Ray raise about a service into ours."""
    service_id = service_of(target)
    try:
        with ray_api.translated(what):
            try:
                yield
            except (ray_exceptions.RayActorError, ray_exceptions.NodeDiedError) as exc:
                raise CallOutcomeUnknown(
                    f"{what}: the replica of {service_id} died while it ran",
                    hint="whether it ran cannot be known; it was not run again",
                ) from exc
    except ray_exceptions.TaskCancelledError:
        raise CallCancelled(f"{what}: the client went away") from None
    except RayServeException as exc:
        raise FabricUnavailable(f"{what}: {service_id} takes no call: {exc}") from exc
