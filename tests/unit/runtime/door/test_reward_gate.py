"""While a reward runs, no call of the agent does: boundary D19, invariant 14."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.runtime.door import dispatch
from aenv_ray.runtime.door.host import requests
from aenv_ray.runtime.door.host.link import (
    AFTER_TOOLS,
    ENVIRONMENT_METHOD,
    HELD_S,
    OUTER_REWARDS,
    HostLink,
)
from aenv_ray.runtime.door.outcomes import key_of
from aenv_ray.runtime.door.reset.call_gate import CallGate, CallRefused
from tests.unit.runtime.door.dispatch_bench import (
    WAIT_S,
    Answer,
    Bench,
    add,
    add_later,
    show_contexts,
    start_past_the_factory,
)

END, AFTER = "aenv/end_processes", "aenv/after_reward"
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("tools/call", {"name": "add", "arguments": {"a": 1}}),
    ("tools/call", {"name": "add_later", "arguments": {"a": 1}}),
    ("aenv/call_tools", {"calls": [{"name": "add", "arguments": {"a": 1}}]}),
    ("resources/read", {"uri": "note://x"}),
    ("prompts/get", {"name": "ask"}),
    ("aenv/exec", {"arguments": {"command": "true"}}),
    ("aenv/write_file", {"arguments": {"path": "x", "data": ""}}),
]
TOOL = CALLS[0]


class Rewarding(Bench):
    """A bench whose rewards run until they are told to end."""

    def __init__(self, *tools: Callable[..., Any]) -> None:
        super().__init__(*tools, add, add_later)
        self.begun = threading.Semaphore(0)
        self.end = threading.Event()

        def score() -> float:
            self.begun.release()
            assert self.end.wait(WAIT_S)
            return 1.0

        async def score_later() -> float:
            self.begun.release()
            assert await asyncio.to_thread(self.end.wait, WAIT_S)
            return 1.0

        def wrong() -> float:
            raise ValueError

        for reward in (score, score_later, wrong):
            self.registry.add_reward(reward)
        self.registry.add_reward(score, name="keeping", keep_processes=True)
        self.registry.add_function(add)
        self.dispatcher.begin()

    def reward(
        self, name: str = "score", call_id: str = "r", timeout_s: float = WAIT_S, **more: Any
    ) -> Answer:
        meta = {"aenv/call_id": call_id, "aenv/timeout_s": timeout_s, **more}
        return self.in_thread("aenv/reward", {"name": name, "_meta": meta})

    def begin(self, name: str = "score", call_id: str = "r", timeout_s: float = WAIT_S) -> Answer:
        answer = self.reward(name, call_id, timeout_s)
        assert self.begun.acquire(timeout=WAIT_S)
        return answer

    def call(self, method: str, params: dict[str, Any], **meta: Any) -> Answer:
        return self.submit(method, {**params, "_meta": meta})

    @property
    def is_open(self) -> bool:
        answer = self.call(*TOOL).wait()
        return "result" in answer or answer["error"]["data"]["code"] != "call_cancelled"


@pytest.fixture
def bench() -> Iterator[Rewarding]:
    found = Rewarding()
    yield found
    found.end.set()


@pytest.mark.parametrize(("method", "params"), CALLS)
@pytest.mark.parametrize("reward", ["score", "score_later"])
def test_a_call_of_the_agent_is_refused_while_a_reward_runs(
    bench: Rewarding, reward: str, method: str, params: dict[str, Any]
) -> None:
    """The error is that of a cancelled call, not one of the infrastructure."""
    running = bench.begin(reward)
    error = bench.call(method, params).error
    assert error["code"] == "call_cancelled"
    assert "a reward of the instance is under way" in error["message"]
    bench.end.set()
    assert running.result["data"] == 1.0
    assert bench.is_open


def test_a_tool_of_the_outer_instance_may_ask_for_rewards_of_an_inner_one(
    bench: Rewarding,
) -> None:
    """They refuse the calls of the agent, and neither themselves nor each other."""
    answers = [bench.reward(call_id=name, **{OUTER_REWARDS: 0}) for name in ("one", "two")]
    assert bench.begun.acquire(timeout=WAIT_S)
    assert bench.begun.acquire(timeout=WAIT_S)
    assert bench.call(*TOOL, **{OUTER_REWARDS: 0}).error["code"] == "call_cancelled"
    bench.end.set()
    assert [answer.result["data"] for answer in answers] == [1.0, 1.0]
    assert bench.is_open
    bench.call(END, {}, **{OUTER_REWARDS: 1, HELD_S: 60.0}).wait()
    assert bench.reward(call_id="late", **{OUTER_REWARDS: 0}).error["code"] == "call_cancelled"


def test_a_trainers_calls_are_not_refused(bench: Rewarding) -> None:
    bench.begin()
    function = {"name": "add", "arguments": {"a": 1}}
    assert bench.call("aenv/function", function).result["data"] == 2
    assert "result" in bench.call("aenv/health", {}).wait()
    assert "result" in bench.call("tools/list", {}).wait()


def test_a_reward_that_keeps_processes_lets_tools_run(bench: Rewarding) -> None:
    bench.begin("keeping")
    assert bench.is_open


def test_the_id_of_a_refused_call_may_be_used_later(bench: Rewarding) -> None:
    """Invariant 1: it never ran, so a caller that repeats it after the reward gets its result."""
    meta = {"aenv/call_id": "again"}
    running = bench.begin()
    for _ in range(2):
        assert bench.call(*TOOL, **meta).error["code"] == "call_cancelled"
    bench.end.set()
    assert running.result["data"] == 1.0
    assert bench.call(*TOOL, **meta).text == "2"
    assert bench.call(*TOOL, **meta).text == "2"


# --- the gate opens again -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params", [{"name": "wrong"}, {"name": "score", "arguments": {"no": 1}}, {"name": "none"}]
)
def test_a_reward_that_fails_lets_tools_run_again(bench: Rewarding, params: dict[str, Any]) -> None:
    assert "error" in bench.submit("aenv/reward", params).wait()
    assert bench.is_open


@pytest.mark.parametrize("reward", ["score", "score_later"])
def test_tools_run_again_once_a_reward_is_cancelled(bench: Rewarding, reward: str) -> None:
    """Also while its function does not end."""
    running = bench.begin(reward)
    assert not bench.is_open
    bench.dispatcher.cancel(key_of("aenv/reward", "r"))
    assert running.error["code"] == "call_cancelled"
    assert bench.is_open


@pytest.mark.parametrize("reward", ["score", "score_later"])
def test_tools_run_again_once_a_reward_has_timed_out(bench: Rewarding, reward: str) -> None:
    running = bench.begin(reward, timeout_s=0.3)
    assert running.error["code"] == "tool_timeout"
    assert bench.is_open


def test_tools_run_again_after_a_reward_whose_time_passed_while_it_waited(
    bench: Rewarding,
) -> None:
    """Its outcome comes before the gate is closed for it, which nothing would open."""
    run = bench.dispatcher.accept(
        "aenv/reward", {"name": "score", "_meta": {"aenv/call_id": "r"}}, answer := Answer()
    )
    assert run is not None
    begin_reward = bench.dispatcher._gate.begin_reward

    def late(key: str) -> int:
        bench.dispatcher._outcomes.finish(key, b'"error":{"data":{"code":"tool_timeout"}}')
        return begin_reward(key)

    bench.dispatcher._gate.begin_reward = late  # type: ignore[method-assign]
    run()
    assert answer.error["code"] == "tool_timeout"
    assert bench.is_open


def test_what_could_not_be_ended_lets_tools_run_again(
    bench: Rewarding, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(dispatch, "end_processes_elsewhere", fail)
    assert "OSError" in bench.reward().error["message"]
    assert bench.is_open
    monkeypatch.undo()
    running = bench.begin(call_id="r2")
    bench.end.set()
    assert running.result["data"] == 1.0


# --- rewards at once ------------------------------------------------------------------------------


def test_a_reward_that_is_called_twice_with_one_id_runs_once(bench: Rewarding) -> None:
    first = bench.begin()
    second = bench.reward()
    assert not bench.is_open
    bench.end.set()
    assert (first.result, second.result) == ({"data": 1.0}, {"data": 1.0})
    assert not bench.begun.acquire(blocking=False)
    assert bench.is_open
    assert bench.reward().result == {"data": 1.0}
    assert bench.is_open


def test_tools_run_again_after_the_last_of_several_rewards(
    bench: Rewarding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first ends processes: the agent has started nothing since, and others have."""
    ended: list[int] = []
    monkeypatch.setattr(
        dispatch, "end_processes_elsewhere", lambda _, __, rewards, ___: ended.append(rewards)
    )
    first, second = bench.begin(call_id="1"), bench.begin("score_later", call_id="2")
    assert ended == [1]
    bench.dispatcher.cancel(key_of("aenv/reward", "1"))
    assert first.error["code"] == "call_cancelled"
    assert not bench.is_open
    bench.end.set()
    assert second.result["data"] == 1.0
    assert bench.is_open
    assert bench.begin(call_id="3").result["data"] == 1.0
    assert ended == [1, 2]


