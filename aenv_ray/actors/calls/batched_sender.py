"""Sends the calls of a process to many instances in batches, one stream for each host."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aenv_ray.actors.calls.call_batching import BatchClient
from aenv_ray.actors.calls.handle import EnvHandle, host_of
from aenv_ray.actors.calls.wire import CallMessage, decode_json
from aenv_ray.bounded_cache import BoundedCache

_MAX_HOSTS: Final = 10_000

Send = Callable[[bytes], Awaitable[Any]]
"""Sends a `wire.CallMessage` and returns the value of its result."""


class BatchedSender:
    """Sends calls in batches. Use it on one event loop."""

    def __init__(self) -> None:
        # A client may be evicted while it has calls: these still end as usual.
        self._clients: BoundedCache[Any, BatchClient] = BoundedCache(_MAX_HOSTS)

    def to(self, handle: EnvHandle) -> Send:
        """Return a function that sends calls to an instance."""
        host = host_of(handle)
        client = self._clients.get(host)
        if client is None:
            client = BatchClient(host.exchange.remote)
            self._clients.put(host, client)
        return lambda message: _sent(client, message)


async def _sent(client: BatchClient, message: bytes) -> Any:
    call = client.send(message)
    try:
        text = await call.result
    except asyncio.CancelledError:
        client.cancel(call)
        raise
    return decode_json(CallMessage.decode(message).method, text)
