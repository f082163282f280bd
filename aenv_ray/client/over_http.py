"""Talks to one environment server at an address: what `Environment` uses with ``aenv run``.

An instance here is a server that somebody else started. Nothing listens at its address: if it never
answered, that is `FabricUnavailable` (start it, or wait); if it did, the instance with its state is
gone, and that is `SandboxLost`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import quote

import httpx

from aenv_ray.actors.calls.parameters import object_of
from aenv_ray.client.http_answers import (
    MethodNotAllowed,
    from_rpc,
    json_object,
    parse_address,
    query_text,
    read_envelope,
)
from aenv_ray.client.mcp_session import NOT_SENT, McpSession, RpcError
from aenv_ray.client.post_transport import PostTransport
from aenv_ray.client.waiting import Wait, until_healthy
from aenv_ray.errors import (
    AenvError,
    CallOutcomeUnknown,
    ConfigError,
    DeadlineExceeded,
    FabricUnavailable,
    InternalError,
    SandboxLost,
    ToolNotFound,
    ToolTimeout,
    from_wire,
)
from aenv_ray.models import InstanceInfo, ToolResult
from aenv_ray.runtime.door.async_calls import TIMEOUT_S

_CONNECT_S: Final = 5.0
_GRACE_S: Final = 2.0
"""What the server's own deadline gets before the caller's ends the call from here."""
_KEEP_IDLE_S: Final = 4.0
"""Below the 5 s after which servers close idle connections: none is sent into a closing one."""


def _direct(limits: httpx.Limits, max_connections: int) -> PostTransport:
    return PostTransport(
        httpx.AsyncHTTPTransport(limits=limits, trust_env=False, verify=False),
        max_connections=max_connections,
        keep_idle_s=_KEEP_IDLE_S,
        connect_s=_CONNECT_S,
    )


class HttpInstance:
    """One environment server, reached by HTTP; one MCP session and one pool of connections.

    Args:
        address: See `parse_address`.
        headers: Sent with every request, for example for a gateway.
        max_connections: Calls under way at once; more wait for a connection.

    Calls may run concurrently; a failing one does not disturb the others. Use it on one event loop.
    Cancelling a call cancels it at the server.

    Raises:
        ConfigError: The address is none.
    """

    instance_id: str | None = None
    """None: a server of somebody else's, which is no instance of the fabric."""

    def __init__(
        self,
        address: str,
        *,
        headers: Mapping[str, str] | None = None,
        max_connections: int = 1000,
    ) -> None:
        self.url = parse_address(address)
        secure = self.url.startswith("https://")
        limits = httpx.Limits(
            max_connections=max_connections,
            max_keepalive_connections=max_connections,
            keepalive_expiry=_KEEP_IDLE_S,
        )
        posts = None if secure else _direct(limits, max_connections)
        self._http = httpx.AsyncClient(
            headers=dict(headers or {}),
            # Deadlines are the calls' own.
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=limits,
            # Without TLS this is a direct line: no proxy from the environment, no certificates.
            trust_env=secure,
            verify=secure,
            transport=posts,
        )
        self._session = McpSession(self._http, f"{self.url}/mcp", posts)
        self._answered = False

    # --- tools ------------------------------------------------------------------------------

    async def list_tools(self, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Return the tools as MCP ``Tool`` objects: ``name``, ``description``, ``inputSchema``.

        Raises:
            SandboxStartFailed: The environment's code does not load.
            FabricUnavailable: The server cannot be reached.
            DeadlineExceeded: It did not answer in time.
        """
        tools: list[dict[str, Any]] = []
        params: dict[str, Any] = {}
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    page = await self._list_page(params)
                    tools += [{"description": "", **tool} for tool in page.get("tools") or []]
                    if not page.get("nextCursor"):
                        return tools
                    params = {"cursor": page["nextCursor"]}
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.url} did not list its tools within {timeout_s:g} s"
            ) from None

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], timeout_s: float = 60.0
    ) -> ToolResult:
        """Call a tool; never sent twice. A tool that raises is a result with ``is_error``.

        Raises:
            ToolNotFound, ToolInputInvalid: It did not run.
            ToolTimeout: It reached `timeout_s` and was told to stop.
            CallOutcomeUnknown: The call was sent, and the connection failed before its answer.
            FabricUnavailable, SandboxLost: Nothing listens there: never yet, or no longer.
        """
        params = {
            "name": name,
            "arguments": dict(object_of(name, arguments)),
            "_meta": self._meta(timeout_s),
        }
        async with self._attributed(name, timeout_s):
            data = await self._request("tools/call", params)
        error = (data.get("_meta") or {}).get("aenv/error")
        if isinstance(error, dict):
            raise from_wire(error)
        return ToolResult.from_wire(data)

    def _meta(self, timeout_s: float) -> dict[str, Any]:
        """Return what is said of a tool call beside its arguments."""
        return {TIMEOUT_S: timeout_s}

    async def _request(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        return await self._session.request(method, params)

    async def call_tools(
        self,
        calls: Sequence[tuple[str, Mapping[str, Any]]],
        parallel: bool = False,
        timeout_s: float = 60.0,
    ) -> list[ToolResult | AenvError]:
        """Call several tools, in order or all at once, within `timeout_s` together.

        Each item is a result or the error that kept the call from having one.
        """
        ends_at = asyncio.get_running_loop().time() + timeout_s

        async def call(name: str, arguments: Mapping[str, Any]) -> ToolResult | AenvError:
            remaining_s = max(ends_at - asyncio.get_running_loop().time(), 0.001)
            try:
                return await self.call_tool(name, arguments, remaining_s)
            except AenvError as exc:
                return exc

        if not parallel:
            return [await call(name, arguments) for name, arguments in calls]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call(name, arguments)) for name, arguments in calls]
        return [task.result() for task in tasks]

    async def _list_page(self, params: Mapping[str, Any]) -> dict[str, Any]:
        async with self._attributed("tools/list", None):
            try:
                return await self._request("tools/list", params)
            except CallOutcomeUnknown:
                return await self._request("tools/list", params)  # reading twice is safe

    @asynccontextmanager
    async def _attributed(self, name: str, timeout_s: float | None) -> AsyncIterator[None]:
        """Bound a block by the call's deadline, and raise our errors for all that leaves it."""
        limit_s = None if timeout_s is None else timeout_s + _GRACE_S
        deadline = asyncio.timeout(limit_s)
        try:
            async with deadline:
                yield
        except TimeoutError as exc:
            if not deadline.expired():
                raise
            raise ToolTimeout(
                f"{name!r} had no result after {timeout_s:g} s and was told to stop",
                tool_name=name,
                hint="give the call a longer timeout",
            ) from exc
        except NOT_SENT as exc:
            raise self._unreachable(exc) from exc
        except RpcError as exc:
            self._answered = True
            raise from_rpc(exc, name) from None
        else:
            self._answered = True

    def _unreachable(self, exc: Exception) -> AenvError:
        reason = str(exc) or type(exc).__name__
        if isinstance(exc, httpx.PoolTimeout | httpx.ConnectTimeout) or not self._answered:
            return FabricUnavailable(
                f"no environment server answers at {self.url}: {reason}",
                hint="start one with `aenv run`, or check DUMMY_INSTANCE_IP",
            )
        return SandboxLost(f"the environment server at {self.url} is gone: {reason}")

    # --- functions and rewards --------------------------------------------------------------

    async def list_functions(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Return ``total``, and the lists ``functions``, ``reward`` and ``health``.

        Raises:
            As `call_function`.
        """
        data: dict[str, Any] = await self._send("GET", "/functions/list", {}, timeout_s, "list")
        return data

    async def call_function(
        self,
        name: str,
        arguments: Mapping[str, Any],
        timeout_s: float = 60.0,
        method: str = "POST",
    ) -> Any:
        """Call a function and return its result; never sent twice.

        Args:
            name: The function's, or its endpoint, starting with ``/``. Where the function has an
                endpoint or method of its own, the server is asked for it.
            arguments: Sent as a JSON object, or as the query with GET.
            timeout_s: Then it is stopped.
            method: The HTTP method to try first.

        Raises:
            ToolNotFound, ToolInputInvalid: It did not run.
            FunctionFailed: It raised.
            ToolTimeout: It reached `timeout_s` and was told to stop.
            CallOutcomeUnknown: The call was sent, and the connection failed before its answer.
            FabricUnavailable, SandboxLost: As for `call_tool`.
        """
        path = name if name.startswith("/") else f"/functions/{quote(name, safe='')}"
        try:
            return await self._send(method, path, arguments, timeout_s, name)
        except (ToolNotFound, MethodNotAllowed):
            for entry in (await self.list_functions(timeout_s)).get("functions", []):
                route = (entry["method"], entry["endpoint"])
                if name in (entry["name"], entry["endpoint"]) and route != (method, path):
                    return await self._send(*route, arguments, timeout_s, name)
            raise

    async def call_reward(
        self, arguments: Mapping[str, Any], name: str | None = None, timeout_s: float = 60.0
    ) -> Any:
        """Call a reward, by default the environment's default one; never sent twice.

        Raises:
            As `call_function`.
        """
        path = "/task/reward" if name is None else f"/task/reward/{quote(name, safe='')}"
        return await self._send("POST", path, arguments, timeout_s, name or "reward")

    async def _send(
        self, method: str, path: str, arguments: Mapping[str, Any], timeout_s: float, name: str
    ) -> Any:
        headers = {"aenv-timeout-s": f"{timeout_s:g}"}
        async with self._attributed(name, timeout_s):
            try:
                if method == "GET":
                    query = {key: query_text(value) for key, value in arguments.items()}
                    response = await self._http.get(self.url + path, params=query, headers=headers)
                else:
                    response = await self._http.request(
                        method, self.url + path, json=dict(arguments), headers=headers
                    )
            except NOT_SENT:
                raise
            except httpx.TransportError as exc:
                raise CallOutcomeUnknown(
                    f"{name!r} was sent and has no answer: {type(exc).__name__}: {exc}",
                    hint="it may have run; it was not sent again",
                ) from exc
        return read_envelope(response, name)

    # --- health -----------------------------------------------------------------------------

    async def check_health(
        self, arguments: Mapping[str, Any] | None = None, timeout_s: float = 5.0
    ) -> dict[str, Any]:
        """Return the health check's whole answer; ``data.status`` says how the environment is.

        Raises:
            FabricUnavailable, SandboxLost: Nothing answers at the address.
            DeadlineExceeded: No answer within `timeout_s`.
            InternalError: The answer is none of a health check.
        """
        try:
            async with asyncio.timeout(timeout_s):
                given = object_of("health", arguments)
                query = {key: query_text(value) for key, value in given.items()}
                response = await self._http.get(f"{self.url}/health", params=query)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.url}/health did not answer within {timeout_s:g} s"
            ) from None
        except httpx.TransportError as exc:
            raise self._unreachable(exc) from exc
        body = json_object(response)
        if body is None or not isinstance(body.get("data"), dict):
            raise InternalError(
                f"{self.url}/health answered HTTP {response.status_code} and no health: "
                f"{response.text[:200]}"
            )
        self._answered = True
        return body

    async def wait_healthy(
        self, deadline_s: float = 300.0, wait: Wait | None = None
    ) -> dict[str, Any]:
        """Wait until the environment is healthy and return the health check's answer.

        A wait of more than a few seconds is told on the log; `wait` is one that the caller began.

        Raises:
            DeadlineExceeded: It was not within `deadline_s`; the message has the last answer.
            SandboxStartFailed: Its code does not load, which waiting does not change.
        """
        return await until_healthy(
            lambda timeout_s: self.check_health(timeout_s=timeout_s),
            self.url,
            wait or Wait(f"a healthy environment at {self.url}", deadline_s),
        )

    async def renew(self, ttl: str | float) -> InstanceInfo:
        """Refuse: a server that somebody else started has no deadline.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"the server at {self.url} has no TTL to renew",
            hint="unset DUMMY_INSTANCE_IP to use an instance on Ray",
        )

    async def release(self) -> None:
        """Do nothing: the server is its starter's to end."""

    async def close(self) -> None:
        """End the session and close the connections; any number of times."""
        await self._session.close()
        await self._http.aclose()
