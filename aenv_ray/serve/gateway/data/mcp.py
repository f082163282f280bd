"""``/mcp`` and ``/instances/{id}/mcp``: the tools of an instance, for any MCP client.

Requests are stateless, see `mcp_wire`: any replica can serve any of them. The answer is JSON; it
becomes an event stream when the tool reports progress, logs or asks the client, or when it takes so
long that a proxy could close the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Send

from aenv_ray.actors.calls.json_calls import JsonCall, JsonCalls
from aenv_ray.errors import AenvError, ConfigError, InternalError
from aenv_ray.runtime.api.results import to_json
from aenv_ray.runtime.door.async_calls import Disconnect
from aenv_ray.runtime.door.caller_link import ANSWER, OFFERS
from aenv_ray.runtime.door.subscriptions import SESSION
from aenv_ray.runtime.faults import SERVER_ERROR
from aenv_ray.serve.gateway.auth import CheckAgain
from aenv_ray.serve.gateway.data import mcp_wire
from aenv_ray.serve.gateway.data.http import JSON, proxy_app, watched_disconnect
from aenv_ray.serve.gateway.data.mcp_wire import Refused, Rpc, RpcAnswer
from aenv_ray.serve.gateway.data.targets import Target
from aenv_ray.serve.gateway.envelope import error_headers

PING_S: Final = 15.0
"""After this time a call's answer becomes an event stream, with a comment at this interval."""
_STREAM_HEADERS: Final = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
}
FindTarget = Callable[[Request], Awaitable[Target]]

_PARAMS: Final = ("name", "arguments", "uri", "ref", "argument", "context")
"""What the gateway passes on of a request's parameters, besides ``_meta``."""
_METHODS: Final = "POST, DELETE"


class McpProxy:
    """Answers MCP requests."""

    def __init__(self, find: FindTarget, calls: JsonCalls, check_again: CheckAgain) -> None:
        self._find = find
        self._calls = calls
        self._check_again = check_again

    async def serve(self, request: Request, send: Send) -> Response | None:
        """Return the answer; None if it was already sent.

        Raises:
            Refused: The body is not a valid message.
            AenvError: The request names no instance that the caller may use.
        """
        in_session = mcp_wire.SESSION_HEADER in request.headers
        try:
            target = await self._find(request)
        except AenvError as exc:
            if in_session and request.method == "POST" and exc.http_status in {404, 410}:
                rpc = await _message(request)
                return _failure(request, rpc, exc).response()
            raise
        if request.method == "DELETE":
            return Response(status_code=200)  # sessions have no state to delete
        if request.method != "POST":
            error = ConfigError(
                f"this endpoint has no stream for GET; it accepts {_METHODS}",
                hint="send JSON-RPC messages with POST",
            )
            response = _refusal(error)
            response.status_code = 405
            response.headers["Allow"] = _METHODS
            return response
        rpc = await _message(request)
        await self._check_again(request)  # the body may have taken long
        if rpc.id is None:
            await self._note(target, rpc)
            return Response(status_code=202)
        own = rpc.own_answer()
        if own is not None:
            return own.response()
        async with watched_disconnect(request.receive) as disconnect:
            accepts = request.headers.get("accept", "")
            stream = AnswerStream(send, is_wanted="text/event-stream" in accepts)
            return await self._call(target, request, rpc, disconnect, stream)

    async def _note(self, target: Target, rpc: Rpc) -> None:
        """Act on a cancellation, or on the answer to a question of a tool."""
        if rpc.method == "notifications/cancelled" and rpc.session:
            name = rpc.cancel_name(rpc.params.get("requestId"))
            with contextlib.suppress(AenvError):  # an instance that is gone runs no call
                await self._calls.cancel(target.instance_id, name)
        if rpc.answered:
            arguments = {"question": rpc.answered, "answer": rpc.reply}
            call = JsonCall(
                target.instance_id, ANSWER, {"arguments": arguments}, {}, target.session
            )
            with contextlib.suppress(AenvError):  # its tool is gone, or the answer is malformed
                await self._calls.call(call, Disconnect())

    # --- calls ------------------------------------------------------------------------------

    async def _call(
        self,
        target: Target,
        request: Request,
        rpc: Rpc,
        disconnect: Disconnect,
        stream: AnswerStream,
    ) -> Response | None:
        params = {name: rpc.params[name] for name in _PARAMS if name in rpc.params}
        meta = dict(target.scoped(rpc.meta))
        offers = rpc.offers if stream.is_wanted and rpc.method in mcp_wire.CALLS else []
        meta.pop(OFFERS, None)
        if offers:
            meta[OFFERS] = offers
        if rpc.session:
            meta[SESSION] = rpc.session
        call = JsonCall(target.instance_id, rpc.method, params, meta, target.session)
        name = rpc.cancel_name(rpc.id) if rpc.method in mcp_wire.CALLS else ""
        stream.keep_alive()
        try:
            if rpc.method in mcp_wire.CALLS and (offers or rpc.progress_token is not None):
                result = await self._followed(call, request, rpc, name, disconnect, stream)
            else:
                result = await self._calls.call(call, disconnect, name)
            await self._check_again(request)
            answer = rpc.answer(result)
        except AenvError as exc:
            answer = _failure(request, rpc, exc)
        finally:
            await stream.stop_pings()
        if not stream.is_open:
            return answer.response()
        await stream.send(answer.body, more=False)
        return None

    async def _followed(
        self,
        call: JsonCall,
        request: Request,
        rpc: Rpc,
        name: str,
        disconnect: Disconnect,
        stream: AnswerStream,
    ) -> bytes:
        """Run a call, send its progress, and return the result as JSON text.

        Raises:
            Unauthorized: The token of the request is no longer valid. The call is cancelled, unless
                it has a call id: then it continues, for another token of its owner to ask for.
        """
        async with contextlib.aclosing(self._calls.follow(call, name, disconnect)) as rounds:
            async for news in rounds:
                if isinstance(news, bytes):
                    return news
                told = [message for report in news if (message := rpc.told(report)) is not None]
                if told:
                    await self._check_again(request)
                    await stream.send(*told)
        raise InternalError(f"{call.what}: the progress reports ended without a result")


