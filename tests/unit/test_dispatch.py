"""The one path behind both doors: what runs, what is refused, and what is answered."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from aenv_ray.runtime.calls import current_call
from aenv_ray.runtime.dispatch import Dispatcher
from aenv_ray.runtime.registry import Registry

WAIT_S = 10.0


class Answer:
    """The outcome of one submitted call."""

    def __init__(self) -> None:
        self._told = threading.Event()
        self.times = 0
        self._outcome = b""

    def __call__(self, outcome: bytes) -> None:
        self.times += 1
        self._outcome = outcome
        self._told.set()

    def wait(self) -> dict[str, Any]:
        assert self._told.wait(WAIT_S), "no outcome"
        found: dict[str, Any] = json.loads(b"{" + self._outcome + b"}")
        return found

    @property
    def result(self) -> dict[str, Any]:
        answer = self.wait()
        assert "result" in answer, answer
        found: dict[str, Any] = answer["result"]
        return found

    @property
    def text(self) -> str:
        return str(self.result["content"][0]["text"])

    @property
    def error(self) -> dict[str, Any]:
        answer = self.wait()
        assert "error" in answer, answer
        found: dict[str, Any] = answer["error"]["data"]
        return found


class Bench:
    """A dispatcher and an environment that a test fills."""

    def __init__(self, *functions: Callable[..., Any], load_error: str | None = None) -> None:
        self.registry = Registry()
        for function in functions:
            self.registry.add_tool(function)
        self.dispatcher = Dispatcher(self.registry, load_error=load_error)

    def submit(self, method: str, params: dict[str, Any]) -> Answer:
        answer = Answer()
        self.dispatcher.submit(method, params, answer)
        return answer

    def tool(self, name: str, _meta: dict[str, Any] | None = None, /, **arguments: Any) -> Answer:
        params = {"name": name, "arguments": arguments, "_meta": _meta or {}}
        return self.submit("tools/call", params)

    def in_thread(self, method: str, params: dict[str, Any]) -> Answer:
        """Submit from another thread, as a door does: a sync function runs in it."""
        answer = Answer()
        arguments = (method, params, answer)
        threading.Thread(target=self.dispatcher.submit, args=arguments, daemon=True).start()
        return answer


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def add_later(a: int, b: int = 1) -> int:
    await asyncio.sleep(0)
    return a + b


def fail(text: str = "boom") -> None:
    raise ValueError(text)


# --- tools ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [add, add_later])
def test_a_tool_answers_sync_and_async(function: Callable[..., Any]) -> None:
    result = Bench(function).tool(function.__name__, a=2, b=3).result
    assert result["structuredContent"] == {"result": 5}
    assert result["isError"] is False


def test_a_sync_function_may_return_an_awaitable() -> None:
    def indirect(a: int) -> Any:
        return add_later(a)

    assert Bench(indirect).tool("indirect", a=2).text == "3"


def test_a_tool_that_raises_is_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    """Design D14: its failure is data for the agent; its traceback is in the log."""

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


def test_a_result_that_cannot_be_sent_is_an_error_result() -> None:
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
        ([1, 2], "are list, not an object"),
        ("a=1", "are str, not an object"),
        ([], "are list, not an object"),
        (0, "are int, not an object"),
        ("", "are str, not an object"),
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


def test_an_unknown_method_is_no_tool() -> None:
    assert "no method 'aenv/format_disk'" in Bench().submit("aenv/format_disk", {}).error["message"]


def test_tools_are_listed_with_their_schemas() -> None:
    (tool,) = Bench(add).submit("tools/list", {}).result["tools"]
    assert tool["name"] == "add"
    assert tool["description"] == "Add two numbers."
    assert tool["inputSchema"]["required"] == ["a"]


def test_the_agents_methods_reach_no_reward() -> None:
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
def test_a_reward_arrives_as_it_was_returned(value: Any) -> None:
    assert reward(lambda: value).result["data"] == value


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, {"score": math.nan}, {"score": 1.0, "b": math.inf}]
)
def test_a_reward_that_is_no_number_is_a_failure(value: Any) -> None:
    """Invariant 2: NaN never enters a mean."""
    error = reward(lambda: value).error
    assert error["code"] == "function_failed"
    assert "which is no reward" in error["message"]


def test_a_reward_that_raises_is_a_failure_with_its_traceback() -> None:
    """Invariant 2: a broken grader is not a zero."""
    error = reward(fail).error
    assert error["code"] == "function_failed"
    assert "'score' raised ValueError: boom" in error["message"]
    assert "Traceback" in error["traceback"]


def test_the_default_reward_answers_unless_one_is_named() -> None:
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


def test_functions_answer_with_their_data_and_fail_as_errors() -> None:
    bench = Bench()
    bench.registry.add_function(add)
    bench.registry.add_function(fail)
    params = {"name": "add", "arguments": {"a": 1}}
    assert bench.submit("aenv/function", params).result == {"data": 2}
    assert bench.submit("aenv/function", {"name": "fail"}).error["code"] == "function_failed"
    unknown = bench.submit("aenv/function", {"name": "sub"}).error
    assert (unknown["code"], "add, fail" in unknown["hint"]) == ("tool_not_found", True)


def test_a_function_that_returns_too_much_says_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 12: it is not cut: half a JSON value is none."""
    monkeypatch.setattr("aenv_ray.runtime.answers.RESULT_LIMIT_BYTES", 100)
    bench = Bench()
    bench.registry.add_function(lambda_named("big", lambda: "x" * 200))
    error = bench.submit("aenv/function", {"name": "big"}).error
    assert error["code"] == "function_failed"
    assert "202 bytes, over the limit of 100" in error["message"]


