"""Answers that leave in one piece: head and body of each by one system call, and one packet.

Uvicorn writes the head and then the body. For small answers the second write is a tenth of the
server's time, and wakes the client a second time.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http import auto

from aenv_ray.serve.gateway.header_timeout import Patience

_MOST_BYTES: Final = 64 * 1024
"""Kept for the loop's next turn; more is written at once, so that flow control sees it."""


def answers_at_once() -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol, over a `Gathering` transport."""
    base: Any = auto.AutoHTTPProtocol
    # That on h11, for where httptools is not installed, has a limit of its own, for bytes alone.
    bases: Any = (Patience, base) if hasattr(base, "on_headers_complete") else (base,)

    class HttpProtocol(*bases):  # type: ignore[misc]  # the one that is installed
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(Gathering(transport, self.loop))

    return HttpProtocol


class Gathering:
    """A transport that writes what it was given in one turn of the loop together.

    Args:
        transport: Which writes.
        loop: Of it.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._pieces: list[bytes] = []
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write `data` soon, after what was written before."""
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(data)
        self._size += len(data)
        if self._size >= _MOST_BYTES:
            self._flush()

    def close(self) -> None:
        """Close, after what was written."""
        self._flush()
        self._transport.close()

    def write_eof(self) -> None:
        """Say that nothing more comes, after what was written."""
        self._flush()
        self._transport.write_eof()

    def get_write_buffer_size(self) -> int:
        """Return how many bytes wait."""
        return self._size + self._transport.get_write_buffer_size()

    def _flush(self) -> None:
        if self._pieces:
            data = b"".join(self._pieces)
            self._pieces.clear()
            self._size = 0
            if not self._transport.is_closing():  # its client may have gone within this turn
                self._transport.write(data)
