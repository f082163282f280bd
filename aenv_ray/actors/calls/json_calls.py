"""Calls to instances as JSON text, for processes that forward the calls of others.

Such a process keeps no state of a call beyond waiting for it. Calls to an instance on the same node
go to its sandbox directly, after a few calls through its host (see `local_door`); all others go
through the host (see `call_batching`). Either way the host passes on cancellations, so another
process can cancel the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from aenv_ray.actors.calls.call_batching import (
    BatchClient,
    BatchClients,
    BatchedCall,
    Reports,
    call_name,
    fail_cancelled,
)
from aenv_ray.actors.calls.caller_notes import HeldReports
from aenv_ray.actors.calls.handle import EnvHandle, host_of
from aenv_ray.actors.calls.local_door import LocalDoor, NotDirect
from aenv_ray.actors.calls.parameters import call_id_of
from aenv_ray.actors.calls.wire import CallMessage, call_message
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.bounded_cache import BoundedCache
from aenv_ray.errors import GONE, InstanceNotFound
from aenv_ray.ids import InstanceId
from aenv_ray.runtime.door.async_calls import CALL_ID, LONGEST_CALL_S, TIMEOUT_S, Disconnect
from aenv_ray.runtime.door.caller_link import OFFERS
from aenv_ray.runtime.door.subscriptions import SESSION

T = TypeVar("T")

HOST_GRACE_S: Final = 90.0
"""Added to a call's own deadline: the time for a host to restart and adopt its sandboxes."""
_CANCEL_S: Final = 10.0
"""How long a host may take to receive a cancellation."""
MAX_DOORS: Final = 256
"""Direct connections of one process. Beyond it, the least recently used one is closed, once the
calls over it have ended."""
_MAX_KNOWN: Final = 20_000
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
    own_meta: Mapping[str, Any] = field(default_factory=dict)
    """What this process adds to ``_meta``; a client cannot."""

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
            more_meta={key: self.meta[key] for key in _PASSED_ON if key in self.meta}
            | dict(self.own_meta),
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
        self._clients = BatchClients()
        self._open_doors: BoundedCache[str, LocalDoor] = BoundedCache(
            MAX_DOORS, on_evict=LocalDoor.close_when_idle
        )
        self._closed_doors: BoundedCache[str, LocalDoor] = BoundedCache(
            _MAX_KNOWN, on_evict=LocalDoor.close
        )
        """They count the calls through the hosts, and may be opening."""
        self._remote: BoundedCache[str, bool] = BoundedCache(_MAX_KNOWN)
        """Instances that cannot be called directly."""
        self._direct: set[_DirectCall] = set()

    def close(self) -> None:
        """Close the direct connections; calls that are running continue through the hosts."""
        for sent in self._direct:
            sent.door.close()
        self._closed_doors.clear()
        self._open_doors.clear()

    async def call(self, call: JsonCall, disconnect: Disconnect, name: str = "") -> bytes:
        """See `JsonCalls.call`."""
        sent = await self._send(call, name)
        try:
            return await self._wait(sent.result, sent.cancel, call, disconnect)
        finally:
            sent.forget()

    async def follow(
        self, call: JsonCall, name: str, disconnect: Disconnect
    ) -> AsyncGenerator[Reports | bytes]:
        """See `JsonCalls.follow`."""
        progress = _Progress()
        sent = await self._send(call, name, progress.add)
        sent.result.add_done_callback(progress.end)
        try:
            while True:
                news = await self._wait(progress.next(sent.result), sent.cancel, call, disconnect)
                yield news
                if isinstance(news, bytes):
                    return
        finally:
            if call.has_id:
                sent.forget()
            else:
                sent.cancel()

    async def cancel(self, target: str, name: str) -> None:
        """See `JsonCalls.cancel`."""
        host = host_of(await self._find(target))
        # Awaited for a short time only: a host that hangs must not hold a request of its caller.
        await ray_api.wait_async(
            host.exchange.remote([], [], [call_name(target, name)]),
            "cancelling a call",
            _CANCEL_S,
            instance_id=target,
        )

    async def _send(
        self, call: JsonCall, name: str, on_progress: Callable[[Reports], None] | None = None
    ) -> BatchedCall | _DirectCall:
        message = call.message()
        handle = await self._find(call.target)
        client, door = self._clients.of(handle), self._door(call.target, handle)
        name = name and call_name(call.target, name)
        if door is None or not door.is_open:
            if door is not None:
                door.note_call_by_host()
            return client.send(message, name, on_progress)
        sent = _DirectCall(door, client, message, name, on_progress)
        self._direct.add(sent)
        sent.task.add_done_callback(lambda _: self._direct.discard(sent))
        return sent

    def _door(self, instance_id: str, handle: EnvHandle) -> LocalDoor | None:
        """Return the door of an instance, open or not; None if it is known to have none here."""
        if self._remote.get(instance_id):
            return None
        door = self._open_doors.get(instance_id) or self._closed_doors.get(instance_id)
        if door is None:
            door = LocalDoor(
                handle,
                on_cancel=self._cancel_direct,
                on_change=lambda door: self._move(instance_id, door),
            )
            self._closed_doors.put(instance_id, door)
        elif door.is_remote:
            self._closed_doors.pop(instance_id)
            self._remote.put(instance_id, True)
            return None
        return door

    def _move(self, instance_id: str, door: LocalDoor) -> None:
        """Take a door that has opened or closed to the others; only open ones are few."""
        if door.is_open and self._closed_doors.get(instance_id) is door:
            self._closed_doors.pop(instance_id)
            self._open_doors.put(instance_id, door)
        elif not door.is_open and self._open_doors.get(instance_id) is door:
            self._open_doors.pop(instance_id)
            self._closed_doors.put(instance_id, door)

    def _cancel_direct(self, name: str) -> None:
        for sent in [sent for sent in self._direct if sent.name == name]:
            sent.cancel()

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
        except GONE as exc:
            for doors in (self._open_doors, self._closed_doors):
                door = doors.pop(call.target)
                if door is not None:
                    door.close()
            if isinstance(exc, InstanceNotFound) or ray_api.is_from_ray(exc):
                self._forget(call.target)  # an answer from a live host keeps the handle
            raise


