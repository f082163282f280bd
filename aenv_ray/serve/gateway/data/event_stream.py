"""Server-sent events as the answer to one request; pings keep proxies from closing the stream."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.types import Send

PING_S: Final = 15.0
"""After this time a call's answer becomes an event stream, with a comment at this interval."""
_STREAM_HEADERS: Final = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
}


class AnswerStream:
    """The event stream of an answer; opened by the first event, if the client accepts one."""

    def __init__(self, send: Send, *, is_wanted: bool) -> None:
        self._send_asgi = send
        self._is_wanted = is_wanted
        self._sending = asyncio.Lock()
        self._due: asyncio.TimerHandle | None = None
        self._pinging: asyncio.Task[None] | None = None
        self.is_open = False

    async def send(self, *messages: bytes, more: bool = True) -> None:
        """Send messages as events; the first ones start the stream."""
        data = b"".join(b"event: message\r\ndata: " + text + b"\r\n\r\n" for text in messages)
        await self._send_text(data, more=more)

    async def _send_text(self, data: bytes, *, more: bool = True) -> None:
        if not self._is_wanted:
            return
        async with self._sending:
            if not self.is_open:
                self.is_open = True
                headers = [(k.encode(), v.encode()) for k, v in _STREAM_HEADERS.items()]
                await self._send_asgi(
                    {"type": "http.response.start", "status": 200, "headers": headers}
                )
            await self._send_asgi({"type": "http.response.body", "body": data, "more_body": more})

    def keep_alive(self) -> None:
        """Send comments at an interval of `PING_S`, until `stop_pings`."""
        if self._is_wanted:
            self._due = asyncio.get_running_loop().call_later(PING_S, self._begin_pings)

    def _begin_pings(self) -> None:
        self._pinging = asyncio.get_running_loop().create_task(self._ping())

    async def _ping(self) -> None:
        while True:
            await self._send_text(b": ping\r\n\r\n")
            await asyncio.sleep(PING_S)

    async def stop_pings(self) -> None:
        """Stop the comments, after the one that is being sent."""
        if self._due is not None:
            self._due.cancel()
        if self._pinging is not None:
            async with self._sending:
                self._pinging.cancel()
