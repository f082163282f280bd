"""Tests of the engine contract: calls and their results."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from aenv_ray.engines.base import Sandbox
from aenv_ray.errors import (
    AenvError,
    CallOutcomeUnknown,
    ConfigError,
    FunctionFailed,
    ToolInputInvalid,
    ToolNotFound,
    ToolTimeout,
)
from aenv_ray.models import ToolResult
from aenv_ray.testing.contract_bench import (
    call,
    evaluate,
    eventually,
    execute,
    is_gone,
    request,
    runs,
    sleeper,
    unique,
    value_of,
)


async def _exists(sandbox: Sandbox, path: str) -> bool:
    return (await execute(sandbox, ["test", "-e", path])).exit_code == 0


_LIMIT_BYTES = 10 * 1024 * 1024
"""Size limit of a result."""


class CallTests:
    """Calling tools, rewards and functions."""

    # --- what there is to call --------------------------------------------------------------

    async def test_a_tool_may_import_when_it_is_called(self, shared: Sandbox) -> None:
        assert await value_of(shared, "import_late") == "hello from parts"

    async def test_listings_name_what_the_environment_registers(self, shared: Sandbox) -> None:
        tools = {tool["name"]: tool for tool in await request(shared, "tools/list", {})}
        assert tools["echo"]["inputSchema"]["required"] == ["text"]
        assert "score" not in tools
        functions = await request(shared, "aenv/functions", {})
        assert {f["name"] for f in functions["reward"]} == {"score", "bad_score"}
        assert await request(shared, "aenv/health", {}) == {"status": "healthy"}

    # --- once (invariant 1) -----------------------------------------------------------------------

    async def test_a_repeated_call_id_gets_the_first_outcome_and_runs_nothing(
        self, shared: Sandbox
    ) -> None:
        """Invariant 1."""
        key, one = unique("k"), unique("one")
        results = [await call(shared, "count", {"key": key}, call_id=one) for _ in range(3)]
        assert [result.data for result in results] == [1, 1, 1]
        assert await value_of(shared, "count", key=key) == 2

    async def test_a_repeat_of_a_call_under_way_waits_for_it(self, shared: Sandbox) -> None:
        """Invariant 1."""
        key, same = unique("k"), unique("same")
        arguments = {"key": key, "seconds": 0.2}
        async with asyncio.TaskGroup() as group:
            calls = [
                group.create_task(call(shared, "count", arguments, call_id=same)) for _ in range(20)
            ]
        assert {task.result().data for task in calls} == {1}
        assert await value_of(shared, "count", key=key) == 2

    async def test_a_repeated_failure_is_the_same_failure(self, shared: Sandbox) -> None:
        """Invariant 1."""
        messages, slow = set(), unique("slow")
        for _ in range(2):
            with pytest.raises(ToolTimeout) as raised:
                await call(shared, "nap", {"seconds": 60.0}, call_id=slow, timeout_s=0.2)
            messages.add(raised.value.message)
        assert len(messages) == 1

    async def test_a_caller_that_waited_too_briefly_asks_again_with_the_same_id(
        self, shared: Sandbox
    ) -> None:
        """Invariants 1 and 9: the wait ends, the call does not, and nothing runs twice."""
        arguments, slow = {"key": unique("k"), "seconds": 1.5}, unique("slow")
        with pytest.raises(CallOutcomeUnknown, match="tools/call"):
            await call(shared, "count", arguments, call_id=slow, deadline_s=0.2)
        assert (await call(shared, "count", arguments, call_id=slow)).data == 1

    # --- failures of the tool's own -----------------------------------------------------------

    async def test_a_tool_that_raises_is_a_result(self, shared: Sandbox) -> None:
        result = await call(shared, "broken", {"text": "on purpose"})
        assert result.is_error
        assert result.text() == "ValueError: on purpose"
        assert (await call(shared, "quit_politely")).is_error
        assert await value_of(shared, "echo", text="still here") == "still here"

    async def test_what_does_not_exist_is_refused_with_what_does(self, shared: Sandbox) -> None:
        with pytest.raises(ToolNotFound, match="'no_such_tool'") as raised:
            await call(shared, "no_such_tool")
        assert "echo" in str(raised.value.hint)
        assert raised.value.tool_name == "no_such_tool"
        for method in ("aenv/function", "aenv/reward"):
            with pytest.raises(ToolNotFound):
                await request(shared, method, {"name": "no_such"})
        with pytest.raises(ConfigError):
            await request(shared, "aenv/no_such_method", {})

    @pytest.mark.parametrize(
        "arguments",
        [{}, {"text": 3}, {"text": "x", "times": "many"}, {"text": "x", "more": 1}, ["x"]],
        ids=["missing", "wrong type", "unconvertible", "unknown", "no object"],
    )
    async def test_arguments_that_do_not_fit_are_refused(
        self, shared: Sandbox, arguments: Any
    ) -> None:
        with pytest.raises(ToolInputInvalid, match="echo"):
            await call(shared, "echo", arguments)

    @pytest.mark.parametrize("reports", [False, True], ids=["alone", "with progress"])
    async def test_arguments_that_cannot_be_read_fail_their_own_call_alone(
        self, shared: Sandbox, reports: bool
    ) -> None:
        """What an agent sends must not end its sandbox: that would void the episode."""
        deep: list[Any] = []
        for _ in range(220):  # more than a reader takes, and less than a writer refuses
            deep = [deep]
        on_progress = (lambda *_: None) if reports else None
        with pytest.raises(ToolInputInvalid, match="cannot be read"):
            await call(shared, "echo", {"text": deep}, on_progress=on_progress)
        assert await value_of(shared, "echo", text="still here") == "still here"

    async def test_the_agents_door_does_not_reach_rewards(self, shared: Sandbox) -> None:
        """Invariant 8."""
        for name in ("score", "reset", "aenv/exec"):
            with pytest.raises(ToolNotFound):
                await call(shared, name)

    async def test_rewards_and_functions_give_data_or_a_typed_failure(
        self, shared: Sandbox
    ) -> None:
        """Invariant 2."""
        reward = {"name": None, "arguments": {"answer": "42"}}
        assert await request(shared, "aenv/reward", reward) == {"score": 1.0}
        reset = {"name": "reset", "arguments": {"seed": 7}}
        assert await request(shared, "aenv/function", reset) == {"seed": 7}
        with pytest.raises(FunctionFailed, match="it broke as well"):
            await request(shared, "aenv/function", {"name": "broken_function"})
        with pytest.raises(FunctionFailed, match="nan"):
            await request(shared, "aenv/reward", {"name": "bad_score"})

    async def test_health_says_what_the_environment_says(self, shared: Sandbox) -> None:
        sick = {"name": "set_health", "arguments": {"status": "sick"}}
        await request(shared, "aenv/function", sick)
        assert (await request(shared, "aenv/health", {}))["status"] == "sick"
        well = {"name": "set_health", "arguments": {"status": "healthy"}}
        await request(shared, "aenv/function", well)
        assert await request(shared, "aenv/health", {}) == {"status": "healthy"}

    # --- stopping (invariants 9 and 11) -------------------------------------------------------

    @pytest.mark.parametrize("tool", ["until_stopped", "auntil_stopped"])
    async def test_a_timeout_stops_the_tool(self, shared: Sandbox, tool: str) -> None:
        """Invariant 9."""
        mark = unique("mark")
        with pytest.raises(ToolTimeout, match=tool):
            await call(shared, tool, {"marker": mark}, timeout_s=0.2)
        assert await _exists(shared, f"{mark}.began")
        await eventually(lambda: _exists(shared, f"{mark}.stopped"), "the tool was interrupted")

    @pytest.mark.parametrize("tool", ["until_stopped", "auntil_stopped"])
    async def test_cancelling_stops_the_tool(self, shared: Sandbox, tool: str) -> None:
        """Invariant 11."""
        mark = unique("mark")
        task = asyncio.create_task(call(shared, tool, {"marker": mark}))
        await eventually(lambda: _exists(shared, f"{mark}.began"), "the tool runs")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: _exists(shared, f"{mark}.stopped"), "the tool was interrupted")

    async def test_a_timeout_kills_the_program_that_the_tool_waits_for(
        self, shared: Sandbox
    ) -> None:
        """Invariant 3."""
        command = sleeper()
        with pytest.raises(ToolTimeout):
            await call(shared, "run", {"command": command}, timeout_s=0.3)
        await eventually(lambda: is_gone(shared, command[1]), "sleep is dead")

    async def test_cancelling_kills_the_program_that_the_tool_waits_for(
        self, shared: Sandbox
    ) -> None:
        """Invariant 11."""
        command = sleeper()
        task = asyncio.create_task(call(shared, "run", {"command": command}))
        await eventually(lambda: runs(shared, command[1]), "sleep runs")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: is_gone(shared, command[1]), "sleep is dead")

    async def test_a_program_of_an_earlier_call_survives_the_timeout_of_a_later_one(
        self, shared: Sandbox
    ) -> None:
        """A persistent shell is state of the environment."""
        command = sleeper()
        pid = await value_of(shared, "spawn", command=command)
        with pytest.raises(ToolTimeout):
            await call(shared, "nap", {"seconds": 60.0}, timeout_s=0.2)
        assert await runs(shared, command[1])
        await evaluate(shared, f"import os; os.kill({pid}, 9)")

    # --- many ---------------------------------------------------------------------------------

    @pytest.mark.parametrize("tool", ["echo", "aecho"])
    async def test_a_thousand_concurrent_calls_get_their_own_answers(
        self, shared: Sandbox, tool: str
    ) -> None:
        async with asyncio.TaskGroup() as group:
            calls = [
                group.create_task(call(shared, tool, {"text": str(index)})) for index in range(1000)
            ]
        assert [task.result().data for task in calls] == [str(index) for index in range(1000)]

    async def test_calls_run_at_the_same_time(self, shared: Sandbox) -> None:
        key = unique("k")
        async with asyncio.TaskGroup() as group:
            for _ in range(16):
                group.create_task(value_of(shared, "meet", key=key, parties=16))

    async def test_a_slow_call_does_not_hold_up_a_quick_one(self, shared: Sandbox) -> None:
        mark = unique("slow")
        slow = asyncio.create_task(call(shared, "until_stopped", {"marker": mark}))
        await eventually(lambda: _exists(shared, f"{mark}.began"), "the slow one runs")
        for _ in range(50):
            await value_of(shared, "echo", text="quick")
        assert not slow.done()
        slow.cancel()
        await asyncio.wait([slow])

    async def test_a_batch_keeps_its_order_and_survives_its_failures(self, shared: Sandbox) -> None:
        key, batch = unique("k"), unique("batch")
        calls = [
            {"name": "count", "arguments": {"key": key}},
            {"name": "broken", "arguments": {}},
            {"name": "no_such_tool", "arguments": {}},
            {"name": "count", "arguments": {"key": key}},
        ]
        for _ in range(2):
            first, raised, refused, last = await request(
                shared, "aenv/call_tools", {"calls": calls}, call_id=batch
            )
            assert isinstance(first, ToolResult)
            assert isinstance(last, ToolResult)
            assert (first.data, last.data) == (1, 2)
            assert raised.is_error
            assert isinstance(refused, ToolNotFound)

    async def test_a_parallel_batch_runs_its_calls_at_the_same_time(self, shared: Sandbox) -> None:
        calls = [{"name": "meet", "arguments": {"key": unique("b"), "parties": 4}}] * 4
        results = await request(shared, "aenv/call_tools", {"calls": calls, "parallel": True})
        assert [result.data for result in results] == [4, 4, 4, 4]

    async def test_a_batch_out_of_time_keeps_what_it_has(self, shared: Sandbox) -> None:
        calls = [
            {"name": "echo", "arguments": {"text": "done"}},
            {"name": "nap", "arguments": {"seconds": 60.0}},
            {"name": "echo", "arguments": {"text": "never"}},
        ]
        first, *rest = await request(shared, "aenv/call_tools", {"calls": calls}, timeout_s=0.3)
        assert first.data == "done"
        assert all(isinstance(item, ToolTimeout) for item in rest)

    # --- progress -----------------------------------------------------------------------------

    async def test_progress_reaches_its_own_caller_in_order(self, shared: Sandbox) -> None:
        reports: dict[int, list[Any]] = {3: [], 5: []}

        async def ask(total: int) -> None:
            await call(
                shared,
                "steps",
                {"total": total},
                on_progress=lambda *report: reports[total].append(report),
            )

        async with asyncio.TaskGroup() as group:
            for total in reports:
                group.create_task(ask(total))
        for total, got in reports.items():
            assert got == [(n, total, f"step {n}") for n in range(1, total + 1)]
            assert all(math.isfinite(report[0]) for report in got)

    async def test_errors_name_the_instance_or_the_tool(self, shared: Sandbox) -> None:
        with pytest.raises(AenvError) as raised:
            await request(shared, "aenv/read_file", {"arguments": {"path": "missing"}})
        assert vars(raised.value)["instance_id"] == shared.instance_id