class _DirectCall:
    """A call to a sandbox; if its connection breaks, it continues through the host.

    It has the interface of a `BatchedCall`.
    """

    def __init__(
        self,
        door: LocalDoor,
        client: BatchClient,
        message: bytes,
        name: str,
        on_progress: Callable[[Reports], None] | None,
    ) -> None:
        self.door = door
        self.name = name
        loop = asyncio.get_running_loop()
        self.result: asyncio.Future[bytes] = loop.create_future()
        self.task = loop.create_task(self._run(client, message, on_progress))

    def cancel(self) -> None:
        """See `BatchedCall.cancel`."""
        fail_cancelled(self.result)
        self.task.cancel()

    def forget(self) -> None:
        """See `BatchedCall.forget`."""
        self.result.cancel()

    async def _run(
        self,
        client: BatchClient,
        message: bytes,
        on_progress: Callable[[Reports], None] | None,
    ) -> None:
        try:
            try:
                result = await self.door.request(
                    CallMessage.decode(message),
                    None if on_progress is None else lambda *report: on_progress([report]),
                )
            except NotDirect:
                self.door.note_call_by_host()
                sent = client.send(message, self.name, on_progress)
                try:
                    result = await sent.result
                finally:
                    sent.cancel()  # does nothing if it has ended
        except Exception as exc:  # noqa: BLE001  # raised to the caller
            if not self.result.done():
                self.result.set_exception(exc)
        else:
            if not self.result.done():
                self.result.set_result(result)


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
