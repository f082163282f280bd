"""The outermost layer of every request: its id, its errors, its line in the access log.

Plain ASGI, because the data routes stream and the hot path must cost microseconds.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aenv_ray.errors import AenvError, ConfigError, InternalError
from aenv_ray.serve.envelope import failure

logger = logging.getLogger(__name__)

REQUEST_ID: Final = "X-Request-ID"
_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class Front:
    """Gives every request an id, turns what leaves the routes as an error into an answer.

    Args:
        app: What answers.
        observe: Told of every answered request: scope, status, seconds, bytes sent.
    """

    def __init__(self, app: ASGIApp, observe: Observer) -> None:
        self._app = app
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope["aenv.request_id"] = request_id
        scope["app"] = self._app  # by which Starlette's routes know to raise, not to answer in text
        began = time.perf_counter()
        status, sent = 0, 0

        async def noting(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                ]
            elif message["type"] == "http.response.body":
                sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception as exc:
            if status:
                raise  # the answer has begun: the connection breaks, which the client sees
            await on_error(Request(scope), exc)(scope, receive, noting)
        finally:
            self._observe(scope, status, time.perf_counter() - began, sent)


class Observer:
    """Is told of every request; see `Front`."""

    def __call__(self, scope: Scope, status: int, seconds: float, sent: int) -> None:
        """Note one request. `status` 0: the client left before an answer began."""


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ID.fullmatch(value):
            return bytes(value).decode()
    return secrets.token_hex(8)


def on_error(request: Request, error: Exception) -> Response:
    """Return the answer to a request that failed.

    Our errors are told as they are. Anything else is our bug: it is logged with the request's id,
    and the answer says no more than that id.
    """
    request.scope["aenv.error"] = error
    if isinstance(error, AenvError):
        return failure(error)
    if isinstance(error, HTTPException):
        hint = {404: "GET /openapi.json lists all routes"}.get(error.status_code)
        return failure(
            ConfigError(f"{request.method} {request.url.path}: {error.detail}", hint=hint),
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