async def _message(request: Request) -> Rpc:
    """Return the message of a POST; raises `Refused` if it is invalid."""
    await mcp_wire.import_parser(request.headers)
    return mcp_wire.parse(await request.body(), request.headers)


def _failure(request: Request, rpc: Rpc, error: AenvError) -> RpcAnswer:
    """Return the answer to a request that failed, and record the error for the access log."""
    if not rpc.is_for_the_model(error):
        request.scope["aenv.error"] = error
    return rpc.failure(error)


def mcp_app(proxy: McpProxy, limit_bytes: int) -> ASGIApp:
    """Return the ASGI application of a proxy; see `proxy_app`."""

    async def serve(request: Request, send: Send) -> Response | None:
        try:
            return await proxy.serve(request, send)
        except Refused as exc:
            return Response(exc.body, exc.status, media_type=JSON)

    return proxy_app(serve, limit_bytes, _refusal)


def _refusal(error: AenvError) -> Response:
    """Return a JSON-RPC error without an id, for a request whose message was not read."""
    fault = mcp_wire.fault_of(error)
    told = {"code": SERVER_ERROR, "message": fault.message, "data": fault.data()}
    return Response(
        to_json({"jsonrpc": "2.0", "id": None, "error": told}),
        error.http_status,
        headers=error_headers(error),
        media_type=JSON,
    )


class AnswerStream:
    """The event stream of an answer; opened by the first event, if the client accepts one."""

    def __init__(self, send: Send, *, is_wanted: bool) -> None:
        self._send_asgi = send
        self.is_wanted = is_wanted
        self._sending = asyncio.Lock()
        self._due: asyncio.TimerHandle | None = None
        self._pinging: asyncio.Task[None] | None = None
        self.is_open = False

    async def send(self, *messages: bytes, more: bool = True) -> None:
        """Send messages as events; the first ones start the stream."""
        data = b"".join(b"event: message\r\ndata: " + text + b"\r\n\r\n" for text in messages)
        await self._send_text(data, more=more)

    async def _send_text(self, data: bytes, *, more: bool = True) -> None:
        if not self.is_wanted:
            return
        async with self._sending:
            if not self.is_open:
                self.is_open = True
                headers = [(k.encode(), v.encode()) for k, v in _STREAM_HEADERS.items()]
                await self._send_asgi(
                    {"type": "http.response.start", "status": 200, "headers": headers}
                )
            await self._send_asgi({"type": "http.response.body", "body": data, "more_body": more})

    def keep_alive(self) -> None:
        """Send comments at an interval of `PING_S`, until `stop_pings`."""
        if self.is_wanted:
            self._due = asyncio.get_running_loop().call_later(PING_S, self._begin_pings)

    def _begin_pings(self) -> None:
        self._pinging = asyncio.get_running_loop().create_task(self._ping())

    async def _ping(self) -> None:
        while True:
            await self._send_text(b": ping\r\n\r\n")
            await asyncio.sleep(PING_S)

    async def stop_pings(self) -> None:
        """Stop the comments, after the one that is being sent."""
        if self._due is not None:
            self._due.cancel()
        if self._pinging is not None:
            async with self._sending:
                self._pinging.cancel()