# --- what runs when a reward begins ---------------------------------------------------------------


def test_a_batch_runs_none_of_its_later_calls_beside_a_reward() -> None:
    begun, go, ran = threading.Event(), threading.Event(), []

    def slow() -> None:
        begun.set()
        assert go.wait(WAIT_S)

    def note() -> None:
        ran.append("note")

    bench = Rewarding(slow, note)
    batch = bench.in_thread("aenv/call_tools", {"calls": [{"name": "slow"}, {"name": "note"}]})
    assert begun.wait(WAIT_S)
    running = bench.reward()
    assert batch.error["code"] == "call_cancelled"
    go.set()
    assert bench.begun.acquire(timeout=WAIT_S)
    bench.end.set()
    assert running.result["data"] == 1.0
    assert ran == []


def test_items_of_a_batch_that_begins_as_the_reward_does_are_refused(bench: Rewarding) -> None:
    """It was admitted before, and was not known yet when the reward cancelled all calls."""
    admit = bench.dispatcher._gate.admit
    running: list[Answer] = []

    def slow(name: str, meta: Any, **options: bool) -> int:
        generation = admit(name, meta, **options)
        running.append(bench.begin())
        return generation

    bench.dispatcher._gate.admit = slow  # type: ignore[method-assign]
    (item,) = bench.call(*CALLS[2]).result["results"]
    assert item["error"]["data"]["code"] == "call_cancelled"


