"""A sandbox reached through the fast door: the client side of `aenv_ray.runtime.door`."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pydantic_core

from aenv_ray import errors
from aenv_ray.engines.base import OnProgress, Sandbox, lost
from aenv_ray.ids import InstanceId
from aenv_ray.models import Isolation

_CAUSE_WAIT_S: Final = 2.0
"""How long a broken connection waits to learn why; the launcher tells within milliseconds."""


class DoorSandbox(Sandbox, asyncio.Protocol):
    """A sandbox whose runtime answers on a stream socket.

    Args:
        instance_id: Whose sandbox it is.
        isolation: What separates it from the node.
        start_mode: How it came to be.
        find_cause: Waits for the reason of a broken connection.
    """

    def __init__(
        self,
        instance_id: InstanceId,
        isolation: Isolation,
        start_mode: str,
        find_cause: Callable[[], Awaitable[str]],
    ) -> None:
        self.instance_id = instance_id
        self.isolation = isolation
        self.start_mode = start_mode
        self._find_cause = find_cause
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._progress: dict[int, OnProgress] = {}
        self._buffer = bytearray()
        self._scanned = 0
        self._transport: asyncio.WriteTransport | None = None
        self._loop = asyncio.get_running_loop()
        self._cause: str | None = None
        self._on_end: list[Callable[[str], None]] = []
        self._ending: asyncio.Task[None] | None = None
        self._closed = False

    async def connect(self, sock: socket.socket) -> None:
        """Take over a connected socket."""
        sock.setblocking(False)
        await self._loop.create_connection(lambda: self, sock=sock)

    # --- asyncio.Protocol ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        self._transport = transport  # type: ignore[assignment]  # stream transports write

    def data_received(self, data: bytes) -> None:  # noqa: D102
        buffer = self._buffer
        buffer += data
        while True:
            end = buffer.find(b"\n", self._scanned)
            if end < 0:
                self._scanned = len(buffer)
                return
            message = pydantic_core.from_json(memoryview(buffer)[:end].tobytes())
            del buffer[: end + 1]
            self._scanned = 0
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        if not self._closed:
            self._ending = self._loop.create_task(self._learn_cause(exc))

    def _on_message(self, message: dict[str, Any]) -> None:
        request_id = message.get("id")
        if request_id is None:
            params = message.get("params") or {}
            listener = self._progress.get(params.get("progressToken"))
            if listener is not None:
                listener(params["progress"], params.get("total"), params.get("message"))
            return
        future = self._pending.pop(request_id, None)
        if future is not None and not future.done():
            future.set_result(message)

    async def _learn_cause(self, exc: Exception | None) -> None:
        try:
            async with asyncio.timeout(_CAUSE_WAIT_S):
                cause = await self._find_cause()
        except TimeoutError:
            cause = f"the connection to it broke ({exc or 'closed'})"
        self.end(cause)

    # --- Sandbox ------------------------------------------------------------------------------

    def end(self, cause: str) -> None:
        """Note that the sandbox ended and fail what waits for it. The first cause stays."""
        if self._cause is not None:
            return
        self._cause = cause
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(lost(self.instance_id, cause))
        callbacks, self._on_end = self._on_end, []
        for callback in callbacks:
            callback(cause)
        if self._transport is not None:
            self._transport.close()

    @property
    def end_cause(self) -> str | None:  # noqa: D102
        return self._cause

    def on_end(self, callback: Callable[[str], None]) -> None:  # noqa: D102
        if self._cause is not None:
            callback(self._cause)
        else:
            self._on_end.append(callback)

    async def request(  # noqa: D102
        self,
        method: str,
        params: dict[str, Any],
        *,
        deadline_s: float,
        on_progress: OnProgress | None = None,
    ) -> Any:
        if self._cause is not None:
            raise lost(self.instance_id, self._cause)
        request_id = next(self._ids)
        if on_progress is not None:
            self._progress[request_id] = on_progress
            meta = {**params.get("_meta", {}), "progressToken": request_id}
            params = {**params, "_meta": meta}
        future: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._pending[request_id] = future
        self._write({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params})
        timer = self._loop.call_later(deadline_s, self._overdue, future, method, deadline_s)
        try:
            message = await future
        except asyncio.CancelledError:
            self._write(
                {
                    "jsonrpc": "2.0",
                    "method": "notifications/cancelled",
                    "params": {"requestId": request_id},
                }
            )
            raise
        finally:
            timer.cancel()
            self._pending.pop(request_id, None)
            self._progress.pop(request_id, None)
        if "result" in message:
            return message["result"]
        error = message["error"]
        raise errors.from_wire(
            error.get("data") or {"code": "internal_error", "message": error.get("message")},
            instance_id=self.instance_id,
        )

    def _overdue(
        self, future: asyncio.Future[dict[str, Any]], method: str, deadline_s: float
    ) -> None:
        if not future.done():
            future.set_exception(
                errors.CallOutcomeUnknown(
                    f"the sandbox of {self.instance_id} did not answer {method} within "
                    f"{deadline_s:g} s",
                    instance_id=self.instance_id,
                    hint="it may be stuck; release it and create another",
                )
            )

    def _write(self, message: dict[str, Any]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pydantic_core.to_json(message) + b"\n")

    async def close(self) -> None:  # noqa: D102
        self._closed = True
        if self._transport is not None:
            self._transport.close()
        if self._ending is not None:
            self._ending.cancel()
