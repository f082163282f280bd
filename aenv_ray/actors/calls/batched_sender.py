"""Sends the calls of a process to many instances in batches, one stream for each host."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aenv_ray.actors.calls.call_batching import BatchClient, BatchClients
from aenv_ray.actors.calls.handle import EnvHandle, host_of
from aenv_ray.actors.calls.wire import CallMessage, decode_json

Send = Callable[[bytes], Awaitable[Any]]
"""Sends a `wire.CallMessage` and returns the value of its result."""


class BatchedSender:
    """Sends calls in batches. Use it on one event loop."""

    def __init__(self) -> None:
        self._clients = BatchClients()

    def to(self, handle: EnvHandle) -> Send:
        """Return a function that sends calls to an instance."""
        client = self._clients.of(host_of(handle))
        return lambda message: _sent(client, message)


async def _sent(client: BatchClient, message: bytes) -> Any:
    call = client.send(message)
    try:
        text = await call.result
    except asyncio.CancelledError:
        client.cancel(call)
        raise
    return decode_json(CallMessage.decode(message).method, text)