@pytest.mark.parametrize("number", [0, 1])
def test_a_call_that_begins_as_the_reward_does_is_refused(bench: Rewarding, number: int) -> None:
    admit = bench.dispatcher._gate.admit

    def slow(name: str, meta: Any, **options: bool) -> int:
        generation = admit(name, meta, **options)
        bench.begin()
        return generation

    bench.dispatcher._gate.admit = slow  # type: ignore[method-assign]
    assert bench.call(*CALLS[number]).error["code"] == "call_cancelled"


def test_a_reward_waits_until_cancelled_calls_have_left() -> None:
    begun, left, order = threading.Event(), threading.Event(), []

    async def tidy() -> None:
        begun.set()
        try:
            await asyncio.sleep(WAIT_S)
        finally:
            await asyncio.sleep(0.05)
            order.append("tool")
            left.set()

    def graded() -> float:
        order.append("reward")
        return 1.0

    bench = Rewarding(tidy)
    bench.registry.add_reward(graded)
    bench.in_thread("tools/call", {"name": "tidy"})
    assert begun.wait(WAIT_S)
    assert bench.reward("graded").result["data"] == 1.0
    assert left.wait(WAIT_S)
    assert order == ["tool", "reward"]


@pytest.mark.parametrize("start", [asyncio.create_task, start_past_the_factory])
def test_tasks_that_a_tool_has_started_end_before_a_reward(
    monkeypatch: pytest.MonkeyPatch, start: Callable[..., asyncio.Task[None]]
) -> None:
    """Those that a function has started go on, as its processes do."""
    if start is start_past_the_factory:
        show_contexts(monkeypatch)
    ticks = {"tool": 0, "function": 0}
    tasks: set[asyncio.Task[None]] = set()

    over = threading.Event()

    async def tick(who: str) -> None:
        while not over.is_set():
            ticks[who] += 1
            await asyncio.sleep(0.001)

    async def nested(who: str) -> None:
        tasks.add(start(tick(who)))

    async def leave(who: str) -> None:
        await start(nested(who))

    async def counted() -> list[int]:
        before = dict(ticks)
        await asyncio.sleep(0.1)
        return [ticks[who] - before[who] for who in ("tool", "function")]

    bench = Rewarding(leave)
    bench.registry.add_function(leave)
    bench.registry.add_reward(counted)
    bench.call("aenv/function", {"name": "leave", "arguments": {"who": "function"}}).wait()
    bench.tool("leave", who="tool").wait()
    by_tool, by_function = bench.reward("counted").result["data"]
    over.set()
    assert by_tool == 0
    assert by_function > 0


