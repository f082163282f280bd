"""Calls from the code of an environment to other environments.

In a tool, reward or function: ``current_call().env("other@1.0.0").call_tool("name", {…})``; in
async code ``await current_call().env("other@1.0.0").aio.call_tool(…)``. The instance's host creates
the inner instance at the first call, for the owner of this instance, and ends it with this one.
Only environments in ``deployConfig.environments`` of the project may be called.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from aenv_ray.runtime.door.caller import DEFAULT_TIMEOUT_S
from aenv_ray.runtime.door.host.link import ENVIRONMENT_METHOD, HOST
from aenv_ray.runtime.door.host.requests import Stoppable, ask_host, ask_host_async
from aenv_ray.runtime.faults import Fault

T = TypeVar("T")
RELEASE: Final = "aenv/release"
CALLS: Final = frozenset({"tools/call", "tools/list", "aenv/function", "aenv/reward", "aenv/reset"})
"""What may be called in an inner instance."""
RELEASE_S: Final = 60.0
_NOT_OF_AGENTS: Final = ("aenv/function ", "aenv/reward ", "aenv/reset ")
"""Beginnings of the keys of calls that no agent makes. Code in a thread of its own has no call: an
agent may have caused it."""
_GRACE_S: Final = 5.0
"""How much longer than the timeout, which the inner instance enforces, this side waits."""


class OuterCall(Stoppable, Protocol):
    """The call that calls another environment; see `RunningCall`."""

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline, never negative."""
        ...

    @property
    def key(self) -> str:
        """The key of the call, see `outcomes.key_of`."""
        ...

    @property
    def rewards_before(self) -> int:
        """How many rewards had begun before this tool call; -1 for other calls."""
        ...


class InnerQuery(NamedTuple, Generic[T]):
    """What is sent to an inner instance, and how its answer is read."""

    method: str
    params: dict[str, Any]
    value_of: Callable[[dict[str, Any]], T]
    """Returns the value of a result."""


