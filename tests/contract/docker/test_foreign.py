"""Images with their own server: AEnvironment's published package, unmodified."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from aenv_ray.engines.base import EndCause, Sandbox
from aenv_ray.errors import (
    CallOutcomeUnknown,
    ConfigError,
    FunctionFailed,
    SandboxLost,
    SandboxStartFailed,
    ToolInputInvalid,
    ToolNotFound,
    ToolTimeout,
)
from aenv_ray.ids import HostId, new_call_id
from aenv_ray.testing.contract_bench import Bench, call, execute, request, value_of
from tests.contract.docker.docker_node import DockerNode, aenvironment_image, bare_project, docker

pytestmark = [pytest.mark.docker, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(
    docker_node: DockerNode, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Bench]:
    engine = docker_node.engine(HostId(f"host-{uuid.uuid4().hex[:8]}"))
    yield Bench(engine, tmp_path_factory.mktemp("projects"))
    await engine.stop([sandbox.instance_id for sandbox in await engine.running()])
    await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def foreign(bench: Bench) -> Sandbox:
    """Yield an instance that tests share and do not change: its server takes seconds to start."""
    return await bench.start(bare_project(bench, aenvironment_image()))


async def test_an_unmodified_image_needs_no_network_or_ports(
    foreign: Sandbox, docker_node: DockerNode
) -> None:
    assert foreign.start_mode.endswith("with its own server (public door)")
    assert await value_of(foreign, "echo", text="ab", times=2) == "abab"
    assert await value_of(foreign, "add", a=2, b=3) == {"sum": 5}
    format_ = "{{.HostConfig.NetworkMode}} {{json .NetworkSettings.Ports}}"
    container = docker_node.container(foreign.instance_id)
    assert docker("inspect", "--format", format_, container) == "none {}"
    assert any(item.startswith("public door: port 8081") for item in foreign.isolation.missing)


async def test_an_unmodified_image_offers_its_tools(foreign: Sandbox) -> None:
    tools = {tool["name"]: tool for tool in await request(foreign, "tools/list", {})}
    assert set(tools) == {"echo", "add", "count", "fail", "slow", "block", "die"}
    assert tools["echo"]["description"] == "Return the text, some times over."
    assert tools["echo"]["inputSchema"]["required"] == ["text"]
    listed = await request(foreign, "aenv/functions", {})
    assert [entry["name"] for entry in listed["functions"]] == ["greet", "refuse"]
    assert [entry["name"] for entry in listed["reward"]] == ["grade"]


async def test_functions_rewards_and_health_go_through_the_public_door(foreign: Sandbox) -> None:
    async def ask(method: str, arguments: dict[str, Any], name: str | None = None) -> Any:
        return await request(foreign, method, {"name": name, "arguments": arguments})

    assert await ask("aenv/function", {"name": "you"}, "greet") == {"greeting": "hello you"}
    assert await ask("aenv/reward", {"answer": "42"}) == 1.0
    assert await ask("aenv/reward", {"answer": "41"}, "grade") == 0.0
    assert (await ask("aenv/health", {}))["status"] == "success"
    with pytest.raises(FunctionFailed, match="not today"):
        await ask("aenv/function", {}, "refuse")
    with pytest.raises(ToolInputInvalid, match="missing"):
        await ask("aenv/reward", {})
    with pytest.raises(ToolNotFound, match="no function 'nothing'"):
        await ask("aenv/function", {}, "nothing")


async def test_a_foreign_tool_fails_like_one_of_ours(foreign: Sandbox) -> None:
    failed = await call(foreign, "fail", {"text": "no luck"})
    assert failed.is_error
    assert "no luck" in failed.text()
    with pytest.raises(ToolNotFound, match="there is no tool 'nothing'"):
        await call(foreign, "nothing")
    for wrong in ({}, {"text": "x", "more": 1}, {"text": "x", "times": "many"}):
        with pytest.raises(ToolInputInvalid, match="arguments of 'echo'"):
            await call(foreign, "echo", wrong)


async def test_a_repeated_call_runs_once_in_a_foreign_image(foreign: Sandbox) -> None:
    """Invariant 1."""
    call_id = new_call_id()
    for _ in range(2):
        result = await call(foreign, "count", {"key": "k"}, call_id=call_id)
        assert result.data == 1
    assert await value_of(foreign, "count", key="k") == 2


async def test_a_foreign_tool_is_stopped_at_its_deadline(foreign: Sandbox) -> None:
    """Invariant 11: its server is notified, and other calls continue."""
    with pytest.raises(ToolTimeout):
        await call(foreign, "slow", {"seconds": 2.0, "path": "/tmp/late"}, timeout_s=0.3)
    assert await value_of(foreign, "slow", seconds=2.1, path="/tmp/later") == "done"
    assert (await execute(foreign, "ls /tmp")).text().split() == ["later"]


async def test_many_foreign_calls_run_at_once(foreign: Sandbox) -> None:
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(value_of(foreign, "add", a=n, b=1)) for n in range(50)]
    assert [task.result()["sum"] for task in calls] == list(range(1, 51))


async def test_a_sandbox_whose_server_dies_during_a_call_is_lost(bench: Bench) -> None:
    """Invariant 2: there is neither a result nor a second attempt."""
    foreign = await bench.start(bare_project(bench, aenvironment_image()))
    with pytest.raises((SandboxLost, CallOutcomeUnknown)):
        await call(foreign, "die")
    ended: asyncio.Future[EndCause] = asyncio.get_running_loop().create_future()
    foreign.on_end(ended.set_result)
    async with asyncio.timeout(30.0):
        assert "exited with code 7" in str(await ended)
    with pytest.raises(SandboxLost, match="exited with code 7"):
        await call(foreign, "echo", {"text": "x"})


async def test_the_error_says_that_the_server_did_not_start(
    bench: Bench, docker_node: DockerNode
) -> None:
    project = bare_project(bench, docker_node.image, door="public")
    with pytest.raises(SandboxStartFailed, match=r"(?s)exited with code 1.*No module named .*aenv"):
        await bench.start(project)


async def test_a_server_cannot_get_a_port_of_the_node(bench: Bench) -> None:
    deploy = {"network": "host", "container": {"image": aenvironment_image()}}
    project = bench.project({"notes.txt": ""}, {"deployConfig": deploy})
    with pytest.raises(ConfigError, match=r'cannot have network "host".*8081'):
        await bench.start(project)
