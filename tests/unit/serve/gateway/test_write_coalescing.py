"""Answers leave in one piece, in order, and a stream of them does not pile up."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from aenv_ray.serve.gateway.listener import Listener, listen
from aenv_ray.serve.gateway.write_coalescing import Gathering

UP_S = 60.0


class Recording(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_gone = False
        self.was_ended = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        assert not self.is_gone
        self.writes.append(bytes(data))

    def write_eof(self) -> None:
        self.was_ended = True

    def close(self) -> None:
        self.is_gone = True

    def is_closing(self) -> bool:
        return self.is_gone

    def get_write_buffer_size(self) -> int:
        return 7


@pytest.fixture
async def pair() -> tuple[Gathering, Recording]:
    """Return a gathering transport and the one below it."""
    below = Recording()
    return Gathering(below, asyncio.get_running_loop()), below


async def test_what_one_turn_writes_goes_together(pair: tuple[Gathering, Recording]) -> None:
    """Head and body are one packet."""
    above, below = pair
    above.write(b"head ")
    above.write(b"body")
    assert below.writes == []
    assert above.get_write_buffer_size() == 7 + 9
    await asyncio.sleep(0)
    assert below.writes == [b"head body"]
    above.write(b"next")
    await asyncio.sleep(0)
    assert below.writes == [b"head body", b"next"]


async def test_much_is_written_at_once(pair: tuple[Gathering, Recording]) -> None:
    """Flow control must see what waits."""
    above, below = pair
    above.write(b"a")
    above.write(bytes(100_000))
    assert [len(data) for data in below.writes] == [100_001]
    await asyncio.sleep(0)
    assert len(below.writes) == 1


@pytest.mark.parametrize("end", ["close", "write_eof"])
async def test_the_end_comes_after_what_was_written(
    pair: tuple[Gathering, Recording], end: str
) -> None:
    """No answer loses its last bytes."""
    above, below = pair
    above.write(b"last words")
    getattr(above, end)()
    assert below.writes == [b"last words"]
    assert below.is_gone or below.was_ended


async def test_a_client_that_is_gone_gets_nothing(pair: tuple[Gathering, Recording]) -> None:
    """It went away within the turn."""
    above, below = pair
    above.write(b"too late")
    below.is_gone = True
    await asyncio.sleep(0)
    assert below.writes == []


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] == "/stream":

        async def pieces():  # type: ignore[no-untyped-def]
            for number in range(400):
                yield bytes([number % 256]) * 10_000

        await StreamingResponse(pieces())(scope, receive, send)
    else:
        await Response(b"small")(scope, receive, send)


def test_a_server_answers_whole() -> None:
    """Small answers and long streams arrive as they were sent."""
    sock = listen("127.0.0.1", 0, shared=False)

    async def make():  # type: ignore[no-untyped-def]
        return app

    async def close() -> None:
        pass

    listener = Listener(make, [sock], close)
    listener.start(UP_S)
    try:
        port = sock.getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=UP_S) as http:
            assert [http.get("/").content for _ in range(3)] == [b"small"] * 3
            body = http.get("/stream").content
        assert body == b"".join(bytes([n % 256]) * 10_000 for n in range(400))
        with socket.create_connection(("127.0.0.1", port), timeout=UP_S) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            told = b""
            while data := raw.recv(65536):
                told += data
        assert told.endswith(b"small")
    finally:
        listener.stop()