class InnerEnvironment:
    """One inner instance of an environment, as the code of an outer one calls it.

    Args:
        reference: ``name`` or ``name@version``, as in ``deployConfig.environments``.
        key: Each key has its own inner instance.
        current_call: Returns the call that runs now: code may keep this object for later ones.

    All methods raise:
        RuntimeError: The outer instance is not up: its code is being imported.
        Fault: The environment may not be called, or the call has no result. The caller of the outer
            tool gets this error. If the infrastructure failed, the outer instance is lost, too.

    No inner call lasts longer than the call that makes it, and stopping that stops this.
    """

    def __init__(self, reference: str, key: str, current_call: Callable[[], OuterCall]) -> None:
        self._reference = reference
        self._key = key
        self._current_call = current_call
        self.aio: Final = _AsyncCalls(self)
        """The same methods as coroutines."""

    def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Any:
        """Return what a tool returns, as JSON data, or else its text.

        Raises:
            InnerToolFailed: The tool raised.
        """
        return self.ask(_tool_query(name, arguments), timeout_s)

    def call_function(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Any:
        """Return what a function returns."""
        return self.ask(_data_query("aenv/function", name, arguments), timeout_s)

    def call_reward(
        self,
        arguments: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Any:
        """Return a reward; the default one if `name` is None."""
        return self.ask(_data_query("aenv/reward", name, arguments), timeout_s)

    def list_tools(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[dict[str, Any]]:
        """Return the tools, as MCP describes them."""
        return self.ask(_LIST_TOOLS, timeout_s)

    def release(self) -> None:
        """End the inner instance; the next call starts another one. Idempotent."""
        self.ask(_RELEASE, RELEASE_S)

    # --- asking ---------------------------------------------------------------------------------

    def ask(self, query: InnerQuery[T], timeout_s: float) -> T:
        """Return the value of an answer; blocks."""
        request, timeout_s = self._request(query, timeout_s)
        answer = ask_host(ENVIRONMENT_METHOD, request, timeout_s + _GRACE_S, self._current_call())
        return query.value_of(self._result(answer, query.method, timeout_s))

    async def ask_async(self, query: InnerQuery[T], timeout_s: float) -> T:
        """Return the value of an answer."""
        request, timeout_s = self._request(query, timeout_s)
        answer = await ask_host_async(ENVIRONMENT_METHOD, request, timeout_s + _GRACE_S)
        return query.value_of(self._result(answer, query.method, timeout_s))

    def _request(self, query: InnerQuery[Any], timeout_s: float) -> tuple[dict[str, Any], float]:
        if not HOST.was_open:
            raise RuntimeError(
                f"{self._reference} cannot be called while the code is imported: call it in a "
                "tool, a reward, a function or a reset"
            )
        call = self._current_call()
        timeout_s = min(timeout_s, call.remaining_s)
        if timeout_s <= 0:
            raise Fault("tool_timeout", f"no time is left to call {self._reference}")
        request = {
            "environment": self._reference,
            "key": self._key,
            "method": query.method,
            "params": query.params,
            "timeout_s": timeout_s,
            "call_id": f"inner-{uuid.uuid4().hex}",
            "is_for_tool": not call.key.startswith(_NOT_OF_AGENTS),
            "rewards": call.rewards_before,
        }
        return request, timeout_s

    def _result(
        self, answer: dict[str, Any] | None, method: str, timeout_s: float
    ) -> dict[str, Any]:
        if answer is None:
            raise Fault(
                "call_outcome_unknown",
                f"{self._reference} did not answer {method} within {timeout_s:g} s",
                "it may have run, and was not sent again",
            )
        error = answer.get("error")
        if error is None:
            return dict(answer["result"])
        data = error.get("data") or {}
        raise Fault(
            str(data.get("code", "internal_error")), str(error["message"]), data.get("hint")
        )


class InnerToolFailed(RuntimeError):
    """A tool of an inner instance raised; the text is its message."""


class _AsyncCalls:
    """The methods of an `InnerEnvironment` as coroutines."""

    def __init__(self, environment: InnerEnvironment) -> None:
        self._ask = environment.ask_async

    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Any:
        """See `InnerEnvironment.call_tool`."""
        return await self._ask(_tool_query(name, arguments), timeout_s)

    async def call_function(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Any:
        """See `InnerEnvironment.call_function`."""
        return await self._ask(_data_query("aenv/function", name, arguments), timeout_s)

    async def call_reward(
        self,
        arguments: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Any:
        """See `InnerEnvironment.call_reward`."""
        return await self._ask(_data_query("aenv/reward", name, arguments), timeout_s)

    async def list_tools(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[dict[str, Any]]:
        """See `InnerEnvironment.list_tools`."""
        return await self._ask(_LIST_TOOLS, timeout_s)

    async def release(self) -> None:
        """See `InnerEnvironment.release`."""
        await self._ask(_RELEASE, RELEASE_S)


def release_all(current_call: Callable[[], OuterCall]) -> None:
    """End all inner instances: the next episode starts without them.

    Raises:
        Fault: The host did not answer, or could not end them.
    """
    if HOST.has_sent(ENVIRONMENT_METHOD):
        InnerEnvironment("", "", current_call).ask(_RELEASE, RELEASE_S)


def _value(result: dict[str, Any]) -> Any:
    """Return the value of an MCP ``CallToolResult``."""
    texts = [part["text"] for part in result.get("content") or [] if part.get("type") == "text"]
    if result.get("isError"):
        raise InnerToolFailed("\n".join(texts))
    structured = result.get("structuredContent")
    if structured is None:
        return "\n".join(texts)
    is_wrapped = (result.get("_meta") or {}).get("aenv/wrapped")
    return structured["result"] if is_wrapped else structured


def _tool_query(name: str, arguments: Mapping[str, Any] | None) -> InnerQuery[Any]:
    return InnerQuery("tools/call", {"name": name, "arguments": dict(arguments or {})}, _value)


def _data_query(
    method: str, name: str | None, arguments: Mapping[str, Any] | None
) -> InnerQuery[Any]:
    return InnerQuery(
        method, {"name": name, "arguments": dict(arguments or {})}, lambda result: result["data"]
    )


_LIST_TOOLS: Final[InnerQuery[list[dict[str, Any]]]] = InnerQuery(
    "tools/list", {}, lambda result: list(result["tools"])
)
_RELEASE: Final[InnerQuery[None]] = InnerQuery(RELEASE, {}, lambda _: None)
