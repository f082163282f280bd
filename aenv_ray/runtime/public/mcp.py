"""``/mcp`` of the public door: FastMCP around the dispatcher.

It serves only tools: an agent cannot call rewards, functions or workspace methods (invariant 8).
FastMCP implements the protocol; schemas, validation and results come from registry and dispatcher.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import pydantic_core
from fastmcp import FastMCP
from fastmcp.exceptions import FastMCPError
from fastmcp.server.dependencies import get_context
from fastmcp.server.middleware import CallNext, Middleware, MiddlewareContext
from fastmcp.tools.base import Tool, ToolResult
from mcp import MCPError
from mcp_types import CallToolRequestParams, CallToolResult, ListToolsRequest
from mcp_types import Tool as McpTool
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from pydantic import PrivateAttr
from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope, Send

from aenv_ray.runtime.api.registry import Registered
from aenv_ray.runtime.door.async_calls import AsyncCalls, Disconnect, read_outcome
from aenv_ray.runtime.faults import FOR_THE_MODEL, Fault, fault_result
from aenv_ray.runtime.public.requests import watch

_DISCONNECT: Final = "aenv.disconnect"
_PROGRESS_BACKLOG: Final = 1000
"""Progress reports queued for a slow client; beyond this the oldest are dropped."""


class _Refusal(FastMCPError):
    """Carries a fault through FastMCP, which converts any other exception to a result."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message, log_level=0)
        self.fault = fault


class _RegisteredTool(Tool):
    """A tool of the registry, called through the dispatcher."""

    _entry: Registered = PrivateAttr()
    _calls: AsyncCalls = PrivateAttr()

    @classmethod
    def of(cls, entry: Registered, calls: AsyncCalls) -> _RegisteredTool:
        listed = entry.mcp_tool()
        tool = cls(
            name=entry.name, description=listed["description"], parameters=listed["inputSchema"]
        )
        tool._entry = entry
        tool._calls = calls
        return tool

    def to_mcp_tool(self, **overrides: Any) -> McpTool:
        return McpTool.model_validate({**self._entry.mcp_tool(), **overrides})

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        request = get_context().request_context
        meta = dict(request.meta or {}) if request else {}
        http = request.request if request else None
        disconnect = http.scope.get(_DISCONNECT) if http is not None else None
        params = {"name": self._entry.name, "arguments": arguments, "_meta": meta}
        if meta.get("progressToken") is None:
            outcome = await self._calls.call("tools/call", params, disconnect=disconnect)
        else:
            async with _progress_to_client() as on_progress:
                outcome = await self._calls.call(
                    "tools/call", params, disconnect=disconnect, on_progress=on_progress
                )
        try:
            result = read_outcome(outcome)
        except Fault as fault:
            if fault.code not in FOR_THE_MODEL:
                raise _Refusal(fault) from None
            result = fault_result(fault)
        return ToolResult.from_mcp_result(CallToolResult.model_validate(result))


@contextlib.asynccontextmanager
async def _progress_to_client() -> AsyncIterator[Any]:
    """Yield a progress callback; its reports are sent, in order, before the block ends."""
    context = get_context()
    reports: asyncio.Queue[tuple[float, float | None, str | None] | None] = asyncio.Queue()

    def on_progress(progress: float, total: float | None, message: str | None) -> None:
        if reports.qsize() >= _PROGRESS_BACKLOG:
            reports.get_nowait()
        reports.put_nowait((progress, total, message))

    async def send() -> None:
        while (report := await reports.get()) is not None:
            try:
                await context.report_progress(*report)
            except Exception:  # noqa: BLE001  # the client is gone; the call goes on
                return

    async with asyncio.TaskGroup() as group:
        group.create_task(send())
        yield on_progress
        reports.put_nowait(None)


class _Refusals(Middleware):
    """Converts faults to MCP errors, with code, hint and context in ``error.data``."""

    def __init__(self, calls: AsyncCalls) -> None:
        self._dispatcher = calls.dispatcher

    def _check_loaded(self) -> None:
        if self._dispatcher.load_error is not None:
            raise _mcp_error(Fault("sandbox_start_failed", self._dispatcher.load_error))

    async def on_list_tools(
        self,
        context: MiddlewareContext[ListToolsRequest],
        call_next: CallNext[ListToolsRequest, Sequence[Tool]],
    ) -> Sequence[Tool]:
        self._check_loaded()
        return await call_next(context)

    async def on_call_tool(
        self,
        context: MiddlewareContext[CallToolRequestParams],
        call_next: CallNext[CallToolRequestParams, ToolResult],
    ) -> ToolResult:
        self._check_loaded()
        try:
            self._dispatcher.registry.tool(context.message.name)
            return await call_next(context)
        except Fault as fault:
            result = CallToolResult.model_validate(fault_result(fault))
            return ToolResult.from_mcp_result(result)
        except _Refusal as refusal:
            raise _mcp_error(refusal.fault) from None


def _mcp_error(fault: Fault) -> Exception:
    error = fault.rpc_error()
    return MCPError(error["code"], error["message"], error["data"])


