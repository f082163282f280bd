"""The dispatcher: which calls run, which are refused, and the answers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from aenv_ray.runtime.faults import Fault
from tests.unit.runtime.door.dispatch_bench import Answer, Bench, add, add_later, fail, lambda_named

# --- tools ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [add, add_later])
def test_sync_and_async_tools_return_results(function: Callable[..., Any]) -> None:
    result = Bench(function).tool(function.__name__, a=2, b=3).result
    assert result["structuredContent"] == {"result": 5}
    assert result["isError"] is False


def test_a_sync_function_may_return_an_awaitable() -> None:
    def indirect(a: int) -> Any:
        return add_later(a)

    assert Bench(indirect).tool("indirect", a=2).text == "3"


def test_the_result_of_a_generator_is_the_list_of_its_values() -> None:
    def words(count: int) -> Iterator[str]:
        yield from ["one"] * count

    async def words_later(count: int) -> AsyncIterator[str]:
        for _ in range(count):
            await asyncio.sleep(0)
            yield "one"
        if count > 2:
            raise ValueError("enough")

    bench = Bench(words, words_later)
    for name in ("words", "words_later"):
        assert bench.tool(name, count=2).result["structuredContent"] == {"result": ["one", "one"]}
    failed = bench.tool("words_later", count=3).result
    assert (failed["isError"], failed["content"][0]["text"]) == (True, "ValueError: enough")
    assert bench.tool("words_later", cnt=3).error["code"] == "tool_input_invalid"


def test_a_tool_that_raises_is_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    """Its failure is data for the agent; its traceback is in the log."""

    async def fail_later() -> None:
        raise ValueError("boom")

    bench = Bench(fail, fail_later)
    for name in ("fail", "fail_later"):
        result = bench.tool(name).result
        assert result["isError"] is True
        assert result["content"][0]["text"] == "ValueError: boom"
        assert result["_meta"]["aenv/error_type"] == "ValueError"
    assert "Traceback" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_tool_that_tries_to_exit_is_a_result_too(kind: type[BaseException]) -> None:
    def leave() -> None:
        raise kind

    assert Bench(leave).tool("leave").result["isError"] is True


def test_a_result_that_is_not_json_is_an_error_result() -> None:
    """Invariant 2: the tool ran and its value cannot travel; that is not our failure."""

    def circle() -> Any:
        found: list[Any] = []
        found.append(found)
        return found

    def opaque() -> Any:
        return object()

    bench = Bench(circle, opaque)
    for name in ("circle", "opaque"):
        assert "cannot be sent" in bench.tool(name).text
        assert bench.tool(name).result["isError"] is True


def test_an_unknown_tool_is_refused_with_the_known_ones() -> None:
    error = Bench(add, fail).tool("ad").error
    assert error["code"] == "tool_not_found"
    assert error["tool_name"] == "ad"
    assert "add, fail" in error["hint"]


@pytest.mark.parametrize("name", [None, "", 3])
def test_a_call_must_name_its_tool(name: Any) -> None:
    assert Bench(add).submit("tools/call", {"name": name}).error["code"] == "tool_input_invalid"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"a": "many"}, "a: Input should be a valid integer"),
        ({}, "a: Field required"),
        ({"a": 1, "c": 2}, "c: Extra inputs are not permitted"),
        ([1, 2], "must be a JSON object, not list"),
        ("a=1", "must be a JSON object, not str"),
        ([], "must be a JSON object, not list"),
        (0, "must be a JSON object, not int"),
        ("", "must be a JSON object, not str"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_and_nothing_runs(arguments: Any, words: str) -> None:
    ran: list[int] = []

    def note(a: int) -> None:
        ran.append(a)

    error = Bench(note).submit("tools/call", {"name": "note", "arguments": arguments}).error
    assert error["code"] == "tool_input_invalid"
    assert words in error["message"]
    assert error["hint"]
    assert ran == []


def test_an_unknown_method_is_refused() -> None:
    assert (
        "unknown method 'aenv/format_disk'"
        in Bench().submit("aenv/format_disk", {}).error["message"]
    )


def test_tools_are_listed_with_their_schemas() -> None:
    (tool,) = Bench(add).submit("tools/list", {}).result["tools"]
    assert tool["name"] == "add"
    assert tool["description"] == "Add two numbers."
    assert tool["inputSchema"]["required"] == ["a"]


def test_the_methods_of_agents_cannot_call_rewards() -> None:
    """Invariant 8: neither the list of tools nor a tool call knows rewards and functions."""
    bench = Bench(add)
    bench.registry.add_reward(lambda: 1.0, name="score")
    bench.registry.add_function(fail)
    assert [t["name"] for t in bench.submit("tools/list", {}).result["tools"]] == ["add"]
    for name in ("score", "fail"):
        assert bench.tool(name).error["code"] == "tool_not_found"
    batch = bench.submit("aenv/call_tools", {"calls": [{"name": "score"}]}).result
    assert batch["results"][0]["error"]["data"]["code"] == "tool_not_found"


# --- rewards, functions, health -------------------------------------------------------------------


def reward(function: Callable[..., Any], **params: Any) -> Answer:
    bench = Bench()
    bench.registry.add_reward(function, name="score")
    return bench.submit("aenv/reward", params)


@pytest.mark.parametrize("value", [0.5, 1, True, None, "text", {"score": 0.5, "why": [1]}])
def test_a_reward_is_returned_unchanged(value: Any) -> None:
    assert reward(lambda: value).result["data"] == value


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, {"score": math.nan}, {"score": 1.0, "b": math.inf}]
)
def test_a_reward_that_is_not_finite_is_a_failure(value: Any) -> None:
    """Invariant 2: NaN never enters a mean."""
    error = reward(lambda: value).error
    assert error["code"] == "function_failed"
    assert "which is not a finite reward" in error["message"]


def test_a_reward_that_raises_is_a_failure_with_its_traceback() -> None:
    """Invariant 2: a broken grader is not a zero."""
    error = reward(fail).error
    assert error["code"] == "function_failed"
    assert "'score' raised ValueError: boom" in error["message"]
    assert "Traceback" in error["traceback"]


def test_the_default_reward_runs_unless_one_is_named() -> None:
    bench = Bench()
    bench.registry.add_reward(lambda: 1, name="first")
    bench.registry.add_reward(lambda: 2, name="second", default=True)
    assert bench.submit("aenv/reward", {}).result["data"] == 2
    assert bench.submit("aenv/reward", {"name": "first"}).result["data"] == 1
    error = bench.submit("aenv/reward", {"name": "third"}).error
    assert (error["code"], "first, second" in error["hint"]) == ("tool_not_found", True)


def test_an_environment_without_a_reward_says_so() -> None:
    error = Bench(add).submit("aenv/reward", {}).error
    assert error["code"] == "tool_not_found"
    assert "@register_reward" in error["hint"]


def test_functions_return_data_and_fail_with_errors() -> None:
    bench = Bench()
    bench.registry.add_function(add)
    bench.registry.add_function(fail)
    params = {"name": "add", "arguments": {"a": 1}}
    assert bench.submit("aenv/function", params).result == {"data": 2}
    assert bench.submit("aenv/function", {"name": "fail"}).error["code"] == "function_failed"
    unknown = bench.submit("aenv/function", {"name": "sub"}).error
    assert (unknown["code"], "add, fail" in unknown["hint"]) == ("tool_not_found", True)


@pytest.mark.parametrize("code", ["tool_not_found", "tool_input_invalid"])
def test_code_that_runs_does_not_say_that_its_caller_is_wrong(code: str) -> None:
    """Invariant 14: it may get such an error from an inner instance, and pass it on."""

    def refused() -> None:
        raise Fault(code, "no x", "take y")

    async def refused_later() -> None:
        refused()

    bench = Bench(refused)
    for function in (refused, refused_later):
        bench.registry.add_function(function)
        bench.registry.add_reward(function)
        for method, kind in (("aenv/function", "function"), ("aenv/reward", "reward")):
            error = bench.submit(method, {"name": function.__name__}).error
            text = f"{kind} '{function.__name__}' raised {code}: no x"
            assert (error["code"], error["message"]) == ("function_failed", text)
            assert error["hint"] == "take y"
    assert bench.tool("refused").error["code"] == code


def test_a_function_that_returns_too_much_says_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 12: it is not cut: half a JSON value is none."""
    monkeypatch.setattr("aenv_ray.runtime.door.answers.RESULT_LIMIT_BYTES", 100)
    bench = Bench()
    bench.registry.add_function(lambda_named("big", lambda: "x" * 200))
    error = bench.submit("aenv/function", {"name": "big"}).error
    assert error["code"] == "function_failed"
    assert "202 bytes, over the limit of 100" in error["message"]


