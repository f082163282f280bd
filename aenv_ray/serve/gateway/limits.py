"""How much one client may ask: requests of a token, bytes of a body."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request

from aenv_ray.clock import Clock
from aenv_ray.errors import RateLimited
from aenv_ray.runtime.public.requests import BODY_S

_MOST_TOKENS: Final = 10_000


class RequestRate:
    """A bucket of requests for each token, filled at a rate.

    Each replica has its own: what replicas allow together is at most their number times as much.

    Args:
        per_s: Requests that come back to a bucket each second.
        burst: What a full bucket holds.
        clock: For the time between requests.
    """

    def __init__(self, per_s: float, burst: int, clock: Clock) -> None:
        self._per_s = per_s
        self._burst = float(burst)
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, token_id: str) -> None:
        """Take one request from a token's bucket.

        Raises:
            RateLimited: The bucket is empty; it says when there is one again.
        """
        now = self._clock.now()
        left, at = self._buckets.get(token_id, (self._burst, now))
        left = min(self._burst, left + max(0.0, now - at) * self._per_s)
        if left < 1:
            self._note(token_id, left, now)
            raise RateLimited(
                f"this token sends more than {self._per_s:g} requests a second",
                retry_after_s=(1 - left) / self._per_s,
                hint="wait as Retry-After says; watch an instance by GET /instances/{id}/events",
            )
        self._note(token_id, left - 1, now)

    def _note(self, token_id: str, left: float, now: float) -> None:
        self._buckets[token_id] = (left, now)
        self._buckets.move_to_end(token_id)
        while len(self._buckets) > _MOST_TOKENS:
            self._buckets.popitem(last=False)


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """Return a request's body.

    Raises:
        HTTPException: 413, it is larger than `limit_bytes`; what comes after is not read. 408, see
            `pieces_of`.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise too_large(limit_bytes)
    pieces, size = [], 0
    async for piece in pieces_of(request):
        size += len(piece)
        if size > limit_bytes:
            raise too_large(limit_bytes)
        pieces.append(piece)
    return b"".join(pieces)


def too_large(limit_bytes: int) -> HTTPException:
    """Return the answer to a body beyond a limit; the connection closes after it."""
    return HTTPException(
        413, f"the body is larger than {limit_bytes:,} bytes", headers={"Connection": "close"}
    )


async def pieces_of(request: Request) -> AsyncIterator[bytes]:
    """Yield a request's body as it comes.

    Raises:
        HTTPException: 408, nothing came for `BODY_S`; the connection closes after it.
    """
    stream = aiter(request.stream())
    while True:
        try:
            async with asyncio.timeout(BODY_S):
                piece = await anext(stream, None)
        except TimeoutError:
            message = f"no more of the body came for {BODY_S:g} s"
            raise HTTPException(408, message, headers={"Connection": "close"}) from None
        if piece is None:
            return
        yield piece
