"""Reading a request: its body within limits, and noticing that its client has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Final, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aenv_ray.runtime.public.requests import BODY_S

T = TypeVar("T")

STREAMED: Final = "aenv.streamed"
"""Key in the scope of a request whose body is not held in memory."""


class ClientLeft(Exception):
    """The client closed the connection before the answer."""


class NoAnswer(Response):
    """Sends nothing, because the client has left."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Do nothing."""


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """Return a request's body.

    Raises:
        HTTPException: 413: it is larger than `limit_bytes`; the rest is not read. 408: see
            `pieces_of`.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    pieces, size = [], 0
    async for piece in pieces_of(request):
        size += len(piece)
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        pieces.append(piece)
    return b"".join(pieces)


def _too_large(limit_bytes: int) -> HTTPException:
    return HTTPException(
        413,
        f"the request body is larger than {limit_bytes:,} bytes",
        headers={"Connection": "close"},
    )


async def pieces_of(request: Request) -> AsyncIterator[bytes]:
    """Yield a request's body as it arrives.

    Raises:
        HTTPException: 408: nothing arrived for `BODY_S`; the connection closes after the answer.
    """
    stream = aiter(request.stream())
    while True:
        try:
            async with asyncio.timeout(BODY_S):
                piece = await anext(stream, None)
        except TimeoutError:
            message = f"no part of the request body arrived for {BODY_S:g} s"
            raise HTTPException(408, message, headers={"Connection": "close"}) from None
        if piece is None:
            return
        yield piece


async def unless_left(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`; cancel it if the client leaves first.

    Raises:
        ClientLeft: The client left.
    """
    task = asyncio.ensure_future(work)
    left = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeft
    finally:
        left.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
