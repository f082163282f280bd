"""How long a connection may keep the server waiting for a request, and how large its head may be.

Uvicorn waits for ever for a head that does not end, and keeps whatever comes. Anybody who reaches
the port could so fill the memory, or take up all connections, without a token.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

HEAD_S = 60.0
"""From when a request's head is waited for to its end."""
MOST_HEAD_BYTES: Final = 64 * 1024
"""Of a head that came in more than one piece; one piece is a quarter of a MiB at most."""
_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"connection: close\r\ncontent-length: 0\r\n\r\n"
)


class Patience:
    """Limits heads; mixed in before uvicorn's protocol on httptools, whose hooks it uses."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    cycle: Any
    """The latest request and its answer; None before the first."""
    _due: asyncio.TimerHandle | None = None
    _in_head = False
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # noqa: D102
        super().connection_made(transport)  # type: ignore[misc]
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        self._have_head()
        super().connection_lost(exc)  # type: ignore[misc]

    def on_message_begin(self) -> None:
        """Note that a head begins."""
        self._in_head = True
        super().on_message_begin()  # type: ignore[misc]

    def on_headers_complete(self) -> None:
        """Note that it is here."""
        self._in_head = False
        self._have_head()
        super().on_headers_complete()  # type: ignore[misc]

    def data_received(self, data: bytes) -> None:  # noqa: D102
        self._head_bytes = self._head_bytes + len(data) if self._in_head else 0
        super().data_received(data)  # type: ignore[misc]
        if self._in_head and self._head_bytes > MOST_HEAD_BYTES:
            self.transport.write(_TOO_LARGE)
            self.transport.close()
        elif self._in_head or self._is_idle:
            owner: Any = self.transport.get_protocol()
            if owner is self:  # it has not become a WebSocket
                self._wait_for_head()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_head(self) -> None:
        if self._due is None and not self.transport.is_closing():
            self._due = self.loop.call_later(HEAD_S, self._give_up)

    def _have_head(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _give_up(self) -> None:
        self._due = None
        if self._is_idle:
            self.transport.close()
        else:  # it is we who do not read: an earlier request of the connection is under way
            self._wait_for_head()
