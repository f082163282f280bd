"""Limits on what a client without a token can make the server wait for or store."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from aenv_ray.runtime.public import requests as public_requests
from aenv_ray.runtime.public.requests import BodyLimit
from aenv_ray.serve.gateway import http_protocol, requests
from aenv_ray.serve.gateway.http_protocol import HeaderTimeoutProtocol
from aenv_ray.serve.gateway.listener import GatewayListener, listen

LONG_S = 120.0
"""For things that happen soon."""
SHORT_S = 0.1
"""For things that never happen. For anything else it is too short: see `Server.held`."""


LONG_BYTES = 16 << 20
"""More than the buffers of a socket."""


class Server:
    """A server on its own port."""

    def __init__(self) -> None:
        self._sock = listen("127.0.0.1", 0, shared=False)
        self._began = threading.Event()
        """Set by an answer since the last connection of `told`."""
        self._listener = GatewayListener(self._app, [self._sock])
        self._listener.start(LONG_S)

    @asynccontextmanager
    async def _app(self) -> AsyncIterator[ASGIApp]:
        self._loop = asyncio.get_running_loop()
        routes = [
            Route("/", self._answer),
            Route("/later", self._answer_later),
            Route("/long", self._answer_long),
            Route("/body", self._read, methods=["POST"]),
            Route("/door", BodyLimit(self._read_as_door, 10**6), methods=["POST"]),
            WebSocketRoute("/echo", self._echo),
        ]
        yield Starlette(routes=routes)

    async def _answer(self, request: Request) -> Response:
        self._began.set()
        return Response(b"here")

    async def _answer_later(self, request: Request) -> Response:
        self._began.set()
        await asyncio.sleep(2 * SHORT_S)  # longer than heads are waited for
        http_protocol.HEAD_S = LONG_S  # from here on nothing hurries, until `hasty` puts it back
        await asyncio.sleep(2 * SHORT_S)  # the short wait that had begun is over
        return Response(b"late")

    async def _answer_long(self, request: Request) -> Response:
        return Response(bytes(LONG_BYTES))

    async def _read(self, request: Request) -> Response:
        self._began.set()
        return Response(await requests.read_body(request, 10**6))

    async def _read_as_door(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        self._began.set()
        try:
            response = Response(await Request(scope, receive).body())
        except public_requests.BadRequest as exc:
            response = exc.response()
        await response(scope, receive, send)

    async def _echo(self, websocket: WebSocket) -> None:
        await websocket.accept()
        await asyncio.sleep(2 * SHORT_S)
        await websocket.send_text("still here")

    @property
    def address(self) -> tuple[str, int]:
        found: tuple[str, int] = self._sock.getsockname()
        return found

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=LONG_S)

    def told(self, *pieces: bytes) -> bytes:
        """Return all that the server sends until it closes the connection."""
        self._began.clear()
        first, *more = [piece for piece in pieces if piece] or [b""]
        with self.held():
            sock = self.connect()
            sock.sendall(first)
        with sock:
            assert not more or self._began.wait(LONG_S)  # what follows is no part of the first
            for piece in more:
                sock.sendall(piece)
            return rest_of(sock)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Block the server's event loop, so that it sees a connection together with its data.

        Otherwise a busy machine could need longer to send the first byte than the server waits.
        """
        is_still, go = threading.Event(), threading.Event()

        def hold() -> None:
            is_still.set()
            go.wait(LONG_S)

        self._loop.call_soon_threadsafe(hold)
        try:
            assert is_still.wait(LONG_S)
            yield
        finally:
            go.set()

    def stop(self) -> None:
        self._listener.stop()


def rest_of(sock: socket.socket) -> bytes:
    told = bytearray()
    while data := sock.recv(65536):
        told += data
    return bytes(told)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_S", SHORT_S)


@pytest.fixture(scope="module")  # what is patched is read when a connection or a request comes
def server() -> Iterator[Server]:
    server = Server()
    try:
        yield server
    finally:
        server.stop()


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("before", "begun"),
    [(b"", b""), (b"", b"\r\n"), (b"", b"GET / HT"), (b"", GET[:-2]), (GET, GET[:-2])],
)
def test_an_unfinished_head_times_out(
    hasty: None, server: Server, before: bytes, begun: bytes
) -> None:
    """Invariant 9: also after an answered request."""
    assert server.told(before, begun).count(b"here") == before.count(b"GET")