def lambda_named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = name
    return function


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
def test_a_health_check_says_its_status(value: Any, status: str) -> None:
    bench = Bench()
    bench.registry.set_health(lambda: value)
    assert bench.submit("aenv/health", {}).result["data"]["status"] == status


def test_a_health_check_that_raises_is_unhealthy() -> None:
    bench = Bench()
    bench.registry.set_health(fail)
    data = bench.submit("aenv/health", {}).result["data"]
    assert data == {"status": "unhealthy", "message": "ValueError: boom"}


# --- ids, deadlines, cancellation -----------------------------------------------------------------


def test_a_repeated_call_id_runs_nothing_and_gets_the_same_answer() -> None:
    """Invariant 1: no call runs a tool twice."""
    ran: list[int] = []

    def count() -> int:
        ran.append(1)
        return len(ran)

    bench = Bench(count)
    answers = [bench.tool("count", {"aenv/call_id": "same"}).text for _ in range(3)]
    assert answers == ["1", "1", "1"]
    assert bench.tool("count", {"aenv/call_id": "other"}).text == "2"
    assert bench.tool("count").text == "3"


def test_a_refusal_is_remembered_too() -> None:
    bench = Bench(add)
    first = bench.tool("add", {"aenv/call_id": "same"}, a="x").error
    assert bench.tool("add", {"aenv/call_id": "same"}, a=1).error == first


def test_a_repetition_while_the_tool_runs_waits_for_it() -> None:
    """Invariant 1."""
    began, go = threading.Event(), threading.Event()
    ran: list[int] = []

    def wait() -> str:
        ran.append(1)
        began.set()
        go.wait(WAIT_S)
        return "done"

    bench = Bench(wait)
    params = {"name": "wait", "_meta": {"aenv/call_id": "same"}}
    first = bench.in_thread("tools/call", params)
    assert began.wait(WAIT_S)
    second = bench.submit("tools/call", params)
    assert bench.dispatcher.pending == 1
    go.set()
    assert first.text == second.text == "done"
    assert ran == [1]
    assert (first.times, second.times) == (1, 1)


def spin() -> None:
    while True:
        pass


async def sleep_long() -> None:
    await asyncio.sleep(WAIT_S)


@pytest.mark.parametrize("function", [spin, sleep_long])
def test_a_call_is_stopped_at_its_deadline(function: Callable[..., Any]) -> None:
    """Invariant 9, and the error names what it stopped."""
    error = Bench(function).tool(function.__name__, {"aenv/timeout_s": 0.05}).error
    assert error["code"] == "tool_timeout"
    assert f"'{function.__name__}'" in error["message"]


def test_a_tools_own_timeout_bounds_the_callers() -> None:
    bench = Bench()
    bench.registry.add_tool(spin, timeout_s=0.05)
    assert bench.tool("spin", {"aenv/timeout_s": 60}).error["code"] == "tool_timeout"