def test_a_call_that_takes_long_to_end_is_cancelled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its task has the context of a call too, but no call has started it."""
    show_contexts(monkeypatch)
    monkeypatch.setattr(dispatch, "_LEAVE_S", 0.05)
    begun, over, cancelled = threading.Event(), threading.Event(), []

    async def tidy() -> None:
        begun.set()
        while not over.is_set():
            try:
                await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                cancelled.append(1)

    bench = Rewarding(tidy)
    bench.tool("tidy")
    assert begun.wait(WAIT_S)
    bench.end.set()
    assert bench.reward().result["data"] == 1.0
    over.set()
    assert cancelled == [1]


def test_a_task_that_does_not_end_does_not_keep_a_reward_from_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "_LEAVE_S", 0.05)
    tasks: set[asyncio.Task[None]] = set()

    over = threading.Event()

    async def stay() -> None:
        while not over.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    async def leave() -> None:
        tasks.add(asyncio.create_task(stay()))

    bench = Rewarding(leave)
    bench.tool("leave").wait()
    bench.end.set()
    assert bench.reward().result["data"] == 1.0
    over.set()


def test_timers_that_a_tool_has_left_start_no_tasks_beside_a_reward() -> None:
    """They do so before it and after it, and those of a function all the time."""
    ran: list[str] = []
    tasks: list[asyncio.Task[None]] = []
    again, over = threading.Event(), threading.Event()

    async def note(who: str) -> None:
        ran.append(who)
        if who == "tool":
            again.set()

    async def leave(who: str) -> None:
        def tick() -> None:
            tasks.append(asyncio.get_running_loop().create_task(note(who)))
            if not over.is_set():
                asyncio.get_running_loop().call_later(0.001, tick)

        tick()

    def counted() -> list[int]:
        ran.clear()
        threading.Event().wait(0.1)
        found = [ran.count("tool"), ran.count("function")]
        again.clear()
        return found

    bench = Rewarding(leave)
    bench.registry.add_function(leave)
    bench.registry.add_reward(counted)
    bench.call("aenv/function", {"name": "leave", "arguments": {"who": "function"}}).wait()
    bench.tool("leave", who="tool").wait()
    assert again.wait(WAIT_S)
    by_tool, by_function = bench.reward("counted").result["data"]
    assert again.wait(WAIT_S)
    over.set()
    assert by_tool == 0
    assert by_function > 0


@pytest.mark.parametrize("starts", ["timer", "task"])
def test_what_starts_while_tasks_are_ended_does_not_act_beside_a_reward(
    monkeypatch: pytest.MonkeyPatch, starts: str
) -> None:
    """One task does not end, so that this takes all the time that a reward waits."""
    monkeypatch.setattr(dispatch, "_LEAVE_S", 0.2)
    steps: list[int] = []
    tasks: list[asyncio.Task[None]] = []
    over = threading.Event()

    async def go_on() -> None:
        while not over.is_set():
            steps.append(1)
            await asyncio.sleep(0.001)

    async def stay() -> None:
        while not over.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                if starts == "task":
                    tasks.append(asyncio.create_task(go_on()))

    def tick() -> None:
        loop = asyncio.get_running_loop()
        tasks.append(loop.create_task(go_on()))
        if not over.is_set():
            loop.call_later(0.001, tick)

    async def leave() -> None:
        tasks.append(asyncio.create_task(stay()))
        if starts == "timer":
            tick()

    def counted() -> int:
        steps.clear()
        threading.Event().wait(0.1)
        return len(steps)

    bench = Rewarding(leave)
    bench.registry.add_reward(counted)
    bench.tool("leave").wait()
    found = bench.reward("counted").result["data"]
    over.set()
    assert found == 0


def test_a_task_that_is_ended_may_start_others_to_clean_up() -> None:
    cleaned, begun = threading.Event(), threading.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def clean() -> None:
        await asyncio.sleep(0)
        cleaned.set()

    async def hold() -> None:
        begun.set()
        try:
            await asyncio.sleep(WAIT_S)
        finally:
            await asyncio.gather(clean())

    async def leave() -> None:
        tasks.add(asyncio.create_task(hold()))

    bench = Rewarding(leave)
    bench.registry.add_reward(cleaned.is_set, name="is_clean")
    bench.tool("leave").wait()
    assert begun.wait(WAIT_S)
    assert bench.reward("is_clean").result["data"] == 1.0


def test_a_reward_ends_a_task_that_the_loop_is_about_to_add() -> None:
    """It has been admitted before the reward, and no other task is known."""
    ran: list[int] = []
    tasks: list[asyncio.Task[None]] = []
    adds, over = threading.Event(), threading.Event()

    class Tasks(weakref.WeakSet["asyncio.Task[None]"]):
        def add(self, item: asyncio.Task[None]) -> None:
            adds.set()
            while not bench.dispatcher._tasks._ended_before:
                over.wait(0.001)
            over.wait(0.05)
            super().add(item)

    async def act() -> None:
        while not over.is_set():
            ran.append(1)
            await asyncio.sleep(0.001)

    async def leave() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, lambda: tasks.append(loop.create_task(act())))

    def counted() -> int:
        ran.clear()
        over.wait(0.1)
        return len(ran)

    bench = Rewarding(leave)
    bench.registry.add_reward(counted)
    bench.dispatcher._tasks._tasks = Tasks()
    bench.tool("leave").wait()
    assert adds.wait(WAIT_S)
    found = bench.reward("counted").result["data"]
    over.set()
    assert found == 0


def test_a_reward_does_not_wait_for_a_loop_that_has_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An agent has used up the threads of the sandbox as the first async tool was called."""
    started = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "aenv-loop":
            raise RuntimeError("can't start new thread")
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    bench = Rewarding()
    assert "new thread" in bench.call(*CALLS[1]).wait()["error"]["message"]
    bench.end.set()
    assert bench.reward().result["data"] == 1.0


