"""A gateway's control side in async code: requests with our errors, repeated where harmless."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx

from aenv_ray.client.gateway_http import CONNECT_S, parse_url, pause_before_retry, read_envelope
from aenv_ray.errors import AenvError, CallOutcomeUnknown, DeadlineExceeded, FabricUnavailable

ANSWER_S: Final = 90.0
ATTEMPTS: Final = 5
_REPEATABLE: Final = frozenset({"GET", "DELETE"})


class AsyncGatewayHttp:
    """Requests to one gateway. Use it on one event loop.

    Args:
        url: As `parse_url` takes it.
        token: Sent as a bearer token; None: none is.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self.url = parse_url(url)
        secure = self.url.startswith("https://")
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            # Without TLS this is a direct line: no proxy from the environment, no certificates.
            trust_env=secure,
            verify=secure,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def data(
        self, method: str, path: str, *, timeout_s: float = ANSWER_S, **request: Any
    ) -> Any:
        """Return the ``data`` of an answer.

        Args:
            method: HTTP method; reading and deleting are repeated where an answer was lost.
            path: Of the route, quoted.
            timeout_s: How long the answer may take.
            request: Further arguments of `httpx.AsyncClient.stream`.

        Raises:
            AenvError: What the gateway answered.
            FabricUnavailable: It cannot be reached.
            CallOutcomeUnknown: The answer to what must not be repeated was lost.
            DeadlineExceeded: It did not answer in time.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with self.stream(method, path, timeout_s=timeout_s, **request) as response:
                    await response.aread()
                    return read_envelope(response)
            except FabricUnavailable as exc:
                pause_s = pause_before_retry(
                    exc.__cause__ if isinstance(exc.__cause__, httpx.ConnectError) else exc,
                    attempt=attempt,
                    repeatable=method in _REPEATABLE,
                )
                if pause_s is None or attempt == ATTEMPTS:
                    raise
            await asyncio.sleep(pause_s)
        raise AssertionError

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, *, timeout_s: float | None = ANSWER_S, **request: Any
    ) -> AsyncIterator[httpx.Response]:
        """Yield a successful answer, whose body is still to be read; not sent again.

        Raises:
            AenvError: As `data`; also when the body breaks off.
        """
        what = f"{method} {path}"
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
        try:
            async with self._http.stream(method, path, timeout=timeout, **request) as response:
                if not response.is_success:
                    await response.aread()
                    read_envelope(response)
                yield response
        except httpx.HTTPError as exc:
            raise self._error(exc, what, method in _REPEATABLE) from exc

    def _error(self, exc: httpx.HTTPError, what: str, repeatable: bool) -> AenvError:
        reason = str(exc) or type(exc).__name__
        if isinstance(exc, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
            return FabricUnavailable(
                f"the gateway at {self.url} cannot be reached: {reason}",
                hint="check AENV_SYSTEM_URL; instances live on until their TTL ends",
            )
        if isinstance(exc, httpx.TimeoutException):
            return DeadlineExceeded(f"{what}: the gateway at {self.url} did not answer in time")
        if repeatable:
            return FabricUnavailable(f"{what}: the answer of {self.url} was lost: {reason}")
        return CallOutcomeUnknown(
            f"{what} was sent to {self.url} and has no answer: {reason}",
            hint="it may have been done; it was not sent again",
        )
