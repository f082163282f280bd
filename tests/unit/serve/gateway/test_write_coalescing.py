"""A small response is one write, and nothing waits for a body that comes later."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from aenv_ray.serve.gateway.http_protocol import CoalescingTransport
from aenv_ray.serve.gateway.listener import GatewayListener, listen

LONG_S = 60.0
LARGE = b"x" * 3_000_000


class Server:
    """A gateway's listener with three routes."""

    def __init__(self) -> None:
        self._goes_on = asyncio.Event()
        self._sock = listen("127.0.0.1", 0, shared=False)
        self._listener = GatewayListener(self._app, [self._sock])
        self._listener.start(LONG_S)

    @asynccontextmanager
    async def _app(self) -> AsyncIterator[ASGIApp]:
        self._loop = asyncio.get_running_loop()
        self._goes_on = asyncio.Event()
        yield Starlette(
            routes=[
                Route("/small", self._small),
                Route("/large", self._large),
                Route("/later", self._later),
            ]
        )

    async def _small(self, request: Request) -> Response:
        return Response(b"here")

    async def _large(self, request: Request) -> Response:
        return Response(LARGE)

    async def _later(self, request: Request) -> Response:
        async def body() -> AsyncIterator[bytes]:
            await self._goes_on.wait()
            yield b"at last"

        return StreamingResponse(body())

    def go_on(self) -> None:
        """Let the body of ``/later`` come."""
        self._loop.call_soon_threadsafe(self._goes_on.set)

    def connect(self) -> socket.socket:
        """Return a connection."""
        return socket.create_connection(self._sock.getsockname(), timeout=LONG_S)

    def close(self) -> None:
        """End it."""
        self.go_on()
        self._listener.stop()


@pytest.fixture
def server() -> Iterator[Server]:
    """Run a server."""
    running = Server()
    yield running
    running.close()


def received(connection: socket.socket, path: str) -> bytes:
    """Return all of a response, after which the server closes the connection."""
    connection.sendall(f"GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode())
    return b"".join(iter(lambda: connection.recv(1 << 20), b""))


def test_responses_of_one_connection_arrive_whole(server: Server) -> None:
    with server.connect() as connection:
        for _ in range(3):  # on the same connection
            connection.sendall(b"GET /small HTTP/1.1\r\nhost: a\r\n\r\n")
            packet = connection.recv(65_536)
            assert packet.startswith(b"HTTP/1.1 200")
            assert packet.endswith(b"\r\n\r\nhere")


def test_a_large_body_arrives_whole(server: Server) -> None:
    with server.connect() as connection:
        head, _, body = received(connection, "/large").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert body == LARGE


def test_the_head_does_not_wait_for_a_body_that_comes_later(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET /later HTTP/1.1\r\nhost: a\r\n\r\n")
        head = connection.recv(65_536)
        assert head.startswith(b"HTTP/1.1 200")
        assert head.endswith(b"\r\n\r\n")
        server.go_on()
        assert b"at last" in connection.recv(65_536)


async def test_head_and_small_body_are_one_write() -> None:
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(asyncio.Protocol, sock=theirs)
    writes: list[bytes] = []
    real = transport.write

    def write(data: bytes) -> None:
        writes.append(data)
        real(data)

    transport.write = write  # type: ignore[method-assign]
    coalescing = CoalescingTransport(transport, loop)
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    for body in (b"here", LARGE):
        coalescing.write(head)
        assert not writes, "it waits for the body"
        coalescing.write(body)
        assert writes == ([head, LARGE] if body is LARGE else [head + body])
        writes.clear()
    coalescing.write(head)
    await asyncio.sleep(0)
    assert writes == [head], "no body followed in the same turn of the loop"
    transport.abort()
    ours.close()


async def test_a_connection_is_closed_after_a_head_that_waits() -> None:
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(asyncio.Protocol, sock=theirs)
    coalescing = CoalescingTransport(transport, loop)
    coalescing.write(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert coalescing.get_write_buffer_size() == 27
    coalescing.close()
    with ours:
        ours.setblocking(False)
        assert await loop.sock_recv(ours, 1000) == b"HTTP/1.1 204 No Content\r\n\r\n"
        assert await loop.sock_recv(ours, 1000) == b""
