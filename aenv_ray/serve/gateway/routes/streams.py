"""Control routes that stream: the output of an instance, and changes of its status."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final

import pydantic_core
from fastapi import Query
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from aenv_ray.errors import (
    AenvError,
    InstanceExpired,
    InstanceNotFound,
    InstanceReleased,
    SandboxLost,
    Unauthorized,
    to_wire,
)
from aenv_ray.hub.records import Lease
from aenv_ray.models import InstanceStatus
from aenv_ray.serve.gateway.data.document import failures
from aenv_ray.serve.gateway.routes.control import RouteCall
from aenv_ray.serve.gateway.routes.routing import UserCall, control_router
from aenv_ray.serve.gateway.routes.schemas import LogsQuery

router = control_router("instances")

_POLL_S: Final = 0.5
_HEARTBEAT_S: Final = 15.0
"""A comment this often stops proxies from closing a silent stream."""
_FINAL: Final = frozenset({InstanceStatus.FAILED, InstanceStatus.TERMINATED})
_ENDED: Final = (InstanceExpired, InstanceReleased, SandboxLost)


class EventStreamResponse(StreamingResponse):
    """Server-sent events."""

    media_type = "text/event-stream"


@router.get(
    "/instances/{id}/logs",
    response_class=PlainTextResponse,
    responses=failures(InstanceNotFound, *_ENDED),
)
async def logs(call: UserCall, id: str, query: Annotated[LogsQuery, Query()]) -> Response:
    """Show or follow the output of an instance."""
    instance = await call.live(id)
    if query.follow:
        await instance.info()  # before the answer begins: an ended instance has its own status
        pieces = instance.logs(query.tail, True)
        return StreamingResponse(_until_ended(call, pieces), media_type="text/plain")
    text = "".join([piece async for piece in instance.logs(query.tail, False)])
    return PlainTextResponse(text)


async def _until_ended(call: RouteCall, pieces: AsyncIterator[str]) -> AsyncIterator[bytes]:
    """Yield the output until the instance, or the validity of the caller's token, has ended."""
    with contextlib.suppress(*_ENDED, Unauthorized):
        async for piece in pieces:
            await call.control.deps.authenticate.check_again(call.request)
            yield piece.encode()


@router.get(
    "/instances/{id}/events",
    response_class=EventStreamResponse,
    responses=failures(InstanceNotFound),
)
async def events(call: UserCall, id: str) -> Response:
    """Stream server-sent events: the instance whenever its status or deadline changes."""
    lease = await call.owned(id)
    return EventStreamResponse(
        _changes(call, lease),
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _changes(call: RouteCall, lease: Lease) -> AsyncIterator[bytes]:
    try:
        async for change in _watch(call, lease):
            yield change
    except AenvError as exc:  # the hub is away, or the token revoked, and the answer has begun
        yield _event("error", to_wire(exc))


async def _watch(call: RouteCall, lease: Lease) -> AsyncIterator[bytes]:
    """Yield an event for every change, until the instance has ended."""
    sent: tuple[Any, ...] | None = None
    silent_s = 0.0
    while True:
        lease = await call.control.refreshed(lease)
        state = (lease.status, lease.deadline, lease.reason)
        if state != sent:
            yield _event("status", await call.listed(lease))
            sent, silent_s = state, 0.0
        elif silent_s >= _HEARTBEAT_S:
            yield b": no change\n\n"
            silent_s = 0.0
        if lease.status in _FINAL:
            return
        await asyncio.sleep(_POLL_S)
        silent_s += _POLL_S
        await call.control.deps.authenticate.check_again(call.request)
        try:
            lease = await call.hub.lease(lease.id)
        except InstanceNotFound:
            lease = lease.model_copy(update={"status": InstanceStatus.TERMINATED})


def _event(event: str, data: Any) -> bytes:
    return b"event: " + event.encode() + b"\ndata: " + pydantic_core.to_json(data) + b"\n\n"