class McpEndpoint:
    """The ASGI application at ``/mcp``; its `lifespan` must run around it.

    A client that opens a session can cancel calls and get progress. Clients of protocol version
    2026-07-28 and plain POSTs are served without a session.

    Args:
        calls: Runs the calls.
        name: The server's name, for clients.
        body_limit_bytes: Largest request body.
    """

    def __init__(self, calls: AsyncCalls, *, name: str, body_limit_bytes: int) -> None:
        self._body_limit_bytes = body_limit_bytes
        self._server: FastMCP[Any] = FastMCP(
            name,
            tools=[_RegisteredTool.of(t, calls) for t in calls.dispatcher.registry.tools.values()],
            middleware=[_Refusals(calls)],
            dereference_schemas=False,
            strict_input_validation=False,
            on_duplicate="error",
        )
        self._sessions = self._server.http_app(path="/mcp", stateless_http=False)
        self._plain = self._server.http_app(path="/mcp", stateless_http=True, json_response=True)

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Run the session managers."""
        async with (
            self._sessions.lifespan(self._sessions),
            self._plain.lifespan(self._plain),
        ):
            for app in (self._sessions, self._plain):
                _raise_body_limit(app, self._body_limit_bytes)
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102
        disconnect = Disconnect()
        scope[_DISCONNECT] = disconnect
        answer = _Answer(send, may_be_json=scope["method"] == "POST")
        if scope["method"] != "POST":
            await self._sessions(scope, receive, answer)
            await answer.finish()
            return
        body = await read_body(receive)
        if body is None:
            return
        gone = asyncio.Event()
        watching = asyncio.create_task(_watch(receive, disconnect, gone))
        app = self._plain if _is_plain(scope, body) else self._sessions
        try:
            await app(scope, _replay(body, gone), answer)
            await answer.finish()
        finally:
            watching.cancel()


class _Answer:
    """Converts an event stream that contains only the answer to plain JSON.

    The protocol library starts a stream before it knows whether there will be progress reports.
    Clients read JSON faster, and the client of the MCP package refuses events over 1 MiB.
    """

    def __init__(self, send: Send, *, may_be_json: bool) -> None:
        self._send = send
        self._may_be_json = may_be_json
        self._held: Message | None = None
        self._open = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._open = True
            kind = dict(message["headers"]).get(b"content-type", b"")
            if self._may_be_json and kind.startswith(b"text/event-stream"):
                self._held = message
                return
        elif not self._open:
            return
        elif self._held is not None:
            start, self._held = self._held, None
            answer = _only_answer(message.get("body", b""))
            if answer is not None:
                self._open = False
                await self._send_json(start, answer)
                return
            await self._send(start)
        self._open = message.get("more_body", False) or message["type"] == "http.response.start"
        await self._send(message)

    async def finish(self) -> None:
        """End a stream that the library leaves open when the server stops."""
        if self._held is not None:
            await self._send(self._held)
            self._held = None
        if self._open:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_json(self, start: Message, answer: bytes) -> None:
        headers = [h for h in start["headers"] if h[0] not in {b"content-type", b"cache-control"}]
        length = str(len(answer)).encode()
        headers += [(b"content-type", b"application/json"), (b"content-length", length)]
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": answer, "more_body": False})


def _only_answer(event: bytes) -> bytes | None:
    """Return the JSON-RPC response in an event; None for notifications and pings."""
    lines = event.splitlines()
    data = [line[6:] for line in lines if line.startswith(b"data: ")]
    if len(data) != 1:
        return None
    message = pydantic_core.from_json(data[0])
    return data[0] if isinstance(message, dict) and "method" not in message else None


async def read_body(receive: Receive) -> bytes | None:
    """Return the request's body; None when the client disconnected while sending it."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


async def _watch(receive: Receive, disconnect: Disconnect, gone: asyncio.Event) -> None:
    await watch(receive, disconnect)
    gone.set()


def _replay(body: bytes, gone: asyncio.Event) -> Receive:
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if parts:
            return parts.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    return receive


def _is_plain(scope: Scope, body: bytes) -> bool:
    """Whether a POST of an old protocol version neither has a session nor opens one."""
    headers = dict(scope["headers"])
    version = headers.get(b"mcp-protocol-version")
    if version is not None and version.decode("latin-1") not in HANDSHAKE_PROTOCOL_VERSIONS:
        return False
    if b"mcp-session-id" in headers:
        return False
    if b'"initialize"' in body:
        with contextlib.suppress(ValueError):
            message = pydantic_core.from_json(body)
            return not (isinstance(message, dict) and message.get("method") == "initialize")
    return True


def _raise_body_limit(app: Starlette, limit_bytes: int) -> None:
    """Raise the protocol library's limit of 4 MiB, for which FastMCP has no option."""
    for route in app.routes:
        manager = getattr(getattr(route, "endpoint", None), "session_manager", None)
        if manager is not None:
            manager.asgi_app.max_body_size = limit_bytes
