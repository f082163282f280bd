"""An environment server at an address, such as one that ``aenv run`` started.

If nothing listens at the address, the error depends on history: a server that never answered is
`FabricUnavailable` (start it, or wait); one that answered before has lost its state, so the error
is `SandboxLost`.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import quote

import httpx

from aenv_ray.actors.calls.parameters import object_of
from aenv_ray.addresses import is_proxied
from aenv_ray.client.gateway_http import (
    NOT_SENT,
    SERVER_PORTS,
    error_of_refusal,
    json_object,
    parse_url,
    read_envelope,
)
from aenv_ray.client.mcp_session import McpSession, RpcError
from aenv_ray.client.post_transport import PostTransport
from aenv_ray.client.tool_callbacks import ToolCallbacks
from aenv_ray.client.waiting import Wait, until_healthy
from aenv_ray.errors import (
    AenvError,
    CallOutcomeUnknown,
    ConfigError,
    DeadlineExceeded,
    FabricUnavailable,
    FunctionFailed,
    InternalError,
    SandboxLost,
    ToolInputInvalid,
    ToolNotFound,
    ToolTimeout,
    from_wire,
    reported_by_sandbox,
)
from aenv_ray.models import (
    ExecResult,
    FileEntry,
    InstanceInfo,
    PromptMessages,
    ResetResult,
    ResourceContents,
    TaskPage,
    ToolResult,
)
from aenv_ray.runtime.door.async_calls import TIMEOUT_S

_CONNECT_S: Final = 5.0
_GRACE_S: Final = 2.0
"""Added to a call's deadline, so that the server's own deadline normally ends the call first."""
_KEEP_IDLE_S: Final = 4.0
"""Less than the 5 s after which servers close idle connections: no request meets a closing one."""


class HttpInstance:
    """One environment server, reached by HTTP: one MCP session and one connection pool.

    Args:
        address: See `parse_url`.
        headers: Sent with every request.
        max_connections: Concurrent calls; more wait for a connection.
        ports: Default port of each scheme.

    Calls may run concurrently; one that fails does not affect the others. Cancelling a call cancels
    it at the server. Use it on one event loop.
    """

    instance_id: str | None = None
    """None: the server is not an instance of the fabric."""

    def __init__(
        self,
        address: str,
        *,
        headers: Mapping[str, str] | None = None,
        max_connections: int = 1000,
        ports: Mapping[str, str] = SERVER_PORTS,
    ) -> None:
        self.url = parse_url(address, ports)
        is_secure = self.url.startswith("https://")
        is_direct = not is_proxied(self.url)
        limits = httpx.Limits(
            max_connections=max_connections,
            max_keepalive_connections=max_connections,
            keepalive_expiry=_KEEP_IDLE_S,
        )
        transport: httpx.AsyncBaseTransport | None = None
        posts: PostTransport | None = None
        if is_direct:
            transport = httpx.AsyncHTTPTransport(limits=limits, verify=is_secure)
        if is_direct and not is_secure:
            assert transport is not None
            transport = posts = PostTransport(
                transport,
                max_connections=max_connections,
                keep_idle_s=_KEEP_IDLE_S,
                connect_s=_CONNECT_S,
            )
        self._http = httpx.AsyncClient(
            headers=dict(headers or {}),
            timeout=httpx.Timeout(None, connect=_CONNECT_S),  # each call bounds its own time
            limits=limits,
            transport=transport,
        )
        self._session = McpSession(self._http, f"{self.url}/mcp", posts)
        self._answered = False

    @property
    def callbacks(self) -> ToolCallbacks | None:
        """What is offered to tools; to be set before the first request."""
        return self._session.callbacks

    @callbacks.setter
    def callbacks(self, callbacks: ToolCallbacks | None) -> None:
        self._session.callbacks = callbacks

    # --- tools ----------------------------------------------------------------------------------

    async def list_tools(self, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Return the tools as MCP ``Tool`` objects: ``name``, ``description``, ``inputSchema``.

        Raises:
            SandboxStartFailed: The environment's code does not load.
            FabricUnavailable: The server cannot be reached.
            DeadlineExceeded: It did not answer in time.
        """
        tools = await self._listed("tools/list", "tools", timeout_s)
        return [{"description": "", **tool} for tool in tools]

    async def list_resources(self) -> list[dict[str, Any]]:
        """Return the resources as MCP ``Resource`` objects; errors as `list_tools`."""
        return await self._listed("resources/list", "resources")

    async def list_resource_templates(self) -> list[dict[str, Any]]:
        """Return the MCP ``ResourceTemplate`` objects; errors as `list_tools`."""
        return await self._listed("resources/templates/list", "resourceTemplates")

    async def read_resource(self, uri: str, timeout_s: float = 60.0) -> list[ResourceContents]:
        """Read a resource; errors as `call_tool`, and FunctionFailed."""
        params = {"uri": uri, "_meta": self._meta(timeout_s)}
        async with self._attributed(uri, timeout_s):
            data = await self._request("resources/read", params)
        return [ResourceContents.from_wire(part) for part in data["contents"]]

    async def list_prompts(self) -> list[dict[str, Any]]:
        """Return the prompts as MCP ``Prompt`` objects; errors as `list_tools`."""
        return await self._listed("prompts/list", "prompts")

    async def get_prompt(
        self, name: str, arguments: Mapping[str, Any], timeout_s: float = 60.0
    ) -> PromptMessages:
        """Fill in a prompt; errors as `call_tool`, and FunctionFailed."""
        params = {"name": name, "arguments": dict(arguments), "_meta": self._meta(timeout_s)}
        async with self._attributed(name, timeout_s):
            return PromptMessages.from_wire(await self._request("prompts/get", params))

    async def _listed(self, method: str, key: str, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Return all pages of a listing."""
        found: list[dict[str, Any]] = []
        params: dict[str, Any] = {}
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    page = await self._list_page(method, params)
                    found += page.get(key) or []
                    if not page.get("nextCursor"):
                        return found
                    params = {"cursor": page["nextCursor"]}
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.url} did not answer {method} within {timeout_s:g} s",
                hint="raise the timeout of the call",
            ) from None

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], timeout_s: float = 60.0
    ) -> ToolResult:
        """Call a tool; never sent twice. If the tool raises, the result has ``is_error`` set.

        Raises:
            ToolNotFound, ToolInputInvalid: The tool did not run.
            ToolTimeout: It was stopped after `timeout_s`.
            CallOutcomeUnknown: The connection failed after the call was sent.
            FabricUnavailable, SandboxLost: Nothing listens at the address: never yet, or no longer.
        """
        params = {
            "name": name,
            "arguments": dict(object_of(name, arguments)),
            "_meta": self._meta(timeout_s),
        }
        async with self._attributed(name, timeout_s):
            data = await self._request("tools/call", params)
        meta = data.get("_meta")
        error = meta.get("aenv/error") if isinstance(meta, dict) else None
        if isinstance(error, dict):  # servers put no error of the infrastructure there
            raise reported_by_sandbox(error, "tools/call")
        return ToolResult.from_wire(data)

    def _meta(self, timeout_s: float) -> dict[str, Any]:
        """Return the ``_meta`` of a tool call."""
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

        Each item is a result, or the error for which the call has none.
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

    async def _list_page(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        async with self._attributed(method, None):
            try:
                return await self._request(method, params)
            except CallOutcomeUnknown:
                return await self._request(method, params)  # reading twice is safe

    @asynccontextmanager
    async def _attributed(self, name: str, timeout_s: float | None) -> AsyncIterator[None]:
        """Bound a block by the call's deadline, and translate the errors that leave it."""
        limit_s = None if timeout_s is None else timeout_s + _GRACE_S
        deadline = asyncio.timeout(limit_s)
        try:
            async with deadline:
                yield
        except TimeoutError as exc:
            if not deadline.expired():
                raise
            raise ToolTimeout(
                f"{name!r} had no result after {timeout_s:g} s and was cancelled",
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
        return SandboxLost(
            f"the environment server at {self.url} is gone: {reason}",
            hint="start it again with `aenv run`, and create the environment object again",
        )

    # --- functions and rewards ------------------------------------------------------------------

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
            name: The function's name, or its endpoint, starting with ``/``. A function with a
                custom endpoint or method is looked up in the server's list.
            arguments: Sent as a JSON object, or as the query with GET.
            timeout_s: The function is stopped after this.
            method: The HTTP method to try first.

        Raises:
            ToolNotFound, ToolInputInvalid: The function did not run.
            FunctionFailed: It raised.
            ToolTimeout: It was stopped after `timeout_s`.
            CallOutcomeUnknown: The connection failed after the call was sent.
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
        async with self._attributed(name, timeout_s):
            response = await self._exchange(method, path, arguments, timeout_s, name)
        return read_result(response, name)

    async def _exchange(
        self, method: str, path: str, arguments: Mapping[str, Any], timeout_s: float, name: str
    ) -> httpx.Response:
        headers = {"aenv-timeout-s": f"{timeout_s:g}"}
        try:
            if method == "GET":
                query = {key: query_text(value) for key, value in arguments.items()}
                return await self._http.get(self.url + path, params=query, headers=headers)
            return await self._http.request(
                method, self.url + path, json=dict(arguments), headers=headers
            )
        except NOT_SENT:
            raise
        except httpx.TransportError as exc:
            raise CallOutcomeUnknown(
                f"{name!r} was sent, and its response was lost: {type(exc).__name__}: {exc}",
                hint="it may have run: check its effect before you send it again",
            ) from exc

    # --- health ---------------------------------------------------------------------------------

    async def check_health(
        self, arguments: Mapping[str, Any] | None = None, timeout_s: float = 5.0
    ) -> dict[str, Any]:
        """Return the health check's response; ``data.status`` is the environment's state.

        Raises:
            FabricUnavailable, SandboxLost: Nothing answers at the address.
            DeadlineExceeded: No response within `timeout_s`.
            InternalError: The response is not one of a health check.
        """
        try:
            async with asyncio.timeout(timeout_s):
                given = object_of("health", arguments)
                query = {key: query_text(value) for key, value in given.items()}
                response = await self._http.get(f"{self.url}/health", params=query)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.url}/health did not answer within {timeout_s:g} s",
                hint="read the server's log; a slow health check needs a larger timeout",
            ) from None
        except httpx.TransportError as exc:
            raise self._unreachable(exc) from exc
        body = json_object(response)
        if not isinstance(body.get("data"), dict):
            raise InternalError(
                f"{self.url}/health answered HTTP {response.status_code} without a health status: "
                f"{response.text[:200]}",
                hint="check that this is the address of an environment server",
            )
        self._answered = True
        return body

    async def wait_healthy(
        self, deadline_s: float = 300.0, wait: Wait | None = None
    ) -> dict[str, Any]:
        """See `until_healthy`; `wait` continues a wait that the caller began."""
        return await until_healthy(
            lambda timeout_s: self.check_health(timeout_s=timeout_s),
            self.url,
            wait or Wait(f"a healthy environment at {self.url}", deadline_s),
        )

    # --- only for instances of the fabric -------------------------------------------------------

    def _only_on_ray(self, *_: object, **__: object) -> Any:
        raise ConfigError(
            f"instances at {self.url} cannot be reset, and list no tasks",
            hint="reset instances on Ray; here, release this one and create another",
        )

    reset: Callable[..., Coroutine[Any, Any, ResetResult]] = _only_on_ray
    list_tasks: Callable[..., Coroutine[Any, Any, TaskPage]] = _only_on_ray

    def _unmanaged(self, *_: object, **__: object) -> Any:
        raise ConfigError(
            f"the `aenv run` server at {self.url} has tools and functions, but no commands, files, "
            "logs or TTL",
            hint="unset DUMMY_INSTANCE_IP to use an instance on Ray or behind a gateway",
        )

    exec: Callable[..., Coroutine[Any, Any, ExecResult]] = _unmanaged
    read_file: Callable[..., Coroutine[Any, Any, bytes]] = _unmanaged
    write_file: Callable[..., Coroutine[Any, Any, int]] = _unmanaged
    list_files: Callable[..., Coroutine[Any, Any, list[FileEntry]]] = _unmanaged
    logs: Callable[..., AsyncGenerator[str, None]] = _unmanaged
    info: Callable[..., Coroutine[Any, Any, InstanceInfo]] = _unmanaged
    renew: Callable[..., Coroutine[Any, Any, InstanceInfo]] = _unmanaged

    async def release(self) -> None:
        """Do nothing: the server ends with the process that started it."""

    async def close(self) -> None:
        """End the session and close the connections, any number of times."""
        await self._session.close()
        await self._http.aclose()