@pytest.mark.parametrize("timeout_s", [0, -1, "5", True, [1]])
def test_a_timeout_that_is_no_time_is_refused(timeout_s: Any) -> None:
    error = Bench(add).tool("add", {"aenv/timeout_s": timeout_s}, a=1).error
    assert error["code"] == "tool_input_invalid"


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_cancelled_call_ends_and_its_tool_is_told(kind: str) -> None:
    """Invariant 11: cancelling a call cancels it."""
    began, told = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        try:
            while True:
                pass
        finally:
            told.set()

    async def work_async() -> None:
        began.set()
        try:
            await asyncio.sleep(WAIT_S)
        finally:
            told.set()

    bench = Bench()
    bench.registry.add_tool(work if kind == "sync" else work_async, name="work")
    answer = bench.in_thread("tools/call", {"name": "work", "_meta": {"aenv/call_id": "c"}})
    assert began.wait(WAIT_S)
    bench.dispatcher.cancel("c", "the agent gave up")
    assert answer.error["code"] == "call_cancelled"
    assert "'work' was cancelled" in answer.error["message"]
    assert told.wait(WAIT_S)
    assert answer.times == 1


def test_cancelling_what_does_not_run_is_nothing() -> None:
    bench = Bench(add)
    bench.tool("add", {"aenv/call_id": "done"}, a=1).wait()
    assert not bench.dispatcher.cancel("done")
    assert not bench.dispatcher.cancel("never")


def test_all_calls_can_be_cancelled_at_once() -> None:
    began = threading.Barrier(3)

    def work() -> None:
        began.wait(WAIT_S)
        spin()

    bench = Bench(work)
    answers = [bench.in_thread("tools/call", {"name": "work"}) for _ in range(2)]
    began.wait(WAIT_S)
    bench.dispatcher.cancel_all("the instance ends")
    assert [answer.error["code"] for answer in answers] == ["call_cancelled"] * 2
    assert bench.dispatcher.pending == 0


def wait_until_after(moment: float) -> None:
    while time.monotonic() <= moment:
        pass


def test_the_deadline_of_a_call_that_waits_counts_from_its_arrival() -> None:
    """Invariant 9."""
    deadlines: list[float] = []

    def work() -> None:
        deadlines.append(current_call().deadline)

    bench, answer = Bench(work), Answer()
    params = {"name": "work", "_meta": {"aenv/timeout_s": 60}}
    run = bench.dispatcher.accept("tools/call", params, answer)
    arrived_by = time.monotonic()
    assert run is not None
    wait_until_after(arrived_by + 0.01)
    run()
    assert answer.result["isError"] is False
    assert deadlines[0] <= arrived_by + 60.0


@pytest.mark.parametrize("method", ["tools/call", "aenv/call_tools"])
def test_a_call_whose_deadline_passes_while_it_waits_never_runs(method: str) -> None:
    """Invariants 1 and 9: whichever notices first, its turn or the clock."""
    ran: list[int] = []

    def work() -> None:
        ran.append(1)

    bench = Bench(work)
    for _ in range(50):
        answer = Answer()
        params = {"name": "work", "calls": [{"name": "work"}], "_meta": {"aenv/timeout_s": 1e-6}}
        run = bench.dispatcher.accept(method, params, answer)
        assert run is not None
        wait_until_after(time.monotonic() + 1e-6)
        run()
        assert answer.error["code"] == "tool_timeout"
        assert "did not run" in answer.error["message"]
        assert answer.times == 1
    assert ran == []
    assert bench.dispatcher.pending == 0


def test_a_call_that_is_cancelled_while_it_waits_never_runs() -> None:
    """Invariant 11."""
    ran: list[int] = []
    bench, answer = Bench(lambda_named("work", lambda: ran.append(1))), Answer()
    params = {"name": "work", "_meta": {"aenv/call_id": "c"}}
    run = bench.dispatcher.accept("tools/call", params, answer)
    assert run is not None
    assert bench.dispatcher.cancel("c", "the agent gave up")
    run()
    assert answer.error["code"] == "call_cancelled"
    assert ran == []
    assert not bench.dispatcher.cancel("c")


