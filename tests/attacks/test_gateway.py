"""A publisher's sandbox, and an owner's request, want the gateway to work for them alone.

One event loop of the gateway serves all owners, and what a sandbox lists is its publisher's word.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import QueryParams
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aenv_ray.actors.calls.call_batching import Reports
from aenv_ray.actors.calls.json_calls import JsonCall
from aenv_ray.errors import ConfigError, ToolNotFound
from aenv_ray.hub.redis.server import RedisServer
from aenv_ray.runtime.door.async_calls import Disconnect
from aenv_ray.runtime.public.requests import query_arguments
from aenv_ray.serve.gateway.data.functions import (
    MAX_FUNCTIONS,
    MAX_LISTING_BYTES,
    FunctionProxy,
    is_simple,
)
from aenv_ray.serve.gateway.data.targets import Target
from aenv_ray.serve.gateway.listener import GatewayListener, listen
from tests.contract.gateway.gateway_bench import a_gateway, created

LONG_S = 60.0


class Sandbox:
    """Answers every call with the same text, as a hostile runtime may."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self.called: list[str] = []

    async def call(self, call: JsonCall, disconnect: Disconnect, name: str = "") -> bytes:
        del disconnect, name
        self.called.append(call.method)
        return self._answer if call.method != "aenv/function" else b'{"data":1}'

    def follow(
        self, call: JsonCall, name: str, disconnect: Disconnect
    ) -> AsyncGenerator[Reports | bytes]:
        raise NotImplementedError

    async def cancel(self, target: str, name: str) -> None:
        raise NotImplementedError


def request(path: str) -> Request:
    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
    return Request(scope, receive)


async def ask(sandbox: Sandbox, path: str) -> Any:
    async def find(_: Request) -> Target:
        return Target("i-1", is_agent=False)

    async def send(_: Message) -> None:
        raise AssertionError

    async def admitted(_: HTTPConnection) -> None: ...

    response = await FunctionProxy(find, sandbox, admitted).serve(request(path), send)
    return json.loads(bytes(response.body))


def listing(*endpoints: str) -> bytes:
    functions = [
        {"name": f"f{number}", "method": "GET", "endpoint": endpoint, "inputSchema": {}}
        for number, endpoint in enumerate(endpoints)
    ]
    return json.dumps({"functions": functions, "health": []}).encode()


MANY = "/" + "".join(f"{{a{number}:path}}x" for number in range(30))


@pytest.mark.parametrize(
    "endpoint", [MANY, MANY.replace(":path", ""), "/{a}-{b}", "/{a:path}/{b:path}"]
)
async def test_the_path_of_a_function_does_not_make_the_gateway_search(endpoint: str) -> None:
    """Invariant 15: with a regular expression of this kind one request takes hours of all."""
    assert not is_simple(endpoint)
    sandbox = Sandbox(listing(endpoint))
    with pytest.raises(ToolNotFound):
        await ask(sandbox, "/" + "x" * 20_000 + "y")


@pytest.mark.parametrize("endpoint", ["/notes/{day}/{page:int}", "/files/{path:path}", "/plain"])
async def test_usual_paths_are_served(endpoint: str) -> None:
    assert is_simple(endpoint)
    path = endpoint.replace("{day}", "may").replace("{page:int}", "3").replace("{path:path}", "a/b")
    assert await ask(Sandbox(listing(endpoint)), path) == {"success": True, "data": 1}


@pytest.mark.parametrize(
    "answer",
    [
        listing(*(f"/f{number}" for number in range(MAX_FUNCTIONS + 1))),
        listing("/" + "a" * MAX_LISTING_BYTES),
        listing("/" + "a" * 2000),
        b"[]",
        b"7",
        b'{"functions": 7}',
        b'{"functions": [{"name": "f"}], "health": []}',
        b'{"functions": [], "health": "none"}',
        b"[" * 100_000,
        b"not JSON",
    ],
)
async def test_an_invalid_listing_is_an_error_of_its_environment(answer: bytes) -> None:
    """Invariant 15: no failure of the gateway, and no long work for it."""
    with pytest.raises(ConfigError, match="list of functions"):
        await ask(Sandbox(answer), "/functions/f")


@pytest.mark.parametrize("answer", [b'{"data":7}', b'{"data":{"status":[]}}', b"{}"])
async def test_an_invalid_health_response_is_an_error_of_its_environment(answer: bytes) -> None:
    class Sick(Sandbox):
        async def call(self, call: JsonCall, disconnect: Disconnect, name: str = "") -> bytes:
            if call.method == "aenv/functions":
                return listing()
            return await super().call(call, disconnect, name)

    with pytest.raises(ConfigError, match="health check"):
        await ask(Sick(answer), "/health")


