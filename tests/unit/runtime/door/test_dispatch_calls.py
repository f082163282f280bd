"""The dispatcher: repetition, deadlines, cancellation, progress and batches."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from aenv_ray.runtime.door import dispatch
from aenv_ray.runtime.door.calls import current_call
from aenv_ray.runtime.door.host.requests import Stoppable
from tests.unit.runtime.door.dispatch_bench import (
    WAIT_S,
    Answer,
    Bench,
    add,
    fail,
    lambda_named,
    spin,
)

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


def test_a_refusal_is_stored_too() -> None:
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
    assert bench.submit("aenv/pending", {}).result == {"calls": 1}
    go.set()
    assert first.text == second.text == "done"
    assert ran == [1]
    assert (first.times, second.times) == (1, 1)
    assert bench.submit("aenv/pending", {}).result == {"calls": 0}


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
def test_a_timeout_that_is_not_a_positive_number_is_refused(timeout_s: Any) -> None:
    error = Bench(add).tool("add", {"aenv/timeout_s": timeout_s}, a=1).error
    assert error["code"] == "tool_input_invalid"


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_cancelled_call_ends_and_its_tool_is_stopped(kind: str) -> None:
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
    bench.dispatcher.cancel("tools/call c", "the agent gave up")
    assert answer.error["code"] == "call_cancelled"
    assert "'work' was cancelled" in answer.error["message"]
    assert told.wait(WAIT_S)
    assert answer.times == 1


def test_cancelling_an_unknown_call_does_nothing() -> None:
    bench = Bench(add)
    bench.tool("add", {"aenv/call_id": "done"}, a=1).wait()
    assert not bench.dispatcher.cancel("tools/call done")
    assert not bench.dispatcher.cancel("tools/call never")


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
    assert bench.dispatcher.cancel("tools/call c", "the agent gave up")
    run()
    assert answer.error["code"] == "call_cancelled"
    assert ran == []
    assert not bench.dispatcher.cancel("tools/call c")


def test_a_known_answer_needs_no_thread() -> None:
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


def test_a_batch_runs_in_order_and_keeps_the_order_of_results() -> None:
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


def test_a_parallel_batch_runs_all_at_once_and_keeps_the_order_of_results() -> None:
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


def test_a_batch_returns_the_results_so_far_at_its_deadline() -> None:
    """Invariants 9 and 12: what is missing says so."""
    calls = [{"name": "add", "arguments": {"a": 1}}, {"name": "spin"}]
    answers = []
    for parallel in (False, True):  # both at once: the deadline must leave time for what is kept
        params = {"calls": calls, "parallel": parallel, "_meta": {"aenv/timeout_s": 1.0}}
        answers.append(Bench(add, spin).in_thread("aenv/call_tools", params))
    for answer in answers:
        first, second = answer.result["results"]
        assert first["result"]["structuredContent"] == {"result": 2}
        assert second["error"]["data"]["code"] == "tool_timeout"


@pytest.mark.parametrize("calls", [None, {}, "add", [1], [["add", {}]]])
def test_a_batch_that_is_not_a_list_of_calls_is_refused(calls: Any) -> None:
    error = Bench(add).submit("aenv/call_tools", {"calls": calls}).error
    assert error["code"] == "tool_input_invalid"


def test_an_empty_batch_is_an_empty_list() -> None:
    assert Bench().submit("aenv/call_tools", {"calls": []}).result == {"results": []}


# --- a sandbox without processes ------------------------------------------------------------------


def test_a_parallel_batch_runs_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An agent holds all processes of its sandbox: what is left runs one after another."""
    started = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if "_run_item" in thread.name:
            raise RuntimeError("can't start new thread")
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    calls = [{"name": "add", "arguments": {"a": n}} for n in range(3)]
    answer = Bench(add).in_thread("aenv/call_tools", {"calls": calls, "parallel": True})
    results = [item["result"]["structuredContent"]["result"] for item in answer.result["results"]]
    assert results == [1, 2, 3]


def test_an_async_function_runs_once_a_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It must not wait for an event loop that has no thread."""

    async def word() -> str:
        return "fine"

    started, problems = threading.Thread.start, [RuntimeError("can't start new thread")]

    def start(thread: threading.Thread) -> None:
        if thread.name == "aenv-loop" and problems:
            raise problems.pop()
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    bench = Bench(word)
    assert "new thread" in bench.tool("word").wait()["error"]["message"]
    assert bench.tool("word").text == "fine"


@pytest.mark.parametrize("keeps", [False, True])
def test_ending_the_agents_processes_takes_from_the_time_of_the_reward(
    monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    """Invariant 9: a caller does not wait for a reward for longer than it said."""
    waited: list[float] = []

    def end(within_s: float, call: Stoppable, rewards: int, held_s: float) -> None:
        del call, rewards, held_s
        waited.append(within_s)
        threading.Event().wait(0.1)

    monkeypatch.setattr(dispatch, "end_processes_elsewhere", end)

    def left() -> float:
        return current_call().remaining_s

    bench = Bench()
    bench.registry.add_reward(left, keep_processes=keeps)
    bench.dispatcher.begin(owns_sandbox=True)
    graded = bench.submit("aenv/reward", {"name": "left", "_meta": {"aenv/timeout_s": 20.0}})
    most = 20.0 if keeps else 19.9
    assert 10.0 < graded.result["data"] <= most
    assert [round(one) for one in waited] == ([] if keeps else [20])
