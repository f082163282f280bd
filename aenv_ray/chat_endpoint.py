"""What all clients of an OpenAI-compatible chat endpoint do alike: connect, read, refuse, wait."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Final

import httpx

from aenv_ray.addresses import is_proxied, retry_after_s

LONGEST_PAUSE_S: Final = 60.0
"""Longest pause, unless the endpoint asks for more."""
_FIRST_PAUSE_S: Final = 0.5
_CONNECT_S: Final = 10.0
_SHOWN_CHARACTERS: Final = 300
_RETRIED: Final = frozenset({408, 409, 425, 429})
"""Statuses below 500 after which a request is sent again."""


class RequestFailed(Exception):
    """A request failed, but may succeed if it is repeated."""

    def __init__(
        self, message: str, asked_pause_s: float = 0.0, *, is_limited: bool = False
    ) -> None:
        super().__init__(message)
        self.asked_pause_s = asked_pause_s
        self.is_limited = is_limited
        """Whether the endpoint limits requests (429)."""

    def pause_s(self, attempt: int) -> float:
        """Return the pause after an attempt, of which the first is 1: grown, or asked for."""
        grown_s = min(LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (attempt - 1))
        return max(grown_s * random.uniform(0.5, 1.0), self.asked_pause_s)


def new_client(url: str) -> httpx.AsyncClient:
    """Return a client for one endpoint, whose callers limit the time of whole answers."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=_CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=100),
        trust_env=is_proxied(url),
        verify=not url.lower().startswith("http:"),  # loading the authorities takes 10 ms
        follow_redirects=False,  # the key is sent to the configured address only
    )


async def chunks_of(response: httpx.Response, limit_bytes: int) -> AsyncIterator[bytes]:
    """Yield the content of an answer.

    Raises:
        RequestFailed: It is longer than the limit.
    """
    size = 0
    async for chunk in response.aiter_bytes():
        size += len(chunk)
        if size > limit_bytes:
            raise RequestFailed(f"the answer is longer than {limit_bytes} bytes")
        yield chunk


async def content_of(response: httpx.Response, limit_bytes: int) -> bytes:
    """Return the content of an answer; see `chunks_of`."""
    return b"".join([chunk async for chunk in chunks_of(response, limit_bytes)])


def refusal_of(response: httpx.Response, content: bytes, key: str | None) -> str:
    """Return what an answer with an error says, without the key, which it may quote.

    Raises:
        RequestFailed: The request may be sent again.
    """
    said = f"HTTP {response.status_code}: {quoted(content, key)}"
    if response.status_code in _RETRIED or response.status_code >= 500:
        pause_s = retry_after_s(response.headers, default=0.0)
        raise RequestFailed(said, pause_s, is_limited=response.status_code == 429)
    return said


def quoted(content: bytes, key: str | None) -> str:
    """Return the beginning of an answer for a message, without the key."""
    text = content.decode(errors="replace")
    return " ".join((text.replace(key, "[key]") if key else text).split())[:_SHOWN_CHARACTERS]