def test_a_query_of_many_keys_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 15: reading all of it for each key took the loop seconds."""

    def getlist(*_: Any) -> list[str]:
        raise AssertionError("it reads the whole query")

    monkeypatch.setattr(QueryParams, "getlist", getlist)
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [],
             "query_string": b"a=1&b=2&a=3&kinds=[1]"}  # fmt: skip
    schema = {"properties": {"kinds": {"type": ["array", "null"]}, "b": {"type": [{}]}}}
    found = query_arguments(Request(scope), schema)
    assert found == {"a": ["1", "3"], "b": "2", "kinds": [1]}


# --- requests within requests --------------------------------------------------------------------

INNER = b"GET /inner HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
IN_CHUNK = b"%x\r\n%b\r\n0\r\n\r\n" % (len(INNER), INNER)


def length(size: int) -> bytes:
    return b"Content-Length: %d\r\n" % size


AFTER = b"0\r\n\r\n" + INNER
"""One request with a body for who reads the length, two for who reads chunks."""
SMUGGLED = {
    "CL.TE": (length(len(AFTER)) + CHUNKED, AFTER),
    "TE.CL": (CHUNKED + length(len(b"%x\r\n" % len(INNER))), IN_CHUNK),
    "two lengths": (length(len(INNER)) + length(0), INNER),
    "two lengths, turned": (length(0) + length(len(INNER)), INNER),
    "list of lengths": (b"Content-Length: 0, %d\r\n" % len(INNER), INNER),
    "signed length": (b"Content-Length: +%d\r\n" % len(INNER), INNER),
    "hexadecimal length": (b"Content-Length: 0x%x\r\n" % len(INNER), INNER),
    "huge length": (b"Content-Length: %d\r\n" % 2**64, INNER),
    "folded coding": (b"Transfer-Encoding:\r\n chunked\r\n" + length(len(AFTER)), AFTER),
    "folded length": (b"Content-Length:\r\n %d\r\n" % len(INNER) + length(0), INNER),
    "folded header": (b"X: y\r\n Content-Length: 0\r\n" + length(len(INNER)) + CHUNKED, AFTER),
    "space before the colon": (b"Transfer-Encoding : chunked\r\n" + length(len(AFTER)), AFTER),
    "unknown coding": (b"Transfer-Encoding: xchunked\r\n" + length(len(AFTER)), AFTER),
    "chunked is not last": (b"Transfer-Encoding: chunked, gzip\r\n", AFTER),
    "two codings": (CHUNKED + b"Transfer-Encoding: identity\r\n", AFTER),
    "line ends with LF": (b"X: y\nTransfer-Encoding: chunked\n" + length(len(AFTER)), AFTER),
    "line ends with CR": (b"X: y\rTransfer-Encoding: chunked\r\n" + length(len(AFTER)), AFTER),
    "NUL": (b"Transfer-Encoding: chunked\0\r\n" + length(len(AFTER)), AFTER),
    "chunk of a hexadecimal size": (CHUNKED, b"0x0\r\n\r\n" + INNER),
    "chunk of a signed size": (CHUNKED, b"-0\r\n\r\n" + INNER),
    "chunk of a huge size": (CHUNKED, b"1" + b"0" * 16 + b"\r\n\r\n" + INNER),
    "chunk longer than its size": (CHUNKED, b"1\r\nab\r\n0\r\n\r\n" + INNER),
    "extension ends with LF": (CHUNKED, b"0;a\n\r\n" + INNER),
    "extension ends with CR": (CHUNKED, b"0;a\r\r\n\r\n" + INNER),
}
"""Headers and body of a request that servers have read as different numbers of requests."""


@contextmanager
def served() -> Iterator[tuple[tuple[str, int], list[tuple[str, int]]]]:
    """Serve as the gateway does; yield the address, and path and body size of each request."""
    seen: list[tuple[str, int]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        seen.append((scope["path"], len(body)))
        await Response(b"served")(scope, receive, send)

    @asynccontextmanager
    async def opened() -> AsyncIterator[ASGIApp]:
        yield app

    sock = listen("127.0.0.1", 0, shared=False)
    listener = GatewayListener(opened, [sock])
    listener.start(LONG_S)
    try:
        yield sock.getsockname(), seen
    finally:
        listener.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[tuple[str, int], list[tuple[str, int]]]]:
    with served() as found:
        yield found


def answered(address: tuple[str, int], data: bytes) -> bytes:
    """Send bytes, and return all that the server sends until it closes the connection."""
    with socket.create_connection(address, timeout=LONG_S) as sock:
        sock.sendall(data)
        told = b""
        with contextlib.suppress(ConnectionResetError):  # it closed with our bytes unread
            while piece := sock.recv(65536):
                told += piece
        return told


@pytest.mark.parametrize("trick", SMUGGLED)
def test_no_request_is_hidden_in_another(
    server: tuple[tuple[str, int], list[tuple[str, int]]], trick: str
) -> None:
    """Invariant 15: behind a proxy, one client's request would be answered to another."""
    address, seen = server
    headers, body = SMUGGLED[trick]
    seen.clear()
    told = answered(address, b"POST /outer HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n" + body)
    assert "/inner" not in [path for path, _ in seen]
    assert told.startswith(b"HTTP/1.1 400 ")
    assert told.count(b"HTTP/1.1 ") == 1