# --- responses ------------------------------------------------------------------------------------


class MethodNotAllowed(ConfigError):
    """The path takes another HTTP method; nothing ran."""


def query_text(value: Any) -> str:
    """Return a value as text for a query string."""
    return value if isinstance(value, str) else json.dumps(value)


def read_result(response: httpx.Response, name: str) -> Any:
    """Return the ``data`` of a response to a call of the function or reward `name`.

    Raises:
        AenvError: As `read_envelope`.
    """
    return read_envelope(response, functools.partial(_error_of_call, name))


def _error_of_call(name: str, response: httpx.Response, body: dict[str, Any]) -> AenvError:
    status = response.status_code
    text = str(body["error"]) if "error" in body else response.text[:500]
    if status == 405:
        return MethodNotAllowed(text, hint="call it with the function's HTTP method")
    if isinstance(body.get("code"), str):
        return from_wire({**body, "message": text})
    if status == 404:
        return ToolNotFound(
            f"there is no function {name!r}",
            tool_name=name,
            hint="list_functions() returns the names",
        )
    if status in {400, 413, 422}:
        return ToolInputInvalid(text, tool_name=name)
    if status in {401, 403, 421}:
        return ConfigError(
            f"{response.url} refuses this client: HTTP {status}: {text}",
            hint="check the URL and the token",
        )
    if (refused := error_of_refusal(status, response.url, text, response.headers)) is not None:
        return refused
    if not body and status in {502, 504}:
        return CallOutcomeUnknown(
            f"{name!r}: a proxy answered HTTP {status}: {text}",
            hint="the call may have run: check its effect before you send it again",
        )
    return FunctionFailed(text or f"HTTP {status}", tool_name=name)


def from_rpc(error: RpcError, name: str) -> AenvError:
    """Return our error for a JSON-RPC error."""
    if isinstance(error.data, dict) and "code" in error.data:
        return from_wire(error.data)
    if error.code == -32602:
        unknown = error.message.lower().startswith("unknown tool")
        return (ToolNotFound if unknown else ToolInputInvalid)(error.message, tool_name=name)
    return InternalError(
        f"{name}: the server answered JSON-RPC error {error.code}: {error.message}"
    )
