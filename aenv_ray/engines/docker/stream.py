"""A container's streams through the daemon: HTTP connections that become raw after the request.

Input is sent unchanged. Output comes in frames, which are unpacked here, so that the engine gets an
ordinary socket; stderr is collected for error messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from typing import Any, Final

from aenv_ray.engines.node.docker_client import DaemonRefused

OPEN_S: Final = 30.0
"""How long the daemon may take to open a stream."""
_PIECE_BYTES: Final = 65_536
_HEAD_BYTES: Final = 16_384
_FRAME_HEAD: Final = struct.Struct(">BxxxI")
_STDERR: Final = 2
_ERROR_BYTES: Final = 4096


async def hijack(path: str, target: str, body: Any = None) -> tuple[socket.socket, bytes]:
    """Make a request that turns its connection into a raw stream.

    Args:
        path: Of the daemon's socket.
        target: Path and query of the request.
        body: Sent as JSON.

    Returns:
        The connection, non-blocking, and what was already received on it.

    Raises:
        DaemonRefused: The daemon refuses.
        OSError: It does not answer, or not in time (`TimeoutError`).
    """
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    try:
        async with asyncio.timeout(OPEN_S):
            await loop.sock_connect(sock, path)
            content = json.dumps(body).encode() if body is not None else b""
            request = (
                f"POST {target} HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\n"
                "Upgrade: tcp\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(content)}\r\n\r\n"
            )
            await loop.sock_sendall(sock, request.encode() + content)
            data = bytearray()
            while b"\r\n\r\n" not in data:
                piece = await loop.sock_recv(sock, _PIECE_BYTES)
                if not piece or len(data) > _HEAD_BYTES:
                    raise ConnectionResetError("the daemon closed the stream")
                data += piece
        head, _, rest = bytes(data).partition(b"\r\n\r\n")
        status = int(head.split(None, 2)[1])
        if status not in (101, 200):
            message = rest.decode(errors="replace").strip()
            with contextlib.suppress(ValueError, KeyError, TypeError):
                message = str(json.loads(rest)["message"])
            raise DaemonRefused(status, message)
    except BaseException:
        sock.close()
        raise
    return sock, rest


class Stream:
    """Forwards data between a raw stream of the daemon and a socket.

    Args:
        daemon: The connection, from `hijack`.
        received: What was already received, from `hijack`.
    """

    def __init__(self, daemon: socket.socket, received: bytes) -> None:
        self._daemon = daemon
        self._buffer = bytearray(received)
        self._stderr = b""
        ours, self._near = socket.socketpair()
        ours.setblocking(False)
        self.socket = ours
        """The engine's end; closing it ends the stream."""
        self._near.setblocking(False)
        self._task = asyncio.create_task(self._forward())

    @property
    def errors(self) -> str:
        """The end of stderr, or of what was received instead of frames."""
        return (self._stderr or bytes(self._buffer)).decode(errors="replace").strip()

    async def _forward(self) -> None:
        directions = [asyncio.create_task(self._out()), asyncio.create_task(self._in())]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in directions:
                task.cancel()
            await asyncio.wait(directions)
            self._near.close()
            self._daemon.close()

    async def _in(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # the end of one direction ends the other
            while piece := await loop.sock_recv(self._near, _PIECE_BYTES):
                await loop.sock_sendall(self._daemon, piece)

    async def _out(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while True:
                for kind, payload in _frames(self._buffer):
                    if kind == _STDERR:
                        self._stderr = (self._stderr + payload)[-_ERROR_BYTES:]
                    else:
                        await loop.sock_sendall(self._near, payload)
                piece = await loop.sock_recv(self._daemon, _PIECE_BYTES)
                if not piece:
                    return
                self._buffer += piece

    async def ended(self) -> None:
        """Wait until both directions have ended."""
        await asyncio.wait([self._task])


def _frames(buffer: bytearray) -> list[tuple[int, bytes]]:
    """Take the complete frames from the beginning of a buffer; return kind and payload of each."""
    found, position = [], 0
    while position + _FRAME_HEAD.size <= len(buffer):
        kind, size = _FRAME_HEAD.unpack_from(buffer, position)
        start = position + _FRAME_HEAD.size
        if start + size > len(buffer):
            break
        found.append((kind, bytes(buffer[start : start + size])))
        position = start + size
    del buffer[:position]
    return found