def test_unambiguous_requests_are_served(
    server: tuple[tuple[str, int], list[tuple[str, int]]],
) -> None:
    """The test above would see a request that is hidden."""
    address, seen = server
    seen.clear()
    first = b"POST /outer HTTP/1.1\r\nHost: x\r\n" + CHUNKED + b"\r\n"
    told = answered(address, first + b"3;a=b\r\nabc\r\n0\r\n\r\n" + INNER)
    assert (seen, told.count(b"served")) == ([("/outer", 3), ("/inner", 0)], 2)


def resident_bytes() -> int:
    """Return the memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_a_chunk_extension_is_not_kept(
    server: tuple[tuple[str, int], list[tuple[str, int]]],
) -> None:
    """Invariant 7: the limit of a body does not count it."""
    address, seen = server
    seen.clear()
    before = resident_bytes()
    with socket.create_connection(address, timeout=LONG_S) as sock:
        sock.sendall(b"POST /outer HTTP/1.1\r\nHost: x\r\n" + CHUNKED + b"\r\n1;")
        piece = b"x" * 2**20
        for _ in range(96):
            sock.sendall(piece)
        held = resident_bytes() - before
        sock.sendall(b"\r\na\r\n0\r\n\r\n")
        told = sock.recv(65536)
    assert told.endswith(b"served")
    assert seen == [("/outer", 1)]
    assert held < 48 * 2**20


# --- sessions ------------------------------------------------------------------------------------


@pytest.mark.redis
async def test_the_session_of_another_owner_gives_no_access(
    tmp_path: Path, module_redis: RedisServer
) -> None:
    """Invariant 15: the id of a session is no credential, for calls or anything else."""

    def message(method: str, params: dict[str, Any], request_id: int | None) -> dict[str, Any]:
        told = {"jsonrpc": "2.0", "method": method, "params": params}
        return told if request_id is None else {**told, "id": request_id}

    async with (
        a_gateway(tmp_path, redis=module_redis) as bench,
        bench.owner("ann") as ann,
        bench.owner("bob") as bob,
    ):
        hers, his = [f"/instances/{(await created(http))['id']}/mcp" for http in (ann, bob)]
        begun = await ann.post(hers, json=message("initialize", {}, 0))
        session = {"mcp-session-id": begun.headers["mcp-session-id"]}
        wait = message("tools/call", {"name": "wait", "arguments": {}}, 1)
        add = message("tools/call", {"name": "add", "arguments": {"a": 1, "b": 2}}, 2)
        cancel = message("notifications/cancelled", {"requestId": 1}, None)
        answer = {"jsonrpc": "2.0", "id": "aenv-1", "result": {}}
        waiting = asyncio.create_task(ann.post(hers, json=wait, headers=session))
        for stolen in (add, cancel, answer, message("tools/list", {}, 3)):
            refused = await bob.post(hers, json=stolen, headers=session)
            assert refused.json()["error"]["data"]["code"] == "instance_not_found"
        assert (await bob.delete(hers, headers=session)).status_code == 404
        # At his own instance it is a session of his.
        assert (await bob.post(his, json=cancel, headers=session)).status_code == 202
        assert (await bob.delete(his, headers=session)).status_code == 200
        sum_of_hers = await ann.post(hers, json=add, headers=session)
        assert sum_of_hers.json()["result"]["structuredContent"] == {"result": 3}
        assert not waiting.done()
        assert (await ann.post(hers, json=cancel, headers=session)).status_code == 202
        assert "error" in (await waiting).json()
