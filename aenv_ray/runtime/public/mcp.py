"""``/mcp`` of the public door: FastMCP around the dispatcher.

It serves tools, resources and prompts: an agent cannot call rewards, functions or workspace methods
(invariant 8).
FastMCP implements the protocol; schemas, validation and results come from registry and dispatcher.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent import futures
from typing import Any, Final, cast

import pydantic_core
from fastmcp import Context, FastMCP
from fastmcp.exceptions import FastMCPError
from fastmcp.prompts import Message as PromptMessage
from fastmcp.prompts import Prompt, PromptArgument, PromptResult
from fastmcp.resources import Resource, ResourceContent, ResourceResult, ResourceTemplate
from fastmcp.server.dependencies import get_context
from fastmcp.server.middleware import CallNext, Middleware, MiddlewareContext
from fastmcp.tools.base import Tool, ToolResult
from mcp import MCPError
from mcp.shared.exceptions import NoBackChannelError
from mcp.shared.message import ServerMessageMetadata
from mcp_types import (
    CallToolRequestParams,
    CallToolResult,
    CompleteRequestParams,
    CompleteResult,
    CreateMessageRequest,
    CreateMessageResult,
    ElicitRequest,
    ElicitResult,
    EmptyResult,
    GetPromptRequestParams,
    GetPromptResult,
    ListPromptsRequest,
    ListResourcesRequest,
    ListResourceTemplatesRequest,
    ListToolsRequest,
    LoggingLevel,
    ReadResourceRequestParams,
    SubscribeRequestParams,
    UnsubscribeRequestParams,
)
from mcp_types import Tool as McpTool
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from pydantic import PrivateAttr
from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope, Send

from aenv_ray.runtime.api.registry import Registered
from aenv_ray.runtime.door.async_calls import LONGEST_CALL_S, AsyncCalls, Disconnect, read_outcome
from aenv_ray.runtime.door.caller import unsupported
from aenv_ray.runtime.door.calls import RunningCall, current_call
from aenv_ray.runtime.door.dispatch import COMPLETE
from aenv_ray.runtime.door.subscriptions import SUBSCRIBE, SUBSCRIPTIONS, UNSUBSCRIBE
from aenv_ray.runtime.faults import FOR_THE_MODEL, Fault, fault_result
from aenv_ray.runtime.public.requests import watch

_DISCONNECT: Final = "aenv.disconnect"
_SESSION: Final = "mcp-session-id"
_NOTES_BACKLOG: Final = 1000
"""Progress reports and log messages queued for a slow client; beyond, the oldest are dropped."""


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
            name=entry.name, description=listed.get("description"), parameters=listed["inputSchema"]
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
        async with _client() as client:
            on_progress = None if meta.get("progressToken") is None else client.progress
            outcome = await self._calls.call(
                "tools/call",
                params,
                disconnect=disconnect,
                on_progress=on_progress,
                caller=client,
            )
        try:
            result = read_outcome(outcome)
        except Fault as fault:
            if fault.code not in FOR_THE_MODEL:
                raise _Refusal(fault) from None
            result = fault_result(fault)
        return ToolResult.from_mcp_result(CallToolResult.model_validate(result))


class _Client:
    """The client of one call: a `Caller`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        # A tool asks from its own thread, where FastMCP does not know the request.
        self._session = context.session
        self._request_id = context.request_id
        self._loop = asyncio.get_running_loop()
        self._notes: asyncio.Queue[Coroutine[Any, Any, None] | None] = asyncio.Queue()
        self._has_ended = False

    def progress(self, progress: float, total: float | None, message: str | None) -> None:
        """Report progress; to be called on the loop."""
        self._put(self._context.report_progress(progress, total, message))

    def log(self, level: str, message: str, data: Any) -> None:
        extra = data if data is None or isinstance(data, Mapping) else {"data": data}
        name = cast(LoggingLevel, level)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(
                lambda: self._put(self._context.log(message, name, extra=extra))
            )

    def ask(self, method: str, params: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        asking = asyncio.run_coroutine_threadsafe(
            self._ask_for(current_call(), method, params), self._loop
        )
        try:
            return asking.result(min(timeout_s, LONGEST_CALL_S))
        except TimeoutError:
            raise Fault("tool_timeout", f"the caller did not answer {method} in time") from None
        except futures.CancelledError:
            text = f"the call was stopped while it waited for {method}"
            raise Fault("call_cancelled", text) from None
        finally:
            asking.cancel()  # does nothing after the answer

    async def _ask_for(
        self, call: RunningCall, method: str, params: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Ask, and withdraw the question when the call is stopped.

        Bound to the call here, because `stop` may interrupt the waiting thread before it could bind
        anything.
        """
        task = asyncio.current_task()
        assert task is not None

        def withdraw() -> None:
            self._loop.call_soon_threadsafe(task.cancel)

        call.bind_stop(withdraw)
        try:
            return await self._ask(method, params)
        finally:
            call.unbind_stop(withdraw)

    async def _ask(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        is_question = method == "elicitation/create"
        session = self._session
        offered = session.client_capabilities
        what = "elicitation" if is_question else "sampling"
        if offered is None or getattr(offered, what) is None:
            raise unsupported(what)
        related = ServerMessageMetadata(related_request_id=self._request_id)
        kind = ElicitRequest if is_question else CreateMessageRequest
        request = kind.model_validate({"method": method, "params": params})
        try:
            answer = await session.send_request(
                request, ElicitResult if is_question else CreateMessageResult, metadata=related
            )
        except NoBackChannelError:
            raise unsupported(f"{what} on this connection") from None
        except MCPError as exc:
            raise Fault("function_failed", f"the caller refused {method}: {exc}") from None
        return answer.model_dump(mode="json", by_alias=True, exclude_none=True)

    def _put(self, note: Coroutine[Any, Any, None]) -> None:
        if self._has_ended:  # a thread that the tool left behind: nobody sends it any more
            note.close()
            return
        if self._notes.qsize() >= _NOTES_BACKLOG:
            oldest = self._notes.get_nowait()
            if oldest is not None:
                oldest.close()
        self._notes.put_nowait(note)

    async def send(self) -> None:
        """Send reports and messages, in order, until `end`."""
        while (note := await self._notes.get()) is not None:
            try:
                await note
            except Exception:  # noqa: BLE001  # the client is gone; the call continues
                continue

    def end(self) -> None:
        """Send what is queued, and no more."""
        self._loop.call_soon(self._end)

    def _end(self) -> None:
        self._has_ended = True
        self._notes.put_nowait(None)


@contextlib.asynccontextmanager
async def _client() -> AsyncIterator[_Client]:
    """Yield the client; its reports and messages are sent before the block ends."""
    client = _Client(get_context())
    async with asyncio.TaskGroup() as group:
        group.create_task(client.send())
        try:
            yield client
        finally:
            client.end()


class _Refusals(Middleware):
    """Converts faults to MCP errors, with code, hint and context in ``error.data``."""

    def __init__(self, calls: AsyncCalls) -> None:
        self._calls = calls
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

    async def on_list_resources(
        self,
        context: MiddlewareContext[ListResourcesRequest],
        call_next: CallNext[ListResourcesRequest, Sequence[Resource]],
    ) -> Sequence[Resource]:
        self._check_loaded()
        listed = self._dispatcher.registry.resources.values()
        return [Resource.model_validate(_shown(r)) for r in listed if not r.is_template]

    async def on_list_resource_templates(
        self,
        context: MiddlewareContext[ListResourceTemplatesRequest],
        call_next: CallNext[ListResourceTemplatesRequest, Sequence[ResourceTemplate]],
    ) -> Sequence[ResourceTemplate]:
        self._check_loaded()
        listed = self._dispatcher.registry.resources.values()
        return [
            ResourceTemplate.model_validate({**_shown(r), "parameters": r.signature.schema})
            for r in listed
            if r.is_template
        ]

    async def on_read_resource(
        self,
        context: MiddlewareContext[ReadResourceRequestParams],
        call_next: CallNext[ReadResourceRequestParams, ResourceResult],
    ) -> ResourceResult:
        result = await self._run("resources/read", {"uri": str(context.message.uri)})
        return ResourceResult(
            [
                ResourceContent(
                    part["text"] if "text" in part else base64.b64decode(part["blob"]),
                    mime_type=part["mimeType"],
                )
                for part in result["contents"]
            ]
        )

    async def on_list_prompts(
        self,
        context: MiddlewareContext[ListPromptsRequest],
        call_next: CallNext[ListPromptsRequest, Sequence[Prompt]],
    ) -> Sequence[Prompt]:
        self._check_loaded()
        return [
            Prompt(
                name=entry.name,
                description=shown.get("description"),
                arguments=[PromptArgument.model_validate(one) for one in shown["arguments"]],
            )
            for entry in self._dispatcher.registry.prompts.values()
            for shown in [entry.mcp_prompt()]
        ]

    async def on_get_prompt(
        self,
        context: MiddlewareContext[GetPromptRequestParams],
        call_next: CallNext[GetPromptRequestParams, PromptResult],
    ) -> PromptResult:
        asked = {"name": context.message.name, "arguments": context.message.arguments or {}}
        result = GetPromptResult.model_validate(await self._run("prompts/get", asked))
        messages = [PromptMessage(one.content, one.role) for one in result.messages]
        return PromptResult(messages, result.description)

    async def _run(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        request = get_context().request_context
        meta = dict(request.meta or {}) if request else {}
        http = request.request if request else None
        disconnect = http.scope.get(_DISCONNECT) if http is not None else None
        async with _client() as client:
            outcome = await self._calls.call(
                method, {**params, "_meta": meta}, disconnect=disconnect, caller=client
            )
        try:
            result: dict[str, Any] = read_outcome(outcome)
        except Fault as fault:
            raise _mcp_error(fault) from None
        return result


class _Followers:
    """The sessions that follow resources; each is told on its stream for GET.

    Args:
        calls: Of the environment.
    """

    def __init__(self, calls: AsyncCalls) -> None:
        self._registry = calls.dispatcher.registry
        self._ends: dict[str, Callable[[], None]] = {}
        self._telling: set[asyncio.Task[None]] = set()

    async def subscribe(self, context: Any, params: SubscribeRequestParams) -> EmptyResult:
        """Follow a resource for the session of the request."""
        session, uri = _session_of(context), str(params.uri)
        try:
            self._registry.resource(uri)
            SUBSCRIPTIONS.subscribe(session, uri)
        except Fault as fault:
            raise _mcp_error(fault) from None
        if session not in self._ends:
            loop, client = asyncio.get_running_loop(), context.session

            def on_update(changed: str) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._tell, session, client, changed)

            self._ends[session] = SUBSCRIPTIONS.listen(session, on_update)
        return EmptyResult()

    async def unsubscribe(self, context: Any, params: UnsubscribeRequestParams) -> EmptyResult:
        """Stop following a resource."""
        SUBSCRIPTIONS.unsubscribe(_session_of(context), str(params.uri))
        return EmptyResult()

    def end(self, session: str) -> None:
        """Forget a session."""
        SUBSCRIPTIONS.end(session)
        if (stop := self._ends.pop(session, None)) is not None:
            stop()

    def _tell(self, session: str, client: Any, uri: str) -> None:
        task = asyncio.get_running_loop().create_task(self._send(session, client, uri))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _send(self, session: str, client: Any, uri: str) -> None:
        try:
            await client.send_resource_updated(uri)
        except Exception:  # noqa: BLE001  # of the protocol library: the client is gone
            self.end(session)


def _session_of(context: Any) -> str:
    """Return the id of the session of a request.

    Raises:
        MCPError: It has none.
    """
    request = context.request
    session = request.headers.get(_SESSION) if request is not None else None
    if not session:
        raise _mcp_error(
            Fault(
                "caller_unsupported",
                "updates of resources are sent to a session, and this request has none",
                "open one with initialize, and send its id",
            )
        )
    return str(session)


def _shown(entry: Registered) -> dict[str, Any]:
    """Return a resource's listing with the names of FastMCP's fields."""
    names = {"uriTemplate": "uri_template", "mimeType": "mime_type"}
    return {names.get(key, key): value for key, value in entry.mcp_resource().items()}


def _mcp_error(fault: Fault) -> Exception:
    error = fault.rpc_error()
    return MCPError(error["code"], error["message"], error["data"])


def _completer(calls: AsyncCalls) -> Any:
    """Return the handler of completions; FastMCP's own knows only its own prompts."""

    async def complete(context: Any, params: CompleteRequestParams) -> CompleteResult:
        del context
        given = params.model_dump(
            mode="json", by_alias=True, exclude_none=True, include={"ref", "argument", "context"}
        )
        try:
            result = read_outcome(await calls.call(COMPLETE, given))
        except Fault as fault:
            raise _mcp_error(fault) from None
        return CompleteResult.model_validate(result)

    return complete


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
        self._followers = _Followers(calls)
        protocol = self._server._mcp_server
        protocol.add_request_handler(SUBSCRIBE, SubscribeRequestParams, self._followers.subscribe)
        protocol.add_request_handler(
            UNSUBSCRIBE, UnsubscribeRequestParams, self._followers.unsubscribe
        )
        if calls.dispatcher.registry.completes:
            protocol.add_request_handler(COMPLETE, CompleteRequestParams, _completer(calls))
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
            if scope["method"] == "DELETE":
                self._followers.end(dict(scope["headers"]).get(_SESSION.encode(), b"").decode())
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
