"""Sends the head of a response together with the beginning of its body.

Uvicorn writes the head, then the body. For a small response this means a second system call, a
second packet, and a client that wakes up twice. Measured with 32 concurrent echo calls: a fifth
fewer calls/s.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

_HEAD: Final = b"HTTP/1.1 "
_MAX_BYTES: Final = 64 * 1024
"""A larger body is not copied: it is written on its own."""


class CoalescingTransport:
    """Holds back the head of a response until its body follows, or the event loop's next turn.

    Args:
        transport: The transport of the connection.
        loop: The event loop of the transport.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write `data` after what was written before."""
        if self._head and len(data) <= _MAX_BYTES:
            data, self._head = self._head + data, b""
        elif self._head:
            self._flush()
        elif data.startswith(_HEAD):
            self._head = data
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def close(self) -> None:
        """Close the connection, after what was written."""
        self._flush()
        self._transport.close()

    def write_eof(self) -> None:
        """Close the writing side of the connection, after what was written."""
        self._flush()
        self._transport.write_eof()

    def get_write_buffer_size(self) -> int:
        """Return how many bytes have not been sent."""
        return len(self._head) + self._transport.get_write_buffer_size()

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():  # the client may have disconnected meanwhile
            self._transport.write(head)
