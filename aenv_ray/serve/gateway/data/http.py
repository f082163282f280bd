"""Shared by the data routes: detection of disconnected clients, and the public door's answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from aenv_ray.errors import AenvError, ToolInputInvalid, to_wire
from aenv_ray.runtime.api.results import to_json
from aenv_ray.runtime.door.async_calls import Disconnect
from aenv_ray.runtime.public.requests import BadRequest, BodyLimit, watch
from aenv_ray.serve.gateway.envelope import error_headers

JSON: Final = "application/json"
_WATCH_AFTER_S: Final = 0.02
"""Most calls end sooner. Watching each call from its start would add a tenth to its cost."""


@contextlib.asynccontextmanager
async def watched_disconnect(receive: Receive) -> AsyncIterator[Disconnect]:
    """Yield a `Disconnect` that happens when the client disconnects. Read the body before."""
    disconnect = Disconnect()
    loop = asyncio.get_running_loop()
    watching: asyncio.Task[None] | None = None

    def begin() -> None:
        nonlocal watching
        watching = loop.create_task(watch(receive, disconnect))

    due = loop.call_later(_WATCH_AFTER_S, begin)
    try:
        yield disconnect
    finally:
        due.cancel()
        if watching is not None:
            watching.cancel()


def door_failure(error: AenvError) -> Response:
    """Return an error as the public door does: ``{"success": false, "error", "code"}``."""
    data = to_wire(error)
    body = {"success": False, "error": data.pop("message"), **data}
    return Response(to_json(body), error.http_status, headers=error_headers(error), media_type=JSON)


Serve = Callable[[Request, Send], Awaitable[Response | None]]
"""Returns the answer to a request; None if it has sent the answer."""


def proxy_app(
    serve: Serve, limit_bytes: int, refusal: Callable[[AenvError], Response] = door_failure
) -> ASGIApp:
    """Return an ASGI application that answers as the public door does.

    Args:
        serve: Checks the caller's access before it reads the body.
        limit_bytes: Largest body; a larger one gets status 413.
        refusal: Returns the answer to a request that raised an error.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await serve(Request(scope, receive), send)
        except BadRequest as exc:
            scope["aenv.error"] = ToolInputInvalid(str(exc))  # as the answer says
            response = exc.response()
        except ClientDisconnect:
            response = Response(status_code=499)
        except AenvError as exc:
            scope["aenv.error"] = exc
            response = refusal(exc)
        if response is not None:
            await response(scope, receive, send)

    return BodyLimit(answer, limit_bytes)
