"""Calls to instances as JSON text, for processes that forward the calls of others.

Such a process keeps no state of a call beyond waiting for it: progress and cancellation are handled
at the instance's host, so another process can cancel the call (see `call_batching`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from aenv_ray.actors.calls.call_batching import BatchClient, Reports
from aenv_ray.actors.calls.caller_notes import HeldReports
from aenv_ray.actors.calls.handle import EnvHandle, host_of
from aenv_ray.actors.calls.parameters import call_id_of
from aenv_ray.actors.calls.wire import call_message
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.bounded_cache import BoundedCache
from aenv_ray.errors import InstanceNotFound, SandboxLost
from aenv_ray.ids import InstanceId
from aenv_ray.runtime.door.async_calls import CALL_ID, LONGEST_CALL_S, TIMEOUT_S, Disconnect
from aenv_ray.runtime.door.caller_link import OFFERS
from aenv_ray.runtime.door.subscriptions import SESSION

T = TypeVar("T")

HOST_GRACE_S: Final = 90.0
"""Added to a call's own deadline: the time for a host to restart and adopt its sandboxes."""
_CANCEL_S: Final = 10.0
"""How long a host may take to receive a cancellation."""
_MAX_HOSTS: Final = 10_000
_PASSED_ON: Final = (OFFERS, SESSION)
"""What an instance is told of a client's ``_meta``, besides call id and timeout."""


@dataclass(frozen=True)
class JsonCall:
    """One call of a client."""

    target: str
    """An instance id; for a service, see `aenv_ray.serve.services.calls.service_target`."""
    method: str
    """A fast-door method."""
    params: Mapping[str, Any]
    """The parameters, without ``_meta``."""
    meta: Mapping[str, Any]
    """The client's ``aenv/call_id`` and ``aenv/timeout_s``, if any."""
    session: str = ""
    """For a service: calls with the same session reach the same sandbox. "" means no session."""

    @property
    def has_id(self) -> bool:
        """Whether the client chose a call id, and so may repeat the call after a failure."""
        return self.meta.get(CALL_ID) is not None

    @property
    def what(self) -> str:
        """Method and name, for messages."""
        return f"{self.method} {self.params.get('name') or ''}".rstrip()

    @property
    def timeout_s(self) -> Any:
        """Seconds after which the runtime stops the call, as the client wrote them."""
        return self.meta.get(TIMEOUT_S, LONGEST_CALL_S)

    def message(self) -> bytes:
        """Encode the call as a `wire.CallMessage`.

        Raises:
            ToolInputInvalid: The arguments are too large for one message.
            ConfigError: The timeout or the call id is invalid.
        """
        return call_message(
            InstanceId(self.target),
            self.method,
            self.params,
            call_id_of(self.meta.get(CALL_ID)),
            self.timeout_s,
            more_meta={key: self.meta[key] for key in _PASSED_ON if key in self.meta},
        )


class JsonCalls(Protocol):
    """A target to which a process forwards calls: instances, or services."""

    async def call(self, call: JsonCall, disconnect: Disconnect, name: str = "") -> bytes:
        """Run a call and return its result as JSON text.

        If the client disconnects, the call is cancelled unless the client chose its id.
        `cancel` can stop a call that has a `name`.

        Raises:
            AenvError: The call failed, or its target has ended.
            CallCancelled: The client disconnected, or `cancel` stopped the call.
        """
        ...

    def follow(
        self, call: JsonCall, name: str, disconnect: Disconnect
    ) -> AsyncGenerator[Reports | bytes]:
        """Run a call; yield batches of progress reports, then the result as JSON text.

        Arguments and errors are those of `call`.
        """
        ...

    async def cancel(self, target: str, name: str) -> None:
        """Cancel a call by its name, whichever process forwarded it. Unknown names do nothing."""
        ...


class InstanceCalls:
    """Calls to instances.

    Every call has an id, so Ray may send it again after the death of a host without running a tool
    twice.

    Args:
        find: Returns a handle to an instance; raises InstanceNotFound if no host knows it.
        forget: Makes `find` look an instance up again, because its host is gone.
    """

    def __init__(
        self, find: Callable[[str], Awaitable[EnvHandle]], forget: Callable[[str], None]
    ) -> None:
        self._find = find
        self._forget = forget
        # A client may be evicted while it has calls: these still end as usual.
        self._clients: BoundedCache[Any, BatchClient] = BoundedCache(_MAX_HOSTS)

    async def call(self, call: JsonCall, disconnect: Disconnect, name: str = "") -> bytes:
        """See `JsonCalls.call`."""
        client = await self._client(call.target)
        sent = client.send(call.message(), name)
        try:
            return await self._wait(sent.result, lambda: client.cancel(sent), call, disconnect)
        finally:
            client.forget(sent)

    async def follow(
        self, call: JsonCall, name: str, disconnect: Disconnect
    ) -> AsyncGenerator[Reports | bytes]:
        """See `JsonCalls.follow`."""
        client = await self._client(call.target)
        progress = _Progress()
        sent = client.send(call.message(), name, progress.add)
        sent.result.add_done_callback(progress.end)
        try:
            while True:
                news = await self._wait(
                    progress.next(sent.result), lambda: client.cancel(sent), call, disconnect
                )
                yield news
                if isinstance(news, bytes):
                    return
        finally:
            if call.has_id:
                client.forget(sent)
            else:
                client.cancel(sent)

    async def cancel(self, target: str, name: str) -> None:
        """See `JsonCalls.cancel`."""
        host = host_of(await self._find(target))
        # Awaited for a short time only: a host that hangs must not hold a request of its caller.
        await ray_api.wait_async(
            host.exchange.remote([], [], [name]), "cancelling a call", _CANCEL_S, instance_id=target
        )

    async def _client(self, instance_id: str) -> BatchClient:
        host = host_of(await self._find(instance_id))
        client = self._clients.get(host)
        if client is None:
            client = BatchClient(host.exchange.remote)
            self._clients.put(host, client)
        return client

    async def _wait(
        self,
        outcome: Awaitable[T],
        cancel: Callable[[], None],
        call: JsonCall,
        disconnect: Disconnect,
    ) -> T:
        if not call.has_id:
            disconnect.listen(cancel)
        try:
            return await ray_api.wait_async(
                outcome, call.what, call.timeout_s + HOST_GRACE_S, instance_id=call.target
            )
        except asyncio.CancelledError:
            if not call.has_id:
                cancel()
            raise
        except (SandboxLost, InstanceNotFound) as exc:
            if isinstance(exc, InstanceNotFound) or ray_api.is_from_ray(exc):
                self._forget(call.target)  # an answer from a live host keeps the handle
            raise


class _Progress:
    """Reports of one call that its client has not received yet."""

    def __init__(self) -> None:
        self._reports = HeldReports()
        self._changed = asyncio.Event()
        self._has_ended = False

    def add(self, reports: Reports) -> None:
        for report in reports:
            self._reports.add(report)
        self._changed.set()

    def end(self, result: asyncio.Future[bytes]) -> None:
        del result
        self._has_ended = True
        self._changed.set()

    async def next(self, result: asyncio.Future[bytes]) -> Reports | bytes:
        """Return the reports since the last time, or else the result."""
        await self._changed.wait()
        if not self._reports:
            return await result
        taken = list(self._reports)
        self._reports.clear()
        if not self._has_ended:
            self._changed.clear()
        return taken