def test_there_is_nothing_to_wait_for_where_the_answer_is_known() -> None:
    bench = Bench(add)
    listing, repeated, refused = Answer(), Answer(), Answer()
    bench.tool("add", {"aenv/call_id": "c"}, a=1).wait()
    meta = {"aenv/call_id": "c"}
    assert bench.dispatcher.accept("tools/list", {}, listing) is None
    assert bench.dispatcher.accept("tools/call", {"name": "add", "_meta": meta}, repeated) is None
    bad = {"name": "add", "_meta": {"aenv/timeout_s": 0}}
    assert bench.dispatcher.accept("tools/call", bad, refused) is None
    assert listing.result["tools"]
    assert repeated.text == "2"
    assert refused.error["code"] == "tool_input_invalid"


def test_progress_reaches_the_caller() -> None:
    heard: list[tuple[float, float | None, str | None]] = []

    def work() -> None:
        current_call().progress(1.0, 2.0, "half")

    bench, answer = Bench(work), Answer()
    params = {"name": "work"}
    bench.dispatcher.submit("tools/call", params, answer, lambda *news: heard.append(news))
    answer.wait()
    assert heard == [(1.0, 2.0, "half")]


# --- batches --------------------------------------------------------------------------------------


def test_a_batch_runs_in_order_and_answers_in_places() -> None:
    order: list[int] = []

    def note(number: int) -> int:
        order.append(number)
        return number

    bench = Bench(note, fail)
    calls = [
        {"name": "note", "arguments": {"number": 1}},
        {"name": "fail"},
        {"name": "nothing"},
        {"name": "note", "arguments": {"number": "x"}},
        {"name": "note", "arguments": {"number": 2}},
    ]
    results = bench.submit("aenv/call_tools", {"calls": calls}).result["results"]
    assert order == [1, 2]
    assert results[0]["result"]["structuredContent"] == {"result": 1}
    assert results[1]["result"]["isError"] is True
    assert results[2]["error"]["data"]["code"] == "tool_not_found"
    assert results[3]["error"]["data"]["code"] == "tool_input_invalid"
    assert results[4]["result"]["structuredContent"] == {"result": 2}


def test_a_parallel_batch_runs_all_at_once_and_keeps_places() -> None:
    together = threading.Barrier(3)

    def meet(number: int) -> int:
        together.wait(WAIT_S)
        return number

    calls = [{"name": "meet", "arguments": {"number": n}} for n in range(3)]
    params = {"calls": calls, "parallel": True}
    results = Bench(meet).submit("aenv/call_tools", params).result["results"]
    assert [r["result"]["structuredContent"]["result"] for r in results] == [0, 1, 2]


def test_a_repeated_batch_runs_nothing() -> None:
    """Invariant 1."""
    ran: list[int] = []

    def count() -> int:
        ran.append(1)
        return len(ran)

    bench = Bench(count)
    params = {"calls": [{"name": "count"}] * 2, "_meta": {"aenv/call_id": "b"}}
    first = bench.submit("aenv/call_tools", params).result
    assert bench.submit("aenv/call_tools", params).result == first
    assert len(ran) == 2


@pytest.mark.parametrize("parallel", [False, True])
def test_a_batch_keeps_what_it_had_at_its_deadline(parallel: bool) -> None:
    """Invariants 9 and 12: what is missing says so."""
    bench = Bench(add, spin)
    calls = [{"name": "add", "arguments": {"a": 1}}, {"name": "spin"}]
    params = {"calls": calls, "parallel": parallel, "_meta": {"aenv/timeout_s": 0.2}}
    first, second = bench.submit("aenv/call_tools", params).result["results"]
    assert first["result"]["structuredContent"] == {"result": 2}
    assert second["error"]["data"]["code"] == "tool_timeout"


@pytest.mark.parametrize("calls", [None, {}, "add", [1], [["add", {}]]])
def test_a_batch_that_is_no_list_of_calls_is_refused(calls: Any) -> None:
    error = Bench(add).submit("aenv/call_tools", {"calls": calls}).error
    assert error["code"] == "tool_input_invalid"


def test_an_empty_batch_is_an_empty_list() -> None:
    assert Bench().submit("aenv/call_tools", {"calls": []}).result == {"results": []}


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
