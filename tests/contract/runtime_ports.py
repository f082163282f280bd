"""Connections to servers inside a sandbox, the same on every engine."""

from __future__ import annotations

import base64
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import h11
import pytest
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from aenv_ray.engines.base import Sandbox
from aenv_ray.errors import PortUnreachable
from aenv_ray.testing.contract_bench import evaluate, request, value_of

_LARGE: Final = bytes(range(256)) * 4096
_SERVER: Final = (Path(__file__).parents[1] / "fixtures" / "port_server.py").read_text()
_PIECE_BYTES: Final = 256 * 1024


class _Connection:
    """A connection to a port inside a sandbox."""

    def __init__(self, sandbox: Sandbox, port: int) -> None:
        self._sandbox = sandbox
        self._port = port
        self._name = ""

    async def __aenter__(self) -> Self:
        opened = await request(self._sandbox, "aenv/port_open", {"arguments": {"port": self._port}})
        self._name = opened["connection"]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._ask("close")

    async def read(self) -> bytes:
        """Return the next bytes; empty at the end."""
        while not ((told := await self._ask("read"))["data"] or told["ended"]):
            pass
        return base64.b64decode(told["data"])

    async def write(self, data: bytes) -> None:
        """Send bytes."""
        for start in range(0, len(data), _PIECE_BYTES):
            piece = base64.b64encode(data[start : start + _PIECE_BYTES]).decode()
            await self._ask("write", data=piece)

    async def _ask(self, what: str, **arguments: Any) -> Any:
        params = {"arguments": {"connection": self._name, **arguments}}
        return await request(self._sandbox, f"aenv/port_{what}", params)


async def _serve(sandbox: Sandbox, address: str) -> int:
    """Start the server inside the sandbox, and return its port."""
    port: int = await evaluate(sandbox, f"{_SERVER}\nresult = serve({address!r})\n")
    return port


class PortTests:
    """Servers inside a sandbox whose network cannot be reached from outside."""

    @pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
    async def test_http_reaches_a_server_inside(self, shared: Sandbox, address: str) -> None:
        port = await _serve(shared, address)
        http = h11.Connection(h11.CLIENT)
        headers = [("host", "inside"), ("content-length", str(len(_LARGE)))]
        asked = h11.Request(method="POST", target="/a?b=c%20d", headers=headers)
        async with _Connection(shared, port) as connection:
            for event in (asked, h11.Data(data=_LARGE), h11.EndOfMessage()):
                await connection.write(http.send(event) or b"")
            status, path, body = 0, b"", b""
            while not isinstance(came := http.next_event(), h11.EndOfMessage):
                if came is h11.NEED_DATA:
                    http.receive_data(await connection.read())
                elif isinstance(came, h11.Response):
                    status, path = came.status_code, dict(came.headers)[b"x-path"]
                elif isinstance(came, h11.Data):
                    body += bytes(came.data)
        assert (status, path, body) == (201, b"/a?b=c%20d", _LARGE[::-1])

    async def test_websockets_reach_a_server_inside(self, shared: Sandbox) -> None:
        port = await _serve(shared, "127.0.0.1")
        client = ClientProtocol(parse_uri("ws://inside/"), max_size=None)
        client.send_request(client.connect())
        frames: list[Frame] = []

        async def answer(connection: _Connection) -> Frame:
            """Send pending data, and return the next message."""
            for data in client.data_to_send():
                await connection.write(data)
            while not frames:
                client.receive_data(await connection.read())
                frames.extend(e for e in client.events_received() if isinstance(e, Frame))
            return frames.pop(0)

        async with _Connection(shared, port) as connection:
            assert (await answer(connection)).data == b"welcome"
            client.send_text("hällo".encode())
            assert (await answer(connection)).data == "hällo".encode()
            client.send_binary(_LARGE)
            came = await answer(connection)
            assert (came.opcode, came.data) == (Opcode.BINARY, _LARGE)
            client.send_close(4000, "as you wish")
            came = await answer(connection)
            assert came.opcode is Opcode.CLOSE
            assert came.data == (4000).to_bytes(2, "big") + b"as you wish"

    async def test_the_error_names_a_port_without_a_server(self, shared: Sandbox) -> None:
        with pytest.raises(PortUnreachable, match="nothing in the sandbox answers on port 1:"):
            async with _Connection(shared, 1):
                pass
        assert await value_of(shared, "echo", text="alive") == "alive"
