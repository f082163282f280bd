"""The ASGI middleware around every route: request id, error answers, access log, request limit.

Plain ASGI, because the data routes stream and the hot path must cost microseconds.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import secrets
import sys
import time
from typing import Any, Final

import pydantic_core
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aenv_ray.errors import AenvError, CapacityExceeded, FabricUnavailable
from aenv_ray.serve.gateway.envelope import error_response
from aenv_ray.serve.gateway.metrics import Metrics
from aenv_ray.serve.gateway.requests import STREAMED, ClientLeft

access = logging.getLogger("aenv_ray.access")

SMALL_BODY_BYTES: Final = 64 * 1024
_FLUSH_S: Final = 0.1
"""How long a log line may wait to be written together with others."""
_MAX_LINES: Final = 200
"""Lines that are written together."""
_MAX_CHARACTERS: Final = 200
"""Maximum number of characters of the path in a log line."""
_DATA_KINDS: Final = ("/mcp", "/ports/", "/files", "/functions", "/task/reward", "/health")
"""Kinds of data routes by a part of their path; the path of a function may be anything else."""

_VALID_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_ID_PREFIX = secrets.token_hex(6)
"""The prefix of the request ids that this process generates."""
_NUMBERS = itertools.count(1)
_STARTS: Final = frozenset(
    {"http.response.start", "websocket.http.response.start", "websocket.accept"}
)
_SWITCHING_PROTOCOLS: Final = 101
_WEBSOCKET_REFUSED: Final = 403
"""The server's answer to a WebSocket that is closed before it was accepted."""
_CLIENT_LEFT: Final = 499


def write_to_stderr() -> None:
    """Write the access log to this process's standard error, which Ray stores."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access.handlers = [handler]
    access.propagate = False
    access.setLevel(logging.INFO)


class AccessLog:
    """Writes one JSON line for every request, and counts it. Use it on one event loop.

    A line says who, what and how it ended; it holds no body, no header and no query. Lines are
    written in batches: one write each would cost more than the rest of a small request.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lines: list[bytes] = []
        self._flush_timer: asyncio.TimerHandle | None = None

    def began(self) -> None:
        """Note that a request arrived."""
        self._metrics.request_began()

    def ended(self, scope: Scope, status: int, seconds: float, sent: int) -> None:
        """Note how a request ended; status 499: the client left before the answer began."""
        error = scope.get("aenv.error")
        code = error.code if isinstance(error, AenvError) else type(error).__name__
        route = route_of(scope)
        self._metrics.request_ended(route, status, seconds, code if error is not None else None)
        if access.isEnabledFor(logging.INFO):
            line = _line(scope, route, status, seconds, sent, code)
            self._lines.append(pydantic_core.to_json(line))
            if len(self._lines) >= _MAX_LINES:
                self.flush()
            elif self._flush_timer is None:
                loop = asyncio.get_running_loop()
                self._flush_timer = loop.call_later(_FLUSH_S, self.flush)

    def flush(self) -> None:
        """Write the pending lines."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if self._lines:
            lines, self._lines = self._lines, []
            access.info("%s", b"\n".join(lines).decode(errors="replace"))


def route_of(scope: Scope) -> str:
    """Return the method and path template of a request's route: a bounded set of names."""
    control_route = scope.get("aenv.route")
    if control_route is not None:
        return str(control_route)
    if scope.get("endpoint") is None:
        return "none"
    path = str(scope["path"])
    return f"data {next((kind for kind in _DATA_KINDS if kind in path), 'function')}"


def _line(
    scope: Scope, route: str, status: int, seconds: float, sent: int, code: str
) -> dict[str, Any]:
    principal = scope.get("aenv.principal")
    line = {
        "request_id": scope.get("aenv.request_id"),
        "route": route,
        "path": scope["path"][:_MAX_CHARACTERS],
        "status": status,
        "ms": round(seconds * 1000, 2),
        "bytes": sent,
    }
    if principal is not None:
        line |= {"token": principal.token_id, "owner": principal.owner}
    if scope.get("aenv.error") is not None:
        line["error"] = code
    return line


class GatewayMiddleware:
    """Gives every request an id, logs it, and turns exceptions into error answers.

    Args:
        app: The routes.
        log: Told of every request.
        limit: Concurrent requests; further ones get a retryable error.
        bodies_bytes: Bodies of requests that are held at a time. Then a request with a larger body
            than `SMALL_BODY_BYTES` gets a retryable error.
    """

    def __init__(
        self,
        app: ASGIApp,
        log: AccessLog,
        limit: int = 4096,
        bodies_bytes: int = 256 * 1024 * 1024,
    ) -> None:
        self._app = app
        self._log = log
        self._limit = limit
        self._bodies_bytes = bodies_bytes
        self._in_progress = 0
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or one WebSocket from its handshake to its end."""
        request_id = _request_id(scope)
        scope["aenv.request_id"] = request_id
        scope["app"] = self._app  # then Starlette's routes raise 404 and 405 instead of answering
        began = time.perf_counter()
        self._log.began()
        status, sent, held = 0, 0, 0

        async def receive_noting() -> Message:
            nonlocal held
            message = await receive()
            size = len(message.get("body") or b"")
            if size and STREAMED not in scope:
                held += size
                self._held_bytes += size
                if self._held_bytes > self._bodies_bytes and held > SMALL_BODY_BYTES:
                    raise CapacityExceeded(
                        f"this gateway replica holds its limit of {self._bodies_bytes:,} bytes of "
                        "request bodies",
                        hint="try again in a moment, send smaller bodies, or run more replicas",
                    )
            return message

        async def send_noting(message: Message) -> None:
            nonlocal status, sent
            kind = message["type"]
            if kind in _STARTS:
                status = message.get("status", _SWITCHING_PROTOCOLS)
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                ]
            elif kind == "websocket.close":
                status = status or _WEBSOCKET_REFUSED
            else:
                sent += len(
                    message.get("body") or message.get("bytes") or message.get("text") or b""
                )
            await send(message)

        self._in_progress += 1
        try:
            if self._in_progress > self._limit:
                raise FabricUnavailable(
                    f"this gateway replica is serving its limit of {self._limit:,} requests",
                    hint="try again in a moment, or run more replicas",
                )
            await self._app(scope, receive_noting, send_noting)
        except (ClientLeft, ClientDisconnect):
            pass  # there is nobody to answer
        except Exception as exc:
            if status:
                raise  # the answer has begun: breaking the connection tells the client
            response = error_response(HTTPConnection(scope), exc)
            await response(scope, receive, send_noting)
        finally:
            self._in_progress -= 1
            self._held_bytes -= held
            seconds = time.perf_counter() - began
            self._log.ended(scope, status or _CLIENT_LEFT, seconds, sent)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _VALID_ID.fullmatch(value):
            return bytes(value).decode()
    return f"{_ID_PREFIX}{next(_NUMBERS):08x}"
