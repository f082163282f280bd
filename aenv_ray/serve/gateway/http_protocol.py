"""HTTP connections of the gateway: uvicorn's protocol with limits, and fewer writes.

The limits are on the time and size of a request's head, and on how slowly an answer is read.
Uvicorn waits for the end of a head without a limit, and buffers all that arrives. Anybody who
reaches the port could fill the memory or take all connections that way, without a token. It also
keeps an answer until its client has read it, even after it has closed the connection.

Uvicorn writes the head of a response, then its body. For a small response this means a second
system call, a second packet, and a client that wakes up twice. Measured with 32 concurrent echo
calls: a fifth fewer calls/s.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 60.0
"""Maximum time from the start of the wait for a request to the end of its head."""
MAX_HEAD_BYTES: Final = 64 * 1024
"""Maximum size of a request's URL and headers."""
UNREAD_S = 60.0
"""A client that reads nothing of an answer for this long is disconnected."""
MAX_UNREAD_BYTES = 256 * 1024 * 1024
"""Limit of unread data in all answers of this process. Beyond it, the connection with the most
unread data is closed."""
_PIECE_BYTES: Final = 4 * 1024
_RESPONSE_HEAD: Final = b"HTTP/1.1 "
_MAX_COPIED_BYTES: Final = 64 * 1024
"""A larger body is not copied: it is written on its own."""
_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"connection: close\r\ncontent-length: 0\r\n\r\n"
)


class HeadTooLarge(Exception):
    """Ends the parsing of a request; the client gets status 431."""


class HeaderTimeoutProtocol(HttpToolsProtocol):
    """Uvicorn's protocol, with these limits; a response leaves in one write if it is small."""

    slow: ClassVar[set[HeaderTimeoutProtocol]] = set()
    """Connections of this process whose clients do not read as fast as the answer is sent."""

    cycle: Any
    """The latest request and its answer; None before the first."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._in_head = False
        self._head_bytes = 0
        """Size of the current head, as far as it is parsed."""
        self._unparsed_bytes = 0
        """Bytes received since the current head began; limits a header that never ends."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # noqa: D102
        super().connection_made(CoalescingTransport(transport, self.loop))  # type: ignore[arg-type]
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        self._stop_timer()
        self._reads_again()
        super().connection_lost(exc)

    # --- slow readers -------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Note that the client does not read as fast as the answer is sent."""
        super().pause_writing()
        self.slow.add(self)
        self._watch_reader(None)
        self.loop.call_soon(self._limit_unread)  # not in the middle of a write

    def resume_writing(self) -> None:
        """Note that the client has read most of what was sent."""
        super().resume_writing()
        self._reads_again()

    def _reads_again(self) -> None:
        self.slow.discard(self)
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _watch_reader(self, unread_before: int | None) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread_before is not None and unread >= unread_before:
            self.transport.abort()
            return
        self._unread_timer = self.loop.call_later(UNREAD_S, self._watch_reader, unread)

    def _limit_unread(self) -> None:
        unread = {one: one.transport.get_write_buffer_size() for one in self.slow}
        if sum(unread.values()) > MAX_UNREAD_BYTES:
            max(unread, key=unread.__getitem__).transport.abort()

    # --- the parser's callbacks ---------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Note that a head begins."""
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count a part of the URL."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, with its colon, space and line break."""
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Note that the head is complete."""
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise HeadTooLarge  # the parser stops, and uvicorn calls `send_400_response`

    # --- the connection -----------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be parsed, or whose head is too large."""
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse()
        else:
            super().send_400_response(msg)

    def data_received(self, data: bytes) -> None:  # noqa: D102
        is_body = not (self._in_head or self._is_idle)
        if is_body or len(data) <= _PIECE_BYTES:
            self._parse(data)
            return
        # In pieces, so that what the parser skips in a head, such as spaces, is counted too.
        for start in range(0, len(data), _PIECE_BYTES):
            receiver = self.transport.get_protocol()
            if receiver is not self:  # it has become a WebSocket
                receiver.data_received(data[start:])  # type: ignore[attr-defined]  # a Protocol
                return
            if self.transport.is_closing():
                return
            self._parse(data[start : start + _PIECE_BYTES])

    def _parse(self, data: bytes) -> None:
        self._unparsed_bytes = self._unparsed_bytes + len(data) if self._in_head else 0
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head and self._unparsed_bytes > MAX_HEAD_BYTES:
            self._refuse()
        elif (self._in_head or self._is_idle) and self.transport.get_protocol() is self:
            self._start_timer()  # it has not become a WebSocket

    def _refuse(self) -> None:
        self.transport.write(_TOO_LARGE)
        self.transport.close()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_timer(self) -> None:
        if self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(HEAD_S, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        if self._is_idle:
            self.transport.close()
        else:  # an earlier request of the connection is still running, so nothing is read
            self._start_timer()


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
        if self._head and len(data) <= _MAX_COPIED_BYTES:
            data, self._head = self._head + data, b""
        elif self._head:
            self._flush()
        elif data.startswith(_RESPONSE_HEAD):
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
