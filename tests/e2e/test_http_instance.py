"""Our client over HTTP against a real server: results, typed refusals, cancelling, its death."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import httpx
import pytest

from aenv_ray.client.over_http import HttpInstance
from aenv_ray.errors import (
    CallOutcomeUnknown,
    DeadlineExceeded,
    FabricUnavailable,
    FunctionFailed,
    SandboxLost,
    ToolInputInvalid,
    ToolNotFound,
    ToolTimeout,
)
from tests.e2e.serving import PROJECT, START_S, Server, cancel_begun, eventually, serving, swallow

pytestmark = pytest.mark.e2e


async def test_instance_results(instance: HttpInstance) -> None:
    tools = await instance.list_tools()
    assert all({"name", "description", "inputSchema"} <= tool.keys() for tool in tools)
    assert (await instance.call_tool("add", {"a": 1, "b": 2})).data == 3
    picture = await instance.call_tool("picture", {})
    assert picture.content[0]["mimeType"] == "image/png"
    broken = await instance.call_tool("broken", {"text": "why"})
    assert broken.is_error
    assert broken.text() == "ValueError: why"
    assert (await instance.call_tool("huge", {})).meta["aenv/truncated"] is True


async def test_instance_refusals_are_typed(instance: HttpInstance) -> None:
    with pytest.raises(ToolNotFound, match="no tool 'nope'") as not_found:
        await instance.call_tool("nope", {})
    assert not_found.value.tool_name == "nope"
    with pytest.raises(ToolInputInvalid, match="b: Field required"):
        await instance.call_tool("add", {"a": 1})
    with pytest.raises(ToolTimeout):
        await instance.call_tool("nap", {"seconds": 30}, timeout_s=0.1)
    with pytest.raises(ToolTimeout):
        await instance.call_function("pause", {"seconds": 30}, timeout_s=0.1)
    with pytest.raises(FunctionFailed, match="the function failed"):
        await instance.call_function("fail", {})
    with pytest.raises(ToolInputInvalid):
        await instance.call_function("reset", {"seed": []})
    with pytest.raises(ToolNotFound):
        await instance.call_function("nope", {})
    with pytest.raises(FunctionFailed, match="not a finite reward"):
        await instance.call_reward({}, name="broken-reward")
    assert (await instance.call_tool("add", {"a": 1, "b": 2})).data == 3


async def test_instance_finds_a_functions_own_endpoint_and_method(instance: HttpInstance) -> None:
    arguments = {"key": "k", "tags": ["a", "b"], "limit": 2}
    found = await instance.call_function("lookup", arguments)
    assert found == {"key": "k", "limit": 2, "exact": False, "tags": ["a", "b"]}
    assert await instance.call_function("lookup", {"key": "k"}, method="GET")
    assert await instance.call_function("set_note", {"note": "n"}) == "n"
    assert await instance.call_function("remove_note", {}) == "n"
    assert await instance.call_reward({"answer": "42"}) == {"score": 1.0}
    assert await instance.call_reward({"answer": "42"}, name="length") == 2.0
    assert (await instance.list_functions())["total"] > 8


async def test_one_failing_call_does_not_disturb_the_others(instance: HttpInstance) -> None:
    """AEnvironment W1: a failing call closed the connection of all others."""
    arguments = {"key": uuid.uuid4().hex, "parties": 2}
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(instance.call_tool("meet", arguments))
        failing = [
            group.create_task(swallow(instance.call_tool("nap", {"seconds": 30}, 0.05)))
            for _ in range(10)
        ]
        done, _ = await asyncio.wait(failing)
        assert {type(task.result()) for task in done} == {ToolTimeout}
        await instance.call_tool("meet", arguments)
    assert waiting.result().data == 2


async def test_cancelling_passes_and_tells_the_tool(instance: HttpInstance, tmp_path: Path) -> None:
    """Invariant 11: `CancelledError` is never swallowed, and the tool is cancelled."""
    arguments = {"marker": str(tmp_path / "call")}
    call = asyncio.create_task(instance.call_tool("until_stopped", arguments))
    await cancel_begun(call, tmp_path / "call")


async def test_a_forgotten_session_is_opened_again_and_the_call_runs_once(
    server: Server, instance: HttpInstance
) -> None:
    """Invariant 1: no call runs a tool twice."""
    key = uuid.uuid4().hex
    assert (await instance.call_tool("count", {"key": key})).data == 1
    headers = instance._session._headers
    assert headers is not None
    async with httpx.AsyncClient() as client:
        await client.delete(f"{server.url}/mcp", headers=headers)
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(instance.call_tool("count", {"key": key})) for _ in range(5)]
    assert sorted(call.result().data for call in calls) == [2, 3, 4, 5, 6]


async def test_the_death_of_a_server_makes_outcomes_unknown_and_then_the_instance_lost(
    tmp_path: Path,
) -> None:
    """A call whose outcome cannot be known is never sent again."""
    with serving(PROJECT, tmp_path) as server:
        instance = HttpInstance(server.url)
        await instance.wait_healthy(START_S)
        tool = asyncio.create_task(
            instance.call_tool("until_stopped", {"marker": str(tmp_path / "tool")})
        )
        function = asyncio.create_task(
            instance.call_function("pause", {"seconds": 30, "marker": str(tmp_path / "function")})
        )
        await eventually((tmp_path / "tool.began").exists, "the tool began")
        await eventually((tmp_path / "function.began").exists, "the function began")
        server.process.kill()
        for call in (tool, function):
            with pytest.raises(CallOutcomeUnknown, match="response was lost"):
                await call
        server.process.wait()
        for call_again in (
            instance.call_tool("add", {"a": 1, "b": 1}),
            instance.call_function("reset", {}),
            instance.list_tools(),
            instance.check_health(),
        ):
            with pytest.raises(SandboxLost, match=server.url):
                await call_again
        await instance.close()
        never = HttpInstance(server.url)
        with pytest.raises(FabricUnavailable, match="no environment server answers"):
            await never.call_tool("add", {"a": 1, "b": 1})
        with pytest.raises(DeadlineExceeded, match="its last response: no environment server"):
            await never.wait_healthy(0.1)
        await never.close()
        await never.close()


async def test_waiting_names_the_last_answer(instance: HttpInstance) -> None:
    """Invariant 9: every deadline error names what it waited for."""
    await instance.call_function("set_health", {"status": "starting"})
    try:
        for patience_s in (0.1, 3.0, 60.0):  # a busy machine may not have answered before
            with pytest.raises(DeadlineExceeded, match=f"not healthy within {patience_s:g} s") as e:
                await instance.wait_healthy(patience_s)
            if '"starting"' in str(e.value):
                break
        assert '"starting"' in str(e.value)
    finally:
        await instance.call_function("set_health", {"status": "healthy"})
    assert (await instance.wait_healthy(5.0))["data"]["status"] == "healthy"
