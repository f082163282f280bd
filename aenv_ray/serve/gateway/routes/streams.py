"""Control routes whose answer goes on: what an instance prints, and how its status changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

import pydantic_core
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from aenv_ray.errors import (
    AenvError,
    InstanceExpired,
    InstanceNotFound,
    InstanceReleased,
    SandboxLost,
    to_wire,
)
from aenv_ray.hub.records import Lease
from aenv_ray.models import InstanceStatus
from aenv_ray.serve.gateway.routes.control import Control
from aenv_ray.serve.gateway.routes.endpoint import Asked, Endpoint, Nothing
from aenv_ray.serve.gateway.routes.shapes import LogsQuery

TAG: Final = "instances"
_LOOK_S: Final = 0.5
_BEAT_S: Final = 15.0
"""A comment this often keeps proxies from closing a silent stream."""
_ENDED: Final = frozenset({InstanceStatus.FAILED, InstanceStatus.TERMINATED})


def endpoints(control: Control) -> list[Endpoint]:
    """Return the routes."""
    routes = StreamRoutes(control)
    gone = (InstanceNotFound, InstanceExpired, InstanceReleased, SandboxLost)
    return [
        Endpoint("GET", "/instances/{id}/logs", routes.logs, "What an instance printed", TAG,
                 query=LogsQuery, errors=gone, media="text/plain"),
        Endpoint("GET", "/instances/{id}/events", routes.events, "Server-sent events: the "
                 "instance whenever its status or deadline changes, until it has ended", TAG,
                 query=Nothing, errors=(InstanceNotFound,), media="text/event-stream"),
    ]  # fmt: skip


class StreamRoutes:
    """The handlers."""

    def __init__(self, control: Control) -> None:
        self._control = control

    async def logs(self, asked: Asked[LogsQuery, None]) -> Response:
        """Stream text. What goes wrong before the first piece is a typed answer."""
        instance = await self._control.live(asked.principal, asked.path["id"])
        if asked.query.follow:
            await instance.info()  # an instance that is gone is told with its status
            pieces = instance.logs(asked.query.tail, True)
            return StreamingResponse(_text(pieces), media_type="text/plain")
        pieces = instance.logs(asked.query.tail, False)
        first = [piece async for piece in pieces]
        return Response("".join(first), media_type="text/plain")

    async def events(self, asked: Asked[Nothing, None]) -> Response:
        """Stream changes."""
        lease = await self._control.owned(asked.principal, asked.path["id"])
        return StreamingResponse(
            self._changes(asked, lease),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    async def _changes(self, asked: Asked[Any, None], lease: Lease) -> AsyncIterator[bytes]:
        try:
            async for change in self._watched(asked, lease):
                yield change
        except AenvError as exc:  # the hub went away: the answer has begun
            yield _sse("error", to_wire(exc))

    async def _watched(self, asked: Asked[Any, None], lease: Lease) -> AsyncIterator[bytes]:
        said: tuple[Any, ...] | None = None
        silent_s = 0.0
        while True:
            lease = await self._control.looked_at(lease)
            now = (lease.status, lease.deadline, lease.reason)
            if now != said:
                yield await self._event(asked.request, lease)
                said, silent_s = now, 0.0
            elif silent_s >= _BEAT_S:
                yield b": still so\n\n"
                silent_s = 0.0
            if lease.status in _ENDED:
                return
            await asyncio.sleep(_LOOK_S)
            silent_s += _LOOK_S
            try:
                lease = await self._control.deps.hub.lease(lease.id)
            except InstanceNotFound:
                lease = lease.model_copy(update={"status": InstanceStatus.TERMINATED})

    async def _event(self, request: Request, lease: Lease) -> bytes:
        return _sse("status", await self._control.listed(request, lease))


def _sse(event: str, data: Any) -> bytes:
    return b"event: " + event.encode() + b"\ndata: " + pydantic_core.to_json(data) + b"\n\n"


async def _text(pieces: Any) -> AsyncIterator[bytes]:
    """Yield a followed log; that the instance ended is its end."""
    with contextlib.suppress(InstanceExpired, InstanceReleased, SandboxLost):
        async for piece in pieces:
            yield piece.encode()
