"""What the code of an environment sends to call another one, and what it gets."""

from __future__ import annotations

import time
from typing import Any

import pytest

from aenv_ray.runtime.door.calls import RunningCall, current_call
from aenv_ray.runtime.door.host import inner_environments
from aenv_ray.runtime.door.host.inner_environments import InnerEnvironment, InnerToolFailed
from aenv_ray.runtime.faults import Fault


class Host:
    """A host that keeps what it is asked."""

    was_open = True

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answer: dict[str, Any] | None = {"result": {"data": 1}}

    def ask(
        self, method: str, params: dict[str, Any], wait_s: float, call: Any
    ) -> dict[str, Any] | None:
        assert call.remaining_s > 0
        assert method == "aenv/environment"
        assert wait_s > params["timeout_s"], "the inner instance enforces the timeout"
        self.asked.append(params)
        return self.answer

    async def ask_async(
        self, method: str, params: dict[str, Any], wait_s: float
    ) -> dict[str, Any] | None:
        return self.ask(method, params, wait_s, current_call())


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host()
    monkeypatch.setattr(inner_environments, "HOST", found)
    monkeypatch.setattr(inner_environments, "ask_host", found.ask)
    monkeypatch.setattr(inner_environments, "ask_host_async", found.ask_async)
    return found


def in_call(timeout_s: float, function: Any) -> Any:
    return RunningCall("tools/call 1", "t", time.monotonic() + timeout_s).run_sync(function, {})


def test_a_kept_environment_has_the_time_of_the_call_that_uses_it(host: Host) -> None:
    """Code may look it up once, in a function that sets the instance up."""
    kept = in_call(5.0, lambda: InnerEnvironment("other", "", current_call))
    in_call(500.0, lambda: kept.call_function("f", timeout_s=400.0))
    in_call(30.0, lambda: kept.call_function("f", timeout_s=400.0))
    first, second = (params["timeout_s"] for params in host.asked)
    assert first == 400.0
    assert 20.0 < second <= 30.0


def test_no_call_is_made_without_time(host: Host) -> None:
    with pytest.raises(Fault, match="no time is left to call other") as raised:
        in_call(-1.0, lambda: InnerEnvironment("other", "", current_call).call_function("f"))
    assert raised.value.code == "tool_timeout"
    assert host.asked == []


def test_what_a_tool_returns_or_raises(host: Host) -> None:
    inner = InnerEnvironment("other", "", current_call)
    text = {"type": "text", "text": "4"}
    wrapped = {"structuredContent": {"result": 4}, "_meta": {"aenv/wrapped": True}}
    for result, value in (
        ({"content": [text]}, "4"),
        ({"content": [text], "structuredContent": {"n": 4}}, {"n": 4}),
        ({"content": [text], **wrapped}, 4),
    ):
        host.answer = {"result": result}
        assert inner.call_tool("t") == value
    host.answer = {"result": {"content": [text], "isError": True}}
    with pytest.raises(InnerToolFailed, match="4"):
        inner.call_tool("t")


@pytest.mark.parametrize(
    ("method", "arguments", "result", "value", "sent"),
    [
        (
            "call_tool", ("t", {"a": 1}), {"content": [{"type": "text", "text": "4"}]}, "4",
            ("tools/call", {"name": "t", "arguments": {"a": 1}}),
        ),
        (
            "call_function", ("f",), {"data": [4]}, [4],
            ("aenv/function", {"name": "f", "arguments": {}}),
        ),
        (
            "call_reward", ({"a": 1},), {"data": 0.5}, 0.5,
            ("aenv/reward", {"name": None, "arguments": {"a": 1}}),
        ),
        ("list_tools", (), {"tools": [{"name": "t"}]}, [{"name": "t"}], ("tools/list", {})),
        ("release", (), {}, None, ("aenv/release", {})),
    ],
)  # fmt: skip
async def test_blocking_and_async_calls_send_the_same_and_return_the_same(
    method: str,
    arguments: tuple[Any, ...],
    result: dict[str, Any],
    value: Any,
    sent: tuple[str, dict[str, Any]],
    host: Host,
) -> None:
    host.answer = {"result": result}
    inner = InnerEnvironment("other", "", current_call)
    assert getattr(inner, method)(*arguments) == value
    assert await getattr(inner.aio, method)(*arguments) == value
    assert [(one["method"], one["params"]) for one in host.asked] == [sent, sent]


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (None, "call_outcome_unknown"),
        ({"error": {"message": "m", "data": {"code": "policy_refused"}}}, "policy_refused"),
        ({"error": {"message": "m"}}, "internal_error"),
    ],
)
def test_a_call_without_a_result_is_a_fault(
    host: Host, answer: dict[str, Any] | None, code: str
) -> None:
    host.answer = answer
    with pytest.raises(Fault) as raised:
        InnerEnvironment("other", "", current_call).call_function("f")
    assert raised.value.code == code
