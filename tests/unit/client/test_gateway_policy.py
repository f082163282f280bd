"""The sync and the async gateway client make the same decisions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from aenv_ray.client import environment
from aenv_ray.client.environment import Environment
from aenv_ray.client.gateway_http import (
    GATEWAY_PORTS,
    AsyncGatewayHttp,
    GatewayHttp,
    GatewayPolicy,
)
from aenv_ray.client.over_gateway import GatewayInstance
from aenv_ray.client.over_http import HttpInstance
from aenv_ray.errors import (
    AenvError,
    CallOutcomeUnknown,
    DeadlineExceeded,
    FabricUnavailable,
    RateLimited,
    to_wire,
)

GOOD = {"success": True, "code": 0, "message": "", "data": "done"}


class Script:
    """Answers requests from a list, and records them and the pauses between them."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.sent: list[httpx.Request] = []
        self.pauses: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.sent.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)


def blocking(script: Script, call: str, *arguments: Any, **options: Any) -> Any:
    http = GatewayHttp(
        "gateway", "secret", transport=httpx.MockTransport(script), sleep=script.pauses.append
    )
    try:
        if call == "data":
            return http.data(*arguments, **options)
        with http.stream(*arguments, **options) as response:
            return response.read().decode()
    finally:
        http.close()


def awaited(script: Script, call: str, *arguments: Any, **options: Any) -> Any:
    async def run() -> Any:
        http = AsyncGatewayHttp(
            "gateway", "secret", transport=httpx.MockTransport(script), sleep=script.pause
        )
        try:
            if call == "data":
                return await http.data(*arguments, **options)
            async with http.stream(*arguments, **options) as response:
                return (await response.aread()).decode()
        finally:
            await http.close()

    return asyncio.run(run())


Client = Callable[..., Any]
both = pytest.mark.parametrize("client", [blocking, awaited])


def good() -> httpx.Response:
    return httpx.Response(200, json=GOOD)


def limited(seconds: int) -> httpx.Response:
    error = RateLimited("slow down", retry_after_s=float(seconds))
    body = {"success": False, "code": 429, "message": "slow down", "error": to_wire(error)}
    return httpx.Response(429, json=body, headers={"Retry-After": str(seconds)})


@both
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_429_is_waited_out_as_long_as_it_asks(client: Client, method: str) -> None:
    script = Script(limited(3), httpx.Response(429, headers={"Retry-After": "7"}), good())
    assert client(script, "data", method, "/x") == "done"
    assert script.pauses == [3.0, 7.0]


@both
def test_a_long_429_is_raised_at_once(client: Client) -> None:
    script = Script(limited(3600))
    with pytest.raises(RateLimited) as caught:
        client(script, "data", "GET", "/x")
    assert (caught.value.retry_after_s, script.pauses) == (3600.0, [])


@both
def test_a_stream_that_is_refused_with_429_is_requested_again(client: Client) -> None:
    script = Script(limited(2), httpx.Response(200, text="log"))
    assert client(script, "stream", "GET", "/logs") == "log"
    assert script.pauses == [2.0]


@both
@pytest.mark.parametrize(
    ("method", "options", "failure", "error", "sent"),
    [
        ("GET", {}, httpx.ConnectError("refused"), FabricUnavailable, 3),
        ("POST", {}, httpx.ConnectError("refused"), FabricUnavailable, 3),
        ("POST", {}, httpx.PoolTimeout("full"), FabricUnavailable, 3),
        ("GET", {}, httpx.ReadError("reset"), FabricUnavailable, 3),
        ("PUT", {}, httpx.ReadError("reset"), FabricUnavailable, 3),
        ("DELETE", {}, httpx.ReadError("reset"), FabricUnavailable, 3),
        ("POST", {}, httpx.ReadError("reset"), CallOutcomeUnknown, 1),
        ("POST", {"repeatable": True}, httpx.ReadError("reset"), FabricUnavailable, 3),
        ("PUT", {"repeatable": False}, httpx.ReadError("reset"), CallOutcomeUnknown, 1),
        ("GET", {}, httpx.ReadTimeout("slow"), DeadlineExceeded, 1),
        ("GET", {"attempts": 1}, httpx.ReadError("reset"), FabricUnavailable, 1),
    ],
)
def test_failures_are_repeated_and_raised_alike(
    client: Client,
    method: str,
    options: dict[str, Any],
    failure: Exception,
    error: type[AenvError],
    sent: int,
) -> None:
    script = Script(*[failure] * 3)
    with pytest.raises(error) as caught:
        client(script, "data", method, "/x", **options)
    assert type(caught.value) is error
    assert len(script.sent) == sent
    assert script.pauses == [0.2, 0.8][: sent - 1]


