"""A port of this machine that leads to a port inside an instance, over Ray."""

from __future__ import annotations

import asyncio
import contextlib

from aenv_ray.actors.calls.handle import EnvHandle
from aenv_ray.actors.calls.json_calls import InstanceCalls
from aenv_ray.actors.calls.port_stream import PIECE_BYTES, PortStream
from aenv_ray.errors import AenvError


class PortForward:
    """Forwards connections to a port of the loopback interface into an instance.

    Args:
        handle: Handle of the instance.
        port: Port of a server inside. It need not be up yet: until then, connections end at once.

    Use it on one event loop.
    """

    def __init__(self, handle: EnvHandle, port: int) -> None:
        self._handle = handle
        self._port = port
        self._calls = InstanceCalls(self._find, lambda _: None)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def open(self) -> int:
        """Listen, and return the port of this machine."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Close the port and its connections, any number of times."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)
        self._calls.close()

    async def _find(self, _: str) -> EnvHandle:
        return self._handle

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = PortStream(self._calls, self._handle.instance_id)
        loop = asyncio.get_running_loop()
        try:
            await stream.open(self._port)
            sending = loop.create_task(_send_all(reader, stream))
            try:
                while data := await stream.read():
                    writer.write(data)
                    await writer.drain()
            finally:
                sending.cancel()
                await asyncio.wait({sending})
        except (AenvError, ConnectionError):
            return  # nothing listens inside, or one side is gone: the client sees the end
        finally:
            writer.close()
            with contextlib.suppress(AenvError):
                await asyncio.shield(stream.close())


async def _send_all(reader: asyncio.StreamReader, stream: PortStream) -> None:
    with contextlib.suppress(AenvError, ConnectionError):  # reading from the stream ends, too
        while data := await reader.read(PIECE_BYTES):
            await stream.write(data)
