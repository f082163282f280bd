"""The outermost layer of every request: its id, its errors, its line in the access log.

Plain ASGI, because the data routes stream and the hot path must cost microseconds.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import secrets
import time
from collections.abc import Awaitable
from typing import Final, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aenv_ray.errors import AenvError, ConfigError, FabricUnavailable, InternalError
from aenv_ray.serve.gateway.envelope import failure

logger = logging.getLogger(__name__)


class ClientLeft(Exception):
    """The client closed the connection before its answer."""


Result = TypeVar("Result")

_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_MINE = secrets.token_hex(6)
"""What the ids that this process makes begin with."""
_NUMBERS = itertools.count(1)
_BEGINNINGS: Final = frozenset(
    {"http.response.start", "websocket.http.response.start", "websocket.accept"}
)
_SWITCHED: Final = 101
"""HTTP's status of a WebSocket."""
_REFUSED: Final = 403
"""What the server answers to one that is closed before it was accepted."""


class Observer:
    """Is told of every request; this one forgets it."""

    def began(self) -> None:
        """Note that one came."""

    def ended(self, scope: Scope, status: int, seconds: float, sent: int) -> None:
        """Note how one ended.

        Args:
            scope: Its scope, with what routes noted in it.
            status: HTTP status; 499: the client left before an answer began.
            seconds: How long it took.
            sent: Bytes of the answer's body.
        """


class Front:
    """Gives every request an id, turns what leaves the routes as an error into an answer.

    Args:
        app: What answers.
        observer: Is told of every request.
        limit: Requests at once; more are told to come again.
    """

    def __init__(self, app: ASGIApp, observer: Observer, limit: int = 4096) -> None:
        self._app = app
        self._limit = limit
        self._under_way = 0
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or one WebSocket from its handshake to its end."""
        request_id = _request_id(scope)
        scope["aenv.request_id"] = request_id
        scope["app"] = self._app  # by which Starlette's routes know to raise, not to answer in text
        began = time.perf_counter()
        self._observer.began()
        status, sent = 0, 0

        async def noting(message: Message) -> None:
            nonlocal status, sent
            kind = message["type"]
            if kind in _BEGINNINGS:
                status = message.get("status", _SWITCHED)
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                ]
            elif kind == "websocket.close":
                status = status or _REFUSED
            else:
                sent += len(
                    message.get("body") or message.get("bytes") or message.get("text") or b""
                )
            await send(message)

        self._under_way += 1
        try:
            if self._under_way > self._limit:
                raise FabricUnavailable("the gateway works on too many requests; try again")
            await self._app(scope, receive, noting)
        except ClientLeft:
            pass  # nobody reads an answer
        except Exception as exc:
            if status:
                raise  # the answer has begun: the connection breaks, which the client sees
            await on_error(HTTPConnection(scope), exc)(scope, receive, noting)
        finally:
            self._under_way -= 1
            self._observer.ended(scope, status or 499, time.perf_counter() - began, sent)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ID.fullmatch(value):
            return bytes(value).decode()
    return f"{_MINE}{next(_NUMBERS):08x}"


def on_error(request: HTTPConnection, error: Exception) -> Response:
    """Return the answer to a request that failed.

    Our errors are told as they are. Anything else is our bug: it is logged with the request's id,
    and the answer says no more than that id.
    """
    request.scope["aenv.error"] = error
    if isinstance(error, AenvError):
        return failure(error)
    if isinstance(error, HTTPException):
        method = request.scope.get("method", "GET")
        hint = {404: "GET /openapi.json lists all routes"}.get(error.status_code)
        return failure(
            ConfigError(f"{method} {request.url.path}: {error.detail}", hint=hint),
            status=error.status_code,
            headers=error.headers,
        )
    request_id = request.scope.get("aenv.request_id", "")
    logger.error("request %s failed", request_id, exc_info=error)
    return failure(
        InternalError(
            f"the gateway failed in request {request_id}", hint="its log has the traceback"
        )
    )


async def unless_left(request: Request, work: Awaitable[Result]) -> Result:
    """Return what `work` gives; when the client leaves before, cancel it.

    Raises:
        ClientLeft: It left.
    """
    task = asyncio.ensure_future(work)
    left = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeft
    finally:
        left.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
