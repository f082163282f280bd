"""The host's side of connections to a pod: mutual proof of the key first, then the purpose."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Final

from aenv_ray.engines.node.host_key import authenticate

CONNECT_S: Final = 10.0
_RETRY_S: Final = 0.02
_LONGEST_RETRY_S: Final = 0.5
_PIECE_BYTES: Final = 65_536
_IDLE_S: Final = 15
_UNANSWERED_MS: Final = 30_000


async def connect(address: str, port: int, *, within_s: float) -> socket.socket:
    """Return a connection, retrying while nothing listens there yet.

    Raises:
        OSError: Nothing listened in time.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + within_s
    pause = _RETRY_S
    while True:
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(min(CONNECT_S, max(0.01, end - loop.time()))):
                await loop.sock_connect(sock, (address, port))
        except OSError:
            sock.close()
            if loop.time() + pause > end:
                raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_RETRY_S)
            continue
        except BaseException:
            sock.close()
            raise
        _set_options(sock)
        return sock


def _set_options(sock: socket.socket) -> None:
    """Send calls without delay, and detect a node that is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE_S), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", _UNANSWERED_MS),
    ):  # fmt: skip
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def open_authenticated(
    address: str, port: int, key: bytes, purpose: Mapping[str, Any], *, within_s: float = CONNECT_S
) -> socket.socket:
    """Return a connection, for a purpose, to the process 1 that has a key.

    Raises:
        OSError: Nothing answers, or the peer does not have the key.
    """
    sock = await connect(address, port, within_s=within_s)
    try:
        async with asyncio.timeout(CONNECT_S):
            await authenticate(sock, key, purpose)
    except BaseException:
        sock.close()
        raise
    return sock


class ControlConnection:
    """The connection that keeps an instance owned by this host and reports its end.

    Args:
        sock: From `open_authenticated`.
        on_ended: Called with cause and log when the instance's process ends.
    """

    def __init__(self, sock: socket.socket, on_ended: Callable[[str, str], None]) -> None:
        self._sock = sock
        self._on_ended = on_ended
        self._answers: asyncio.Queue[bool] = asyncio.Queue()
        self._moving = asyncio.Lock()
        self._task = asyncio.create_task(self._read_messages())

    async def _read_messages(self) -> None:
        loop = asyncio.get_running_loop()
        buffer = b""
        try:
            while piece := await loop.sock_recv(self._sock, _PIECE_BYTES):
                *lines, buffer = (buffer + piece).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    if "ended" in message:
                        self._on_ended(str(message["ended"]), str(message.get("log") or ""))
                    else:
                        self._answers.put_nowait(True)
        except (OSError, ValueError):
            pass  # the API reports what happened to the pod
        finally:
            self._answers.put_nowait(False)

    async def move_deadline(self, ends_in_s: float) -> bool:
        """Set the deadline, in seconds from now; return False if the pod does not answer."""
        async with self._moving:
            if self._task.done():
                return False
            line = json.dumps({"ends_in_s": ends_in_s}).encode() + b"\n"
            try:
                async with asyncio.timeout(CONNECT_S):
                    await asyncio.get_running_loop().sock_sendall(self._sock, line)
                    return await self._answers.get()
            except OSError:  # includes timeouts
                return False

    async def close(self) -> None:
        """Disconnect."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self._sock.close()


async def read_log(sock: socket.socket) -> AsyncGenerator[bytes, None]:
    """Yield what arrives on a connection for logs, until it ends."""
    loop = asyncio.get_running_loop()
    with sock:
        while piece := await loop.sock_recv(sock, _PIECE_BYTES):
            yield piece
