"""The public door: HTTP on one port, compatible with AEnvironment's environment server.

| route | method | answer |
|---|---|---|
| ``/mcp`` | POST, GET, DELETE | MCP over streamable HTTP, versions with and without sessions |
| ``/functions/list`` | GET | the functions, rewards and health check |
| ``/functions/<name>``, or the endpoint | the function's, POST by default | a function's result |
| ``/task/reward``, ``/task/reward/<name>`` | POST | the default reward, or a named one |
| ``/health`` | GET | 200 when healthy, 503 when not |

Arguments are a JSON object; for GET they are the query. ``/task/reward?name=`` also names a reward.
Responses are ``{"success": true, "data": …}`` or ``{"success": false, "error": "…", "code": "…"}``.
The header ``aenv-timeout-s`` sets a timeout. When a client disconnects, its call is cancelled,
unless the client has given the call an id (header ``aenv-call-id``), with which it can ask again.

This module is imported on demand: it loads Starlette and, for ``/mcp``, FastMCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from aenv_ray.runtime.api.registry import DEFAULT_REWARD_PATH, Registered
from aenv_ray.runtime.api.results import to_json
from aenv_ray.runtime.door.answers import EncodedOutcome
from aenv_ray.runtime.door.async_calls import TIMEOUT_S, AsyncCalls, Disconnect, read_outcome
from aenv_ray.runtime.door.dispatch import HEALTHY, Dispatcher
from aenv_ray.runtime.faults import Fault
from aenv_ray.runtime.public.requests import (
    BadRequest,
    BodyLimit,
    SameOrigin,
    body_arguments,
    query_arguments,
    read_arguments,
    read_meta,
    watch,
)

BODY_LIMIT_BYTES: Final = 64 * 1024 * 1024
HEALTH_TIMEOUT_S: Final = 10.0
DRAIN_S: Final = 1
"""How long running calls may take when the server stops; then they are cancelled."""
KEEP_ALIVE_S: Final = 75
"""Longer than clients keep idle connections open, so that the client closes first."""

_DATA_PREFIX: Final = b'"result":{"data":'
_STATUS: Final = {
    "config_error": 400,
    "file_access_error": 400,
    "tool_not_found": 404,
    "tool_input_invalid": 422,
    "call_cancelled": 499,
    "sandbox_start_failed": 502,
    "tool_timeout": 504,
    "call_outcome_unknown": 504,
}
"""HTTP status by error code; 500 for all others."""


def build_app(
    dispatcher: Dispatcher,
    *,
    name: str = "aenv-server",
    body_limit_bytes: int = BODY_LIMIT_BYTES,
) -> ASGIApp:
    """Return the ASGI application. Its server must run the lifespan protocol.

    Args:
        dispatcher: Runs the calls. If it has a load error, all calls are answered with that.
        name: The MCP server's name.
        body_limit_bytes: Largest request body; a larger one gets 413.
    """
    _quiet_fastmcp()
    from fastmcp.server.http import HostOriginGuardMiddleware

    from aenv_ray.runtime.public.mcp import McpEndpoint

    calls = AsyncCalls(dispatcher)
    mcp = McpEndpoint(calls, name=name, body_limit_bytes=body_limit_bytes)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with mcp.lifespan():
            yield
            await calls.stop("the server stops")

    app = Starlette(
        routes=[Route("/mcp", mcp), *_Routes(calls).build()],
        lifespan=lifespan,
        exception_handlers={
            HTTPException: _refuse_route,
            BadRequest: _refuse_request,
            ClientDisconnect: _disconnected,
        },
    )
    app.state.dispatcher = dispatcher
    # A web page must not call tools of a server on its visitor's machine (DNS rebinding).
    return HostOriginGuardMiddleware(SameOrigin(BodyLimit(app, body_limit_bytes)), mode="auto")


def _quiet_fastmcp() -> None:
    """Turn off FastMCP's coloured logs, boxed tracebacks and update checks.

    FastMCP reads these variables when it is imported.
    """
    for setting, value in {
        "FASTMCP_ENABLE_RICH_LOGGING": "false",
        "FASTMCP_ENABLE_RICH_TRACEBACKS": "false",
        "FASTMCP_LOG_LEVEL": "ERROR",
        "FASTMCP_SHOW_SERVER_BANNER": "false",
        "FASTMCP_CHECK_FOR_UPDATES": "off",
    }.items():
        os.environ.setdefault(setting, value)


class _Routes:
    """All routes except ``/mcp``."""

    def __init__(self, calls: AsyncCalls) -> None:
        self._calls = calls
        self._dispatcher = calls.dispatcher

    def build(self) -> list[Route]:
        routes = [
            Route("/functions/list", self._listing, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route(DEFAULT_REWARD_PATH, self._reward, methods=["POST"]),
            Route(DEFAULT_REWARD_PATH + "/{aenv_reward}", self._reward, methods=["POST"]),
        ]
        functions = self._dispatcher.registry.functions.values()
        return routes + [
            Route(f.endpoint, self._function(f), methods=[f.method]) for f in functions
        ]

    async def _listing(self, request: Request) -> Response:
        del request
        if self._dispatcher.load_error is not None:
            return _failure(Fault("sandbox_start_failed", self._dispatcher.load_error))
        return _success(self._dispatcher.registry.listing())

    def _function(self, entry: Registered) -> Callable[[Request], Any]:
        async def call(request: Request) -> Response:
            arguments = await read_arguments(request, entry.method, entry.signature.schema)
            params = {"name": entry.name, "arguments": {**request.path_params, **arguments}}
            return await self._answer(request, "aenv/function", params)

        return call

    async def _reward(self, request: Request) -> Response:
        name = request.path_params.get("aenv_reward") or request.query_params.get("name")
        arguments = await body_arguments(request)
        return await self._answer(request, "aenv/reward", {"name": name, "arguments": arguments})

    async def _health(self, request: Request) -> Response:
        entry = self._dispatcher.registry.health
        params = {
            "arguments": query_arguments(request, entry.signature.schema if entry else {}),
            "_meta": {TIMEOUT_S: HEALTH_TIMEOUT_S, **read_meta(request)},
        }
        try:
            data = read_outcome(await self._calls.call("aenv/health", params))["data"]
        except Fault as fault:
            if fault.code == "tool_input_invalid":
                return _failure(fault)
            data = {"status": "unhealthy", "message": fault.message, "code": fault.code}
        if data["status"] not in HEALTHY:
            return _success(data, 503)
        if data["status"] == "ok":
            data["status"] = "healthy"  # AEnvironment's client waits for this or "success"
        return _success(data)

    async def _answer(self, request: Request, method: str, params: dict[str, Any]) -> Response:
        disconnect = Disconnect()
        watching = asyncio.create_task(watch(request.receive, disconnect))
        try:
            outcome = await self._calls.call(
                method, {**params, "_meta": read_meta(request)}, disconnect=disconnect
            )
        finally:
            watching.cancel()
        return _response(outcome)


# --- answers -------------------------------------------------------------------------------------


def _success(data: Any, status: int = 200) -> Response:
    return _json(b'{"success":true,"data":' + to_json(data) + b"}", status)


def _failure(fault: Fault) -> Response:
    status = _STATUS.get(fault.code, 500)
    data = fault.data()
    return _json(to_json({"success": False, "error": data.pop("message"), **data}), status)


def _response(outcome: EncodedOutcome) -> Response:
    if outcome.startswith(_DATA_PREFIX):
        # The same bytes that the fast door sends.
        return _json(b'{"success":true,' + outcome[len(b'"result":{') :], 200)
    try:
        return _success(read_outcome(outcome))
    except Fault as fault:
        return _failure(fault)


def _json(body: bytes, status: int) -> Response:
    return Response(body, status, media_type="application/json")


async def _refuse_route(request: Request, exc: Exception) -> Response:
    """Answer a request without a route: with the load error, if there is one."""
    assert isinstance(exc, HTTPException)
    dispatcher: Dispatcher = request.app.state.dispatcher
    path = request.url.path
    if dispatcher.load_error is not None:
        return _failure(Fault("sandbox_start_failed", dispatcher.load_error))
    if exc.status_code == 405:
        message = f"{path} does not take {request.method}, only {(exc.headers or {}).get('Allow')}"
        body = {"success": False, "error": message, "code": "config_error"}
    else:
        known = ", ".join(sorted(dispatcher.registry.functions)) or "none"
        body = {
            "success": False,
            "error": f"there is no route {path}; the environment's functions are: {known}",
            "code": "tool_not_found",
        }
    response = _json(to_json(body), exc.status_code)
    response.headers.update(exc.headers or {})
    return response


async def _refuse_request(request: Request, exc: Exception) -> Response:
    del request
    assert isinstance(exc, BadRequest)
    return exc.response()


async def _disconnected(request: Request, exc: Exception) -> Response:
    """Answer a client that disconnected while it sent its request; only the log shows this."""
    del request, exc
    return Response(status_code=499)


# --- serving -------------------------------------------------------------------------------------


class Server(uvicorn.Server):
    """An HTTP server on a bound socket, which reports when it listens.

    Args:
        app: The application from `build_app`.
        listener: Bound socket; the server closes it.
        on_listening: Called once the server accepts connections.
        access_log: Log every request.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        on_listening: Callable[[], None],
        *,
        access_log: bool = False,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="info" if access_log else "warning",
                access_log=access_log,
                lifespan="on",
                ws="none",
                timeout_graceful_shutdown=DRAIN_S,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self._listener = listener
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: D102
        await super().startup(sockets)
        self._on_listening()

    def run_until_stopped(self) -> None:
        """Serve until a signal, or until `should_exit` is set."""
        self.run(sockets=[self._listener])
