"""A session over HTTP: answers of both kinds, without httpx around them, and cookies."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from aenv_ray.client.mcp_session import McpSession, RpcError
from aenv_ray.client.post_transport import PostTransport
from aenv_ray.errors import CallOutcomeUnknown
from aenv_ray.serve.gateway.listener import GatewayListener, listen

UP_S = 60.0
RESULT = {"text": "grüße\u2028"}


class Server:
    """Answers as the method says, and notes what came."""

    def __init__(self) -> None:
        sock = listen("127.0.0.1", 0, shared=False)
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}/mcp"
        self.requests: list[tuple[dict[str, Any], httpx.Headers]] = []
        self.cookie = ""
        self.listener = GatewayListener(self._app, [sock])
        self.listener.start(UP_S)

    @asynccontextmanager
    async def _app(self) -> AsyncIterator[ASGIApp]:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await (await self._answer(Request(scope, receive)))(scope, receive, send)

        yield app

    async def _answer(self, request: Request) -> Response:
        message = json.loads(await request.body() or b"{}")
        self.requests.append((message, httpx.Headers(request.headers.items())))
        headers = {"Mcp-Session-Id": "s-1"} | ({"Set-Cookie": self.cookie} if self.cookie else {})
        if "id" not in message:
            return Response(status_code=202)
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"], "result": RESULT}
        match message["method"]:
            case "initialize":
                answer["result"] = {"protocolVersion": "2025-06-18"}
            case "events":
                text = json.dumps(answer, ensure_ascii=False)
                note = '{"jsonrpc":"2.0","method":"notifications/progress","params":{}}'
                body = f": ping\r\n\r\ndata: {note}\r\n\r\nevent: message\r\ndata: {text}\r\n\r\n"
                return Response(body, media_type="text/event-stream", headers=headers)
            case "refused":
                del answer["result"]
                answer["error"] = {"code": -32000, "message": "no", "data": {"code": "x"}}
                return Response(json.dumps(answer), 410, headers)
            case "other":
                answer["id"] = 10**6
        return Response(json.dumps(answer), 200, headers, "application/json")


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.listener.stop()


@asynccontextmanager
async def opened(server: Server) -> AsyncIterator[McpSession]:
    posts = PostTransport(
        httpx.AsyncHTTPTransport(), max_connections=10, keep_idle_s=4.0, connect_s=UP_S
    )
    async with httpx.AsyncClient(
        transport=posts, timeout=UP_S, headers={"Authorization": "Bearer t"}
    ) as http:
        session = McpSession(http, server.url, posts)
        yield session
        await session.close()


@pytest.mark.parametrize("method", ["plain", "events"])
async def test_answers_come_as_json_or_events(server: Server, method: str) -> None:
    """Both carry the same message; every request has the client's own headers."""
    async with opened(server) as session:
        assert await session.request(method, {"text": "ä"}) == RESULT
    message, headers = next(r for r in server.requests if r[0].get("method") == method)
    assert message["params"] == {"text": "ä"}
    assert headers["authorization"] == "Bearer t"
    assert headers["content-type"] == "application/json"
    assert headers["mcp-session-id"] == "s-1"
    assert headers["accept"] == "application/json, text/event-stream"
    assert "accept-encoding" not in headers


async def test_refusals_and_lost_answers_are_told_apart(server: Server) -> None:
    """An error is the server's word; an answer to something else is no outcome."""
    async with opened(server) as session:
        with pytest.raises(RpcError) as refused:
            await session.request("refused", {})
        assert refused.value.data == {"code": "x"}
        with pytest.raises(CallOutcomeUnknown):
            await session.request("other", {})


async def test_cookies_of_a_balancer_come_back(server: Server) -> None:
    """A session that stays with its replica by a cookie does so."""
    server.cookie = "route=replica-2; Path=/"
    async with opened(server) as session:
        await session.request("plain", {})
        assert await session.request("events", {}) == RESULT
    sent = [headers.get("cookie") for _, headers in server.requests]
    assert sent[0] is None
    assert set(sent[1:]) == {"route=replica-2"}