def test_only_the_loop_looks_through_its_tasks() -> None:
    """It may add one at any moment, which would fail a reward that looks through them."""
    threads: set[str] = set()
    tasks: set[asyncio.Task[None]] = set()

    class Tasks(weakref.WeakSet["asyncio.Task[None]"]):
        def __iter__(self) -> Iterator[asyncio.Task[None]]:
            threads.add(threading.current_thread().name)
            return super().__iter__()

    async def leave() -> None:
        tasks.add(asyncio.create_task(asyncio.sleep(WAIT_S)))

    bench = Rewarding(leave)
    bench.dispatcher._tasks._tasks = Tasks()
    bench.tool("leave").wait()
    bench.end.set()
    assert bench.reward().result["data"] == 1.0
    assert threads == {"aenv-loop"}


@pytest.mark.parametrize("by_outer_tool", [False, True])
def test_inner_instances_are_told_of_a_reward_without_namespaces_too(
    bench: Rewarding, monkeypatch: pytest.MonkeyPatch, by_outer_tool: bool
) -> None:
    """They may be isolated, although this instance is not, and end no processes here."""
    link, asked = HostLink(), []

    class Host:
        def send(self, line: bytes) -> None:
            request = json.loads(line)
            asked.append(request["params"].get("method"))
            link.on_answer({"id": request["id"], "result": {}})

    for module in (dispatch, requests):
        monkeypatch.setattr(module, "HOST", link)
    link.attach(Host())
    link.ask("1", ENVIRONMENT_METHOD, {}, lambda _: None)
    if by_outer_tool:
        bench.call("aenv/function", {"name": "add", "arguments": {"a": 1}}, **{OUTER_REWARDS: 0})
    else:
        bench.call(*TOOL)
    running = bench.begin()
    assert asked == [None, END]
    bench.end.set()
    assert running.result["data"] == 1.0
    assert asked == [None, END, AFTER]


