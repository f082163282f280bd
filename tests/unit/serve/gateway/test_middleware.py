"""The middleware around every route: envelopes, request ids, errors that reveal nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router, WebSocketRoute
from starlette.websockets import WebSocket

from aenv_ray.errors import QuotaExceeded, QuotaTooSmall, SandboxLost, Unauthorized, from_wire
from aenv_ray.serve.gateway.metrics import Metrics
from aenv_ray.serve.gateway.middleware import AccessLog, GatewayMiddleware
from aenv_ray.serve.gateway.requests import STREAMED, read_body


def client(failure: Exception) -> httpx.AsyncClient:
    async def fail(request: Request) -> Response:
        raise failure

    router = Router(routes=[Route("/fail", fail, methods=["GET"])])
    app = GatewayMiddleware(router, AccessLog(Metrics()))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


async def test_an_error_reaches_the_client_as_a_whole() -> None:
    """A client raises what the gateway raised."""
    async with client(SandboxLost("it died", instance_id="a-1", hint="make another")) as http:
        answer = await http.get("/fail")
    body = answer.json()
    assert answer.status_code == 410
    assert (body["success"], body["code"], body["message"]) == (False, 410, "it died")
    error = from_wire(body["error"])
    assert isinstance(error, SandboxLost)
    assert (error.instance_id, error.hint) == ("a-1", "make another")


async def test_the_bodies_of_all_requests_have_a_limit() -> None:
    """Invariant 7: many clients with bodies below their limit would fill the replica."""
    reading = asyncio.Event()
    may_end = asyncio.Event()

    async def hold(request: Request) -> Response:
        if "streamed" in request.query_params:
            request.scope[STREAMED] = True
        body = await request.body()
        if "wait" in request.query_params:
            reading.set()
            await may_end.wait()
        return Response(str(len(body)))

    router = Router(routes=[Route("/", hold, methods=["POST"])])
    app = GatewayMiddleware(router, AccessLog(Metrics()), bodies_bytes=1_000_000)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        first = asyncio.create_task(http.post("/?wait", content=bytes(900_000)))
        await reading.wait()
        refused = await http.post("/", content=bytes(200_000))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "capacity_exceeded")
        assert (await http.post("/", content=bytes(60_000))).text == "60000"
        assert (await http.post("/?streamed", content=bytes(200_000))).text == "200000"
        may_end.set()
        assert (await first).text == "900000"
        assert (await http.post("/", content=bytes(900_000))).text == "900000"


async def test_an_exceeded_quota_says_when_to_try_again() -> None:
    async with client(QuotaExceeded("full", retry_after_s=2.5)) as http:
        answer = await http.get("/fail")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")


async def test_what_exceeds_a_whole_quota_is_not_to_be_tried_again() -> None:
    async with client(QuotaTooSmall("9 are more than 5", retry_after_s=2.5)) as http:
        answer = await http.get("/fail")
    assert (answer.status_code, "retry-after" in answer.headers) == (429, False)


async def test_a_request_without_a_token_is_told_how_to_authenticate() -> None:
    async with client(Unauthorized("no token")) as http:
        answer = await http.get("/fail")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")


async def test_a_bug_reveals_only_the_request_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Invariant 10: the text of an unexpected exception may contain a secret."""
    async with client(RuntimeError("hunter2")) as http:
        answer = await http.get("/fail", headers={"X-Request-ID": "mine"})
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == "mine"
    assert "mine" in answer.json()["message"]
    assert "hunter2" not in answer.text
    assert "hunter2" in caplog.text


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/no", 404), ("PUT", "/fail", 405)])
async def test_unknown_routes_and_methods_answer_in_the_envelope(
    method: str, path: str, status: int
) -> None:
    async with client(RuntimeError()) as http:
        answer = await http.request(method, path)
    assert (answer.status_code, answer.json()["code"]) == (status, status)
    assert answer.json()["success"] is False


async def test_a_request_id_that_could_forge_a_log_line_is_replaced() -> None:
    async with client(SandboxLost("x")) as http:
        answer = await http.get("/fail", headers={"X-Request-ID": "a b"})
    assert answer.headers["x-request-id"] != "a b"


class RecordingLog(AccessLog):
    """Records how requests ended."""

    def __init__(self) -> None:
        super().__init__(Metrics())
        self.ends: list[tuple[int, int]] = []

    def ended(self, scope: Any, status: int, seconds: float, sent: int) -> None:
        self.ends.append((status, sent))


@pytest.mark.parametrize(
    ("path", "limit", "ended"), [("/echo", 9, (101, 8)), ("/none", 9, (403, 0)), ("/echo", 0, None)]
)
async def test_a_websocket_is_logged_like_a_request(
    path: str, limit: int, ended: tuple[int, int] | None
) -> None:
    """It has an id and a log line, and counts towards the limit of concurrent requests."""

    async def echo(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("four")
        await websocket.send_bytes(b"more")
        await websocket.close()

    log = RecordingLog()
    app = GatewayMiddleware(Router(routes=[WebSocketRoute("/echo", echo)]), log, limit)
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "websocket", "path": path, "headers": [(b"x-request-id", b"mine")],
        "query_string": b"", "root_path": "", "subprotocols": [], "scheme": "ws",
    }  # fmt: skip
    await app(scope, receive, send)
    if ended is None:
        assert sent[0]["status"] == 503
        ended = (503, len(sent[1]["body"]))
    assert log.ends == [ended]
    if ended[0] != 403:
        assert (b"x-request-id", b"mine") in sent[0]["headers"]


async def test_a_client_that_leaves_during_an_upload_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Status 499: nobody is there to answer, and nothing of ours failed."""

    async def upload(request: Request) -> Response:
        return Response(str(len(await read_body(request, 1000))))

    log = RecordingLog()
    app = GatewayMiddleware(Router(routes=[Route("/", upload, methods=["PUT"])]), log)
    messages = [
        {"type": "http.disconnect"},
        {"type": "http.request", "body": b"half", "more_body": True},
    ]

    async def receive() -> Any:
        return messages.pop()

    async def send(message: Any) -> None:
        raise AssertionError(message)

    scope = {
        "type": "http", "method": "PUT", "path": "/", "headers": [], "query_string": b"",
        "root_path": "", "scheme": "http",
    }  # fmt: skip
    await app(scope, receive, send)
    assert log.ends == [(499, 0)]
    assert "aenv.error" not in scope
    assert not caplog.records
