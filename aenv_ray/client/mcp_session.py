"""One MCP session over streamable HTTP, on an HTTP client that its owner shares with other calls.

Small and ours, rather than the MCP package's client, for three reasons: every request is a POST of
its own, so one failure cannot end the calls beside it; it knows whether a request can have reached
the server, which decides between asking again and `CallOutcomeUnknown`; and it needs a tenth of the
import time. It speaks the versions with sessions, which AEnvironment's servers speak and ours do.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, Final

import httpx

from aenv_ray.client.post_transport import PostAnswer, PostTransport
from aenv_ray.errors import CallOutcomeUnknown, ConfigError, FabricUnavailable
from aenv_ray.runtime.public import mcp_messages
from aenv_ray.runtime.public.mcp_messages import ACCEPT, SESSION

FAREWELL_S: Final = 2.0
"""What a cancellation or the end of a session may take to be told to the server."""
NOT_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""Failures before any byte of the request was sent."""

JSON: Final = {"content-type": "application/json"}
_EVENTS: Final = "text/event-stream"
_NOT_SENT_BARE: Final = frozenset({"accept", "accept-encoding", "connection"})


class RpcError(Exception):
    """The server answered with a JSON-RPC error."""

    def __init__(self, code: int, message: str, data: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


class _SessionUnknown(Exception):
    """The server does not know the session, so it did not run the request."""


class McpSession:
    """A session that is opened at the first request, and again when the server has forgotten it.

    Args:
        http: Pooled client; not closed here.
        url: The MCP endpoint.
        posts: What is under `http`, if requests may be sent without it: for many small ones httpx
            takes longer than all else. None: they go through `http`.

    Any number of requests may be under way at once.
    """

    def __init__(
        self, http: httpx.AsyncClient, url: str, posts: PostTransport | None = None
    ) -> None:
        self._http = http
        self._url = url
        self._posts = posts
        self._target = str(httpx.URL(url))  # quoted
        # Of every request; an answer that were compressed could not be read without httpx.
        self._common = {k: v for k, v in http.headers.items() if k not in _NOT_SENT_BARE}
        self._ids = itertools.count(1)
        self._opening = asyncio.Lock()
        self._headers: dict[str, str] | None = None
        self._farewells: set[asyncio.Task[None]] = set()

    async def request(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return its result.

        Cancelling tells the server. The caller bounds the time.

        Raises:
            RpcError: The server refused it.
            CallOutcomeUnknown: It may have reached the server, and no answer came. Never resent.
            FabricUnavailable: The server refuses work for now; the request did not run.
            ConfigError: There is no MCP server at this URL, or it refuses this client.
            httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout: It was not sent.
        """
        headers = await self._open()
        try:
            return await self._exchange(method, params, headers)
        except _SessionUnknown:
            # The server was restarted or has dropped an idle session; nothing ran.
            if self._headers is headers:
                self._headers = None
        headers = await self._open()
        try:
            return await self._exchange(method, params, headers)
        except _SessionUnknown as exc:
            raise FabricUnavailable(
                f"{self._url} forgets its sessions: {exc}", hint="is it behind a load balancer?"
            ) from exc

    async def close(self) -> None:
        """End the session at the server; waits a moment at most, and never fails."""
        headers, self._headers = self._headers, None
        if headers and SESSION in headers:
            self._say_goodbye(self._http.delete(self._url, headers=headers))
        if self._farewells:
            await asyncio.wait(set(self._farewells), timeout=FAREWELL_S)

    # --- the session ------------------------------------------------------------------------

    async def _open(self) -> dict[str, str]:
        async with self._opening:
            if self._headers is not None:
                return self._headers
            try:
                self._headers = await self._initialize()
            except NOT_SENT:
                raise
            except (CallOutcomeUnknown, httpx.TransportError) as exc:
                raise FabricUnavailable(f"{self._url} opens no session: {exc}") from exc
            return self._headers

    async def _initialize(self) -> dict[str, str]:
        received: dict[str, str] = {}
        result = await self._exchange("initialize", mcp_messages.OPENING, {}, received)
        headers = mcp_messages.session_headers(result, received)
        await self._notify("notifications/initialized", {}, headers)
        return headers

    async def _notify(
        self, method: str, params: Mapping[str, Any], headers: Mapping[str, str]
    ) -> None:
        message = mcp_messages.notification(method, params)
        await self._http.post(self._url, json=message, headers={**ACCEPT, **headers})

    # --- requests ---------------------------------------------------------------------------

    async def _exchange(
        self,
        method: str,
        params: Mapping[str, Any],
        headers: Mapping[str, str],
        received: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        request_id = next(self._ids)
        message = mcp_messages.request(request_id, method, params)
        try:
            async with self._posted(message, headers) as response:
                if received is not None:
                    received.update((k.lower(), v) for k, v in response.headers.items())
                await self._check(response, headers)
                if not response.headers.get("content-type", "").startswith(_EVENTS):
                    whole = mcp_messages.message_of(await response.aread())
                    if whole is not None and mcp_messages.is_answer(whole, request_id):
                        return _result(whole)
                    raise _unknown(method, "the server answered another request")
                async with aclosing(_messages(response)) as messages:
                    async for answer in messages:
                        if mcp_messages.is_answer(answer, request_id):
                            return _result(answer)
                        if "id" in answer and "method" in answer:
                            self._decline(answer, headers)
        except asyncio.CancelledError:
            cancelled = mcp_messages.cancellation(request_id)
            self._say_goodbye(self._notify("notifications/cancelled", cancelled, headers))
            raise
        except NOT_SENT:
            raise
        except (httpx.TransportError, httpx.StreamError, ValueError) as exc:
            raise _unknown(method, f"{type(exc).__name__}: {exc}") from exc
        raise _unknown(method, "the server ended its answer without a result")

    def _posted(
        self, message: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[httpx.Response | PostAnswer]:
        if self._posts is None or self._http.cookies:
            return self._http.stream("POST", self._url, json=message, headers={**ACCEPT, **headers})
        content = json.dumps(message, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        everything = {**self._common, **JSON, **ACCEPT, **headers}
        return self._posts.stream(self._target, everything, content.encode())

    async def _check(
        self, response: httpx.Response | PostAnswer, headers: Mapping[str, str]
    ) -> None:
        """Raise for an HTTP status that carries no JSON-RPC answer to this request."""
        status = response.status_code
        if "set-cookie" in response.headers and isinstance(response, PostAnswer):
            self._keep_cookies(response)
        if status < 400:
            return
        text = (await response.aread()).decode(errors="replace")
        if mcp_messages.forgets_session(status, text, has_session=SESSION in headers):
            raise _SessionUnknown(text[:200])
        try:
            error = json.loads(text)["error"]
        except (ValueError, KeyError, TypeError):
            error = None
        if status in {429, 503}:
            raise FabricUnavailable(f"{self._url} answered HTTP {status}: {text[:200]}")
        if isinstance(error, dict) and "code" in error:
            raise RpcError(error["code"], str(error.get("message")), error.get("data"))
        if status < 500:
            raise ConfigError(
                f"{self._url} answered HTTP {status}: {text[:200]}",
                hint="is this the address of an environment server?",
            )
        raise _unknown("the request", f"HTTP {status}: {text[:200]}")

    def _keep_cookies(self, response: PostAnswer) -> None:
        """Hand the cookies of a balancer to `http`, which sends them, and all further requests."""
        request = httpx.Request("POST", self._url)
        told = httpx.Response(response.status_code, headers=response.headers_list, request=request)
        self._http.cookies.extract_cookies(told)

    def _decline(self, request: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        """Answer what the server asks of its client: it may ping, and nothing else."""
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
        if request["method"] == "ping":
            answer["result"] = {}
        else:
            answer["error"] = {"code": -32601, "message": "not supported by this client"}
        self._say_goodbye(self._http.post(self._url, json=answer, headers={**ACCEPT, **headers}))

    def _say_goodbye(self, sending: Any) -> None:
        """Send in the background what no answer is needed for."""

        async def send() -> None:
            try:
                async with asyncio.timeout(FAREWELL_S):
                    await sending
            except (TimeoutError, httpx.HTTPError, RuntimeError):
                return  # the server is gone, or this client is closed: nobody to tell

        task = asyncio.get_running_loop().create_task(send())
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)


def _unknown(what: str, reason: str) -> CallOutcomeUnknown:
    return CallOutcomeUnknown(
        f"{what} was sent and has no answer: {reason}",
        hint="it may have run; it was not sent again",
    )


def _result(answer: Mapping[str, Any]) -> dict[str, Any]:
    error = answer.get("error")
    if error is not None:
        raise RpcError(error.get("code", 0), str(error.get("message")), error.get("data"))
    result = answer.get("result")
    return result if isinstance(result, dict) else {}


async def _messages(response: httpx.Response | PostAnswer) -> AsyncGenerator[dict[str, Any]]:
    """Yield the JSON-RPC messages of an event stream.

    Raises:
        ValueError: One is not JSON.
    """
    stream = mcp_messages.EventStream()
    async for line in _lines(response):
        message = stream.feed(line)
        if message is not None:
            yield message


async def _lines(response: httpx.Response | PostAnswer) -> AsyncIterator[str]:
    """Yield an event stream's lines: split at CR and LF only, not at what Unicode calls a line."""
    parts: list[bytes] = []
    async for chunk in response.aiter_bytes():
        *complete, rest = chunk.split(b"\n")
        for line in complete:
            parts.append(line)
            yield b"".join(parts).removesuffix(b"\r").decode(errors="replace")
            parts.clear()
        parts.append(rest)