def ask_for_much(server: Server) -> socket.socket:
    """Return a connection with an answer that is not read."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(LONG_S)
    sock.connect(server.address)
    sock.sendall(LAST.replace(b"/", b"/long", 1))
    return sock


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return what is set when the server has dropped a connection."""
    event = threading.Event()
    connection_lost = HeaderTimeoutProtocol.connection_lost

    def noting(self: HeaderTimeoutProtocol, exc: Exception | None) -> None:
        connection_lost(self, exc)
        event.set()

    monkeypatch.setattr(HeaderTimeoutProtocol, "connection_lost", noting)
    return event


def test_a_client_that_does_not_read_is_disconnected(
    server: Server, lost: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: the answer would stay in memory for as long as the client likes."""
    monkeypatch.setattr(http_protocol, "UNREAD_S", SHORT_S)
    with ask_for_much(server) as sock:
        assert lost.wait(LONG_S)
        assert len(rest_of(sock)) < LONG_BYTES


def test_answers_that_many_clients_do_not_read_have_a_limit(
    server: Server, lost: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 7: also within the time that a client has for reading."""
    monkeypatch.setattr(http_protocol, "MAX_UNREAD_BYTES", 3 * LONG_BYTES // 2)
    with ask_for_much(server) as one, ask_for_much(server) as other:
        assert lost.wait(LONG_S)
        lengths = sorted(len(rest_of(sock)) for sock in (one, other))
    assert lengths[0] < LONG_BYTES < lengths[1]


def test_an_endless_head_does_not_fill_memory(server: Server) -> None:
    """The client gets an answer although it is still sending."""
    piece = b"X-Long: " + b"x" * 100_000
    with server.connect() as sock:
        sock.sendall(GET[:-2])
        told = b""
        try:
            while not told:
                sock.sendall(piece)
                sock.setblocking(False)
                try:
                    told = sock.recv(65536)
                except BlockingIOError:
                    pass
                finally:
                    sock.settimeout(LONG_S)
        except ConnectionError:
            return  # it closed, before its word was read
    assert told.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(("size", "status"), [(60_000, b"200"), (70_000, b"431")])
@pytest.mark.parametrize("headers", [1, 100])
def test_a_head_has_a_limit_however_it_arrives(
    server: Server, size: int, status: bytes, headers: int
) -> None:
    """64 KiB, in one piece too: docs/gateway.md."""
    lines = b"".join(b"X-Long: " + b"x" * (size // headers) + b"\r\n" for _ in range(headers))
    told = server.told(LAST[:-2] + lines + b"\r\n")
    assert told.startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize(
    "headers", [b"a:\r\n" * 16_500, b"a:" + b" " * 75_000 + b"b\r\n"], ids=["tiny", "spaces"]
)
def test_what_the_parser_skips_counts_towards_the_limit(server: Server, headers: bytes) -> None:
    assert server.told(LAST[:-2] + headers + b"\r\n").startswith(b"HTTP/1.1 431 ")


def test_requests_in_progress_and_pipelined_ones_do_not_time_out(
    hasty: None, server: Server
) -> None:
    """A client that waits for our answer is not idle."""
    later = b"GET /later HTTP/1.1\r\nHost: x\r\n\r\n"
    told = server.told(later + GET + LAST[:20], LAST[20:])
    assert (told.count(b"late"), told.count(b"here")) == (1, 2)


@pytest.mark.parametrize("path", [b"/body", b"/door"])
def test_a_stalled_body_gets_408(
    server: Server, path: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 9: a body that arrives completely is still accepted."""
    head = b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"
    assert server.told(head + b"Connection: close\r\n\r\n", b"half").endswith(b"\r\n\r\nhalf")
    for module in (requests, public_requests):
        monkeypatch.setattr(module, "BODY_S", SHORT_S)
    for part in (b"", b"ha"):
        with server.connect() as sock:
            sock.sendall(head + b"\r\n" + part)
            assert sock.recv(65536).startswith(b"HTTP/1.1 408 ")


def test_a_websocket_does_not_time_out(hasty: None, server: Server) -> None:
    """It may be silent for any time."""
    key = base64.b64encode(os.urandom(16))
    told = server.told(
        b"GET /echo HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + key + b"\r\n\r\n"
    )
    assert b" 101 " in told
    assert b"still here" in told