def test_an_environment_without_a_health_check_is_healthy() -> None:
    data = Bench(add).submit("aenv/health", {}).result["data"]
    assert data["status"] == "success"
    assert data["details"] == {"tool_count": 1}


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (None, "healthy"),
        (True, "healthy"),
        (False, "unhealthy"),
        ("disk full", "unhealthy"),
        ({"status": "degraded"}, "degraded"),
        ({"load": 3}, "healthy"),
    ],
)
def test_a_health_check_returns_its_status(value: Any, status: str) -> None:
    bench = Bench()
    bench.registry.set_health(lambda: value)
    assert bench.submit("aenv/health", {}).result["data"]["status"] == status


def test_a_health_check_that_raises_is_unhealthy() -> None:
    bench = Bench()
    bench.registry.set_health(fail)
    data = bench.submit("aenv/health", {}).result["data"]
    assert data == {"status": "unhealthy", "message": "ValueError: boom"}


# --- code that does not load ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["tools/list", "tools/call", "aenv/reward", "aenv/health", "aenv/call_tools"]
)
def test_code_that_does_not_load_refuses_every_call_with_its_traceback(method: str) -> None:
    """Invariant 2: a broken environment is no environment without tools."""
    bench = Bench(load_error="tools.py does not load: SyntaxError")
    error = bench.submit(method, {"name": "add", "calls": []}).error
    assert error["code"] == "sandbox_start_failed"
    assert "SyntaxError" in error["message"]


def test_a_runtime_whose_code_does_not_load_still_answers_ping() -> None:
    assert Bench(load_error="broken").submit("ping", {}).result == {}