@pytest.mark.parametrize("is_outer", [False, True], ids=["own", "outer"])
def test_a_call_that_is_checked_as_the_gate_closes_does_not_pass(is_outer: bool) -> None:
    """Threads may switch at any moment, and the check takes no lock."""
    admitted: list[int] = []

    class Gate(CallGate):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name in ("generation", "_outer_rewards", "_held_until") and "was_used" in vars(self):
                with contextlib.suppress(CallRefused):
                    admitted.append(self.admit("t", {OUTER_REWARDS: 0} if is_outer else {}))

    gate = Gate()
    gate.refusal = ""
    gate.hold(1, 60.0) if is_outer else gate.begin_reward("r")
    assert gate.generation == 1
    assert 1 not in admitted, "such a call would run beside the reward"


def test_inner_instances_stay_closed_for_a_reward_that_begins_as_another_ends(
    bench: Rewarding, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(dispatch, "tell_of_end", told.append)
    gate = bench.dispatcher._gate
    end_reward = gate.end_reward

    def late(key: str) -> int | None:
        ended = end_reward(key)
        gate.begin_reward("next")
        return ended

    gate.end_reward = late  # type: ignore[method-assign]
    bench.end.set()
    assert bench.begin().result["data"] == 1.0
    assert told == [1]
    assert gate.generation == 2


def test_inner_instances_stay_closed_until_neither_reward_runs(
    bench: Rewarding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of this instance, and one of the outer instance."""
    told: list[int] = []
    monkeypatch.setattr(dispatch, "tell_of_end", told.append)
    bench.call(END, {}, **{OUTER_REWARDS: 1, HELD_S: 60.0}).wait()
    running = bench.begin()
    assert bench.call(AFTER, {}, **{OUTER_REWARDS: 1}).result == {"data": {}}
    assert told == []
    bench.end.set()
    assert running.result["data"] == 1.0
    assert told == [2]


# --- for a reward of the outer instance -----------------------------------------------------------


def test_a_sidecar_runs_no_late_request_of_a_tool(bench: Rewarding, tmp_path: Path) -> None:
    """A tool has sent it before the reward, whose own requests run."""
    arguments = {"path": str(tmp_path / "file"), "data": ""}

    def ask(rewards: int) -> Answer:
        meta = {AFTER_TOOLS: True, OUTER_REWARDS: rewards}
        return bench.call("aenv/write_file", {"arguments": arguments}, **meta)

    assert "result" in ask(0).wait()
    assert bench.call(END, {}, **{OUTER_REWARDS: 1, HELD_S: 60.0}).result == {"data": {}}
    assert ask(0).error["code"] == "call_cancelled"
    for rewards in (-1, 1):  # of the reward itself, and of a tool after it
        assert "result" in ask(rewards).wait()


def test_an_inner_instance_refuses_others_while_the_outer_reward_runs(bench: Rewarding) -> None:
    assert bench.call(END, {}, **{OUTER_REWARDS: 2, HELD_S: 60.0}).result == {"data": {}}
    assert bench.call(*TOOL).error["code"] == "call_cancelled"
    assert bench.call(*TOOL, **{OUTER_REWARDS: 1}).error["code"] == "call_cancelled"
    assert bench.call(*TOOL, **{OUTER_REWARDS: -1}).text == "2"
    bench.call(AFTER, {}, **{OUTER_REWARDS: 1}).wait()  # of an earlier reward
    assert not bench.is_open
    bench.call(AFTER, {}, **{OUTER_REWARDS: 2}).wait()
    assert bench.is_open
    assert bench.call(*TOOL, **{OUTER_REWARDS: 1}).error["code"] == "call_cancelled"


def test_an_inner_instance_is_open_again_after_the_time_of_the_outer_reward(
    bench: Rewarding,
) -> None:
    """Whoever should have told it that the reward has ended may be gone."""
    bench.call(END, {}, **{OUTER_REWARDS: 1, HELD_S: 0.05}).wait()
    assert not bench.is_open
    threading.Event().wait(0.06)
    assert bench.is_open
