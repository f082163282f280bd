"""A container's streams through the daemon: connections that leave HTTP after their first request.

What goes in is passed on as it is. What comes out is in frames, which are opened here, so that the
engine has a socket like any other; stderr is kept for messages.
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
_WORDS_BYTES: Final = 4096


async def hijack(path: str, target: str, body: Any = None) -> tuple[socket.socket, bytes]:
    """Make a request that turns its connection into a stream.

    Args:
        path: Of the daemon's socket.
        target: What is requested, with its query.
        body: Sent as JSON.

    Returns:
        The stream, non-blocking, and what came on it already.

    Raises:
        DaemonRefused: The daemon refuses.
        OSError: It does not answer; a timeout among it.
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
            words = rest.decode(errors="replace").strip()
            with contextlib.suppress(ValueError, KeyError, TypeError):
                words = str(json.loads(rest)["message"])
            raise DaemonRefused(status, words)
    except BaseException:
        sock.close()
        raise
    return sock, rest


class Stream:
    """Passes on what comes between a stream of the daemon and a socket of this process.

    Args:
        daemon: From `hijack`.
        come: Likewise.
    """

    def __init__(self, daemon: socket.socket, come: bytes) -> None:
        self._daemon = daemon
        self._buffer = bytearray(come)
        self._words = b""
        ours, self._near = socket.socketpair()
        ours.setblocking(False)
        self.socket = ours
        """The engine's end; closing it ends the stream."""
        self._near.setblocking(False)
        self._task = asyncio.create_task(self._pass())

    @property
    def words(self) -> str:
        """The end of what came on stderr, or instead of a stream."""
        return (self._words or bytes(self._buffer)).decode(errors="replace").strip()

    async def _pass(self) -> None:
        passing = [asyncio.create_task(self._out()), asyncio.create_task(self._in())]
        try:
            await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in passing:
                task.cancel()
            await asyncio.wait(passing)
            self._near.close()
            self._daemon.close()

    async def _in(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # its end is the other's end
            while piece := await loop.sock_recv(self._near, _PIECE_BYTES):
                await loop.sock_sendall(self._daemon, piece)

    async def _out(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while True:
                for kind, payload in _frames(self._buffer):
                    if kind == _STDERR:
                        self._words = (self._words + payload)[-_WORDS_BYTES:]
                    else:
                        await loop.sock_sendall(self._near, payload)
                piece = await loop.sock_recv(self._daemon, _PIECE_BYTES)
                if not piece:
                    return
                self._buffer += piece

    async def ended(self) -> None:
        """Wait for its end."""
        await asyncio.wait([self._task])


def _frames(buffer: bytearray) -> list[tuple[int, bytes]]:
    """Take the whole frames from the beginning of a buffer: kind and payload of each."""
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