@both
def test_requests_are_the_same(client: Client) -> None:
    script = Script(good())
    client(script, "data", "POST", "/x", json={"a": "ä"}, params={"b": 1, "c": None}, timeout_s=7.0)
    (request,) = script.sent
    assert str(request.url) == "http://gateway:8080/x?b=1"
    assert json.loads(request.content) == {"a": "ä"}
    assert request.headers["Authorization"] == "Bearer secret"
    assert request.headers["User-Agent"].startswith("aenv-ray/")
    assert request.extensions["timeout"] == {
        "connect": 10.0,
        "read": 7.0,
        "write": 7.0,
        "pool": 7.0,
    }


# --- proxies --------------------------------------------------------------------------------------


@contextlib.contextmanager
def recording_server(first: list[tuple[int, dict[str, str]]]) -> Iterator[tuple[str, list[str]]]:
    """Run a server that any gateway or proxy could be; yield its URL and the targets it was sent.

    Args:
        first: Statuses and headers of the first responses; later ones succeed.
    """
    targets: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            targets.append(f"{self.command} {self.path}")
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, headers = first.pop(0) if first else (200, {})
            body = json.dumps(GOOD | {"data": {"status": "healthy"}}).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *arguments: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", targets
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def by_control(url: str) -> None:
    http = AsyncGatewayHttp(url)
    try:
        await http.data("GET", "/x")
    finally:
        await http.close()


async def by_blocking_client(url: str) -> None:
    with contextlib.closing(GatewayHttp(url)) as http:
        await asyncio.to_thread(http.data, "GET", "/x")


async def by_instance(url: str) -> None:
    instance = GatewayInstance(url, None, "a-1")
    try:
        await instance.check_health({}, 10.0)
        await instance.call_reward({}, None, 10.0)
    finally:
        await instance.close()


async def by_server(url: str) -> None:
    server = HttpInstance(url, ports=GATEWAY_PORTS)
    try:
        await server.check_health({}, 10.0)
        await server.call_reward({}, None, 10.0)
    finally:
        await server.close()


@pytest.mark.parametrize("call", [by_control, by_blocking_client, by_instance, by_server])
async def test_every_client_uses_the_proxy_of_the_environment_except_for_loopback(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[str], Awaitable[None]]
) -> None:
    for name in ("NO_PROXY", "no_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with recording_server([]) as (proxy, through), recording_server([]) as (local, direct):
        monkeypatch.setenv("http_proxy", proxy)
        await call("http://gateway.test")
        await call(local)
    assert through
    assert all(target.split()[1].startswith("http://gateway.test:8080/") for target in through)
    assert len(direct) == len(through)
    assert all(target.split()[1].startswith("/") for target in direct)


async def test_a_create_gives_up_after_a_minute_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    real, here = asyncio.sleep, asyncio.get_running_loop()

    async def sleep(seconds: float) -> None:
        if asyncio.get_running_loop() is not here:  # that of another test's thread
            await real(seconds)
            return
        pauses.append(seconds)

    monkeypatch.setattr(environment.asyncio, "sleep", sleep)
    env = Environment("mini-terminal", aenv_url="http://127.0.0.1:1")
    with pytest.raises(FabricUnavailable, match=r"gateway at http://127\.0\.0\.1:1"):
        await env.initialize()
    assert 30.0 < sum(pauses) < 70.0
    assert len(pauses) == env.max_retries


async def test_calls_of_functions_and_rewards_wait_out_a_429() -> None:
    with recording_server([(429, {"Retry-After": "0"})]) as (url, targets):
        instance = GatewayInstance(url, None, "a-1")
        try:
            assert await instance.call_reward({}, None, 10.0) == {"status": "healthy"}
        finally:
            await instance.close()
    assert targets == ["POST /task/reward"] * 2


async def test_tools_are_called_where_the_gateway_is() -> None:
    """Without a port, https means 443, for calls as for everything else."""
    instance = GatewayInstance("https://gateway.test/prefix", None, "a-1")
    assert instance.url == "https://gateway.test/prefix"
    await instance.close()


def test_a_gateway_that_stays_away_is_logged_once_until_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However many requests wait for it."""
    policy = GatewayPolicy("http://host", None, attempts=10)
    away = httpx.ConnectError("refused")
    for outage in (1, 2):
        for attempt in (1, 2, 3, 3, 4):
            policy.note_attempt(away, attempt=attempt)
        assert [r.getMessage().count("is not reached") for r in caplog.records] == [1] * outage
        policy.note_attempt(None, attempt=5)
