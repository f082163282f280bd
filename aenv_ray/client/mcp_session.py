"""One MCP session over streamable HTTP, on an HTTP client that its owner uses for other calls too.

It is used instead of the MCP package's client for three reasons: each request is a separate POST,
so a failing one does not end concurrent calls; it knows whether a request can have reached the
server, which decides between sending it again and `CallOutcomeUnknown`; and it takes a tenth of the
time to import. It supports the protocol versions with sessions, as AEnvironment's servers and ours.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, Final

import httpx

from aenv_ray.client.gateway_http import NOT_SENT, error_of_refusal
from aenv_ray.client.post_transport import PostResponse, PostTransport
from aenv_ray.client.tool_callbacks import Answering, ToolCallbacks
from aenv_ray.errors import CallOutcomeUnknown, ConfigError, FabricUnavailable
from aenv_ray.models import LogMessage, Question
from aenv_ray.runtime.door.caller_link import ELICIT, LOG, SAMPLE
from aenv_ray.runtime.public import mcp_messages
from aenv_ray.runtime.public.mcp_messages import ACCEPT, SESSION

FAREWELL_S: Final = 2.0
"""Time limit for notifying the server of a cancellation or of the end of the session."""
JSON: Final = {"content-type": "application/json"}
_EVENTS: Final = "text/event-stream"
_UNSUPPORTED: Final = {"code": -32601, "message": "not supported by this client"}
_NOT_SENT_BARE: Final = frozenset({"accept", "accept-encoding", "connection"})


class RpcError(Exception):
    """The server answered with a JSON-RPC error."""

    def __init__(self, code: int, message: str, data: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


class _SessionGone(Exception):
    """The server does not know the session, so it did not run the request."""


class McpSession:
    """A session, opened by the first request and reopened when the server has forgotten it.

    Args:
        http: Pooled client; not closed here.
        url: The MCP endpoint.
        posts: The transport of `http`, used without it where possible, which is faster. None sends
            all requests through `http`.

    Any number of requests may run concurrently.
    """

    def __init__(
        self, http: httpx.AsyncClient, url: str, posts: PostTransport | None = None
    ) -> None:
        self._http = http
        self._url = url
        self._posts = posts
        self._target = str(httpx.URL(url))  # quoted
        # Sent with every request; without httpx a compressed response could not be read.
        self._common = {k: v for k, v in http.headers.items() if k not in _NOT_SENT_BARE}
        self._ids = itertools.count(1)
        self._opening = asyncio.Lock()
        self._headers: dict[str, str] | None = None
        self._farewells: set[asyncio.Task[None]] = set()
        self.callbacks: ToolCallbacks | None = None
        """Take log messages and questions of tools; to be set before the first request."""

    async def request(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return its result.

        Cancelling notifies the server. The caller bounds the time.

        Raises:
            RpcError: The server answered with an error.
            CallOutcomeUnknown: The request may have reached the server, and no response came. It is
                never sent again.
            RateLimited, FabricUnavailable: The server refuses work at the moment; the request
                did not run.
            ConfigError: There is no MCP server at this URL, or it refuses this client.
            httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout: It was not sent.
        """
        headers = await self._open()
        try:
            return await self._exchange(method, params, headers)
        except _SessionGone:
            # The server was restarted or dropped an idle session; the request did not run.
            if self._headers is headers:
                self._headers = None
        headers = await self._open()
        try:
            return await self._exchange(method, params, headers)
        except _SessionGone as exc:
            raise FabricUnavailable(
                f"{self._url} forgets its sessions: {exc}",
                hint="behind a load balancer, enable session affinity",
            ) from exc

    async def close(self) -> None:
        """End the session at the server, within `FAREWELL_S`; never fails."""
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
                raise FabricUnavailable(
                    f"{self._url} did not open a session: {exc}",
                    hint="check that an environment server runs there, and try again",
                ) from exc
            return self._headers

    async def _initialize(self) -> dict[str, str]:
        received: dict[str, str] = {}
        offered = {} if self.callbacks is None else self.callbacks.capabilities
        opening = {**mcp_messages.OPENING, "capabilities": offered}
        result = await self._exchange("initialize", opening, {}, received)
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
        if self.callbacks is None or not self.callbacks.offers:
            return await self._exchange_messages(method, params, headers, received, None)

        async def send(question: Question, result: dict[str, Any] | None) -> None:
            await self._reply(question.id, result, headers)

        async with Answering(self.callbacks, send) as answering:
            return await self._exchange_messages(method, params, headers, received, answering)

    async def _exchange_messages(
        self,
        method: str,
        params: Mapping[str, Any],
        headers: Mapping[str, str],
        received: dict[str, str] | None,
        answering: Answering | None,
    ) -> dict[str, Any]:
        request_id = next(self._ids)
        message = mcp_messages.request(request_id, method, params)
        try:
            async with self._posted(message, headers) as response:
                if received is not None:
                    received.update((k.lower(), v) for k, v in response.headers.items())
                await self._check(response, headers)
                if not response.headers.get("content-type", "").startswith(_EVENTS):
                    whole = mcp_messages.parse_message(await response.aread())
                    if whole is not None and mcp_messages.is_answer(whole, request_id):
                        return _result(whole)
                    raise _unknown(method, "the server sent the response to another request")
                async with aclosing(_messages(response)) as messages:
                    async for answer in messages:
                        if mcp_messages.is_answer(answer, request_id):
                            return _result(answer)
                        if answering is not None and (told := _for_callbacks(answer)) is not None:
                            await answering.take(told)
                        elif "id" in answer and "method" in answer:
                            self._decline(answer, headers)
        except asyncio.CancelledError:
            cancelled = mcp_messages.cancellation(request_id)
            self._say_goodbye(self._notify("notifications/cancelled", cancelled, headers))
            raise
        except NOT_SENT:
            raise
        except (httpx.TransportError, httpx.StreamError, ValueError) as exc:
            raise _unknown(method, f"{type(exc).__name__}: {exc}") from exc
        raise _unknown(method, "the server ended its response without a result")

    def _posted(
        self, message: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[httpx.Response | PostResponse]:
        if self._posts is None or self._http.cookies:
            return self._http.stream("POST", self._url, json=message, headers={**ACCEPT, **headers})
        content = json.dumps(message, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        everything = {**self._common, **JSON, **ACCEPT, **headers}
        return self._posts.stream(self._target, everything, content.encode())

    async def _check(
        self, response: httpx.Response | PostResponse, headers: Mapping[str, str]
    ) -> None:
        """Raise if the HTTP status means that there is no JSON-RPC response to this request."""
        status = response.status_code
        if "set-cookie" in response.headers and isinstance(response, PostResponse):
            self._keep_cookies(response)
        if status < 400:
            return
        text = (await response.aread()).decode(errors="replace")
        if mcp_messages.forgets_session(status, text, has_session=SESSION in headers):
            raise _SessionGone(text[:200])
        try:
            error = json.loads(text)["error"]
        except (ValueError, KeyError, TypeError):
            error = None
        refused = error_of_refusal(status, self._url, text[:200], response.headers)
        if refused is not None:
            raise refused
        if isinstance(error, dict) and "code" in error:
            raise RpcError(error["code"], str(error.get("message")), error.get("data"))
        if status < 500:
            raise ConfigError(
                f"{self._url} answered HTTP {status}: {text[:200]}",
                hint="check that this is the address of an environment server",
            )
        raise _unknown("the request", f"HTTP {status}: {text[:200]}")

    def _keep_cookies(self, response: PostResponse) -> None:
        """Store a load balancer's cookies in `http`, which then sends all further requests."""
        request = httpx.Request("POST", self._url)
        told = httpx.Response(response.status_code, headers=response.headers_list, request=request)
        self._http.cookies.extract_cookies(told)

    async def _reply(
        self, request_id: str, result: dict[str, Any] | None, headers: Mapping[str, str]
    ) -> None:
        """Answer a request of the server."""
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": json.loads(request_id)}
        if result is None:
            answer["error"] = _UNSUPPORTED
        else:
            answer["result"] = result
        await self._http.post(self._url, json=answer, headers={**ACCEPT, **headers})

    def _decline(self, request: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        """Answer a request of the server; only ``ping`` is supported."""
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
        if request["method"] == "ping":
            answer["result"] = {}
        else:
            answer["error"] = _UNSUPPORTED
        self._say_goodbye(self._http.post(self._url, json=answer, headers={**ACCEPT, **headers}))

    def _say_goodbye(self, sending: Any) -> None:
        """Send a message in the background, ignoring failures."""

        async def send() -> None:
            try:
                async with asyncio.timeout(FAREWELL_S):
                    await sending
            except (TimeoutError, httpx.HTTPError, RuntimeError):
                return  # the server is gone, or this client is closed

        task = asyncio.get_running_loop().create_task(send())
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)


def _for_callbacks(message: Mapping[str, Any]) -> LogMessage | Question | None:
    """Return a log message or a question of the server; None for other messages."""
    method, params = message.get("method"), message.get("params") or {}
    if method == LOG:
        data = params.get("data")
        told = data if isinstance(data, dict) else {"msg": data}
        return LogMessage(str(params.get("level")), str(told.get("msg", "")), told.get("extra"))
    if method in (ELICIT, SAMPLE) and "id" in message:
        return Question(json.dumps(message["id"]), str(method), params)
    return None


def _unknown(what: str, reason: str) -> CallOutcomeUnknown:
    return CallOutcomeUnknown(
        f"{what} was sent, and its response was lost: {reason}",
        hint="it may have run: check its effect before you send it again",
    )


def _result(answer: Mapping[str, Any]) -> dict[str, Any]:
    error = answer.get("error")
    if error is not None:
        raise RpcError(error.get("code", 0), str(error.get("message")), error.get("data"))
    result = answer.get("result")
    return result if isinstance(result, dict) else {}


async def _messages(response: httpx.Response | PostResponse) -> AsyncGenerator[dict[str, Any]]:
    """Yield the JSON-RPC messages of an event stream.

    Raises:
        ValueError: One is not JSON.
    """
    stream = mcp_messages.EventStream()
    async for line in _lines(response):
        message = stream.feed(line)
        if message is not None:
            yield message


async def _lines(response: httpx.Response | PostResponse) -> AsyncIterator[str]:
    """Yield an event stream's lines, split at CR and LF only, not at Unicode line separators."""
    parts: list[bytes] = []
    async for chunk in response.aiter_bytes():
        *complete, rest = chunk.split(b"\n")
        for line in complete:
            parts.append(line)
            yield b"".join(parts).removesuffix(b"\r").decode(errors="replace")
            parts.clear()
        parts.append(rest)
