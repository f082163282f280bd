"""`Environment` and `SyncEnvironment`, over Ray and over a gateway: one shape, our errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray.client import Environment
from aenv_ray.errors import (
    CircuitOpen,
    DeadlineExceeded,
    EnvironmentNotFound,
    FabricUnavailable,
    Forbidden,
    FunctionFailed,
    InstanceNotFound,
    SandboxLost,
    SandboxStartFailed,
    ToolInputInvalid,
    ToolNotFound,
    ToolTimeout,
    Unauthorized,
)
from aenv_ray.hub.records import Role
from tests.contract.processes import signal_all
from tests.ray.cluster import Cluster
from tests.ray.faults import Witness, eventually_empty, without
from tests.ray.gateway.data_gateway import GatewayBench

pytestmark = pytest.mark.usefixtures("cluster", "way")

Named = Callable[[Path], str]
Shared = Callable[..., Environment]


async def test_async_with_creates_and_releases(cluster: Cluster, density: str, probe: str) -> None:
    """The instance lives exactly as long as the block, at both densities."""
    before = cluster.sandboxes()
    async with Environment(probe, actor=density) as env:
        assert (await env.call_tool("add", {"a": 1, "b": 2})).data == 3
        cluster.appeared(before)
    assert without(cluster.sandboxes(), before) == []


async def test_an_exception_in_the_block_releases(cluster: Cluster, shared: Shared) -> None:
    """The exception passes and the instance goes."""
    before = cluster.sandboxes()
    with pytest.raises(RuntimeError, match="mine"):
        async with shared():
            raise RuntimeError("mine")
    assert without(cluster.sandboxes(), before) == []


async def test_the_first_call_creates_the_instance(cluster: Cluster, shared: Shared) -> None:
    """Without `async with`, and only once for concurrent first calls."""
    before = cluster.sandboxes()
    env = shared()
    assert env.instance_id is None
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(env.call_tool("count")) for _ in range(10)]
    assert sorted(t.result().data for t in tasks) == list(range(1, 11))
    cluster.appeared(before)
    await env.release()


async def test_resources_and_prompts(probe: str, shared: Shared) -> None:
    """Listed, read and rendered alike over Ray and over a gateway."""
    async with shared(probe) as env:
        (manual,) = await env.list_resources()
        assert manual["uri"] == "probe://manual"
        assert manual["description"] == "What the probe is for."
        (numbers,) = await env.list_resource_templates()
        assert numbers["uriTemplate"] == "probe://numbers/{number}"
        (text,) = await env.read_resource("probe://manual")
        assert (text.uri, text.mime_type, text.content) == (
            "probe://manual", "text/markdown", "# Probe",
        )  # fmt: skip
        (binary,) = await env.read_resource("probe://numbers/258")
        assert binary.content == b"\x01\x02"
        (prompt,) = await env.list_prompts()
        assert [one["required"] for one in prompt["arguments"]] == [True, False]
        asked, told = (await env.get_prompt("review", {"subject": "this"})).messages
        assert (asked["role"], asked["content"]["text"]) == ("user", "Review this.")
        assert (told["role"], told["content"]["text"]) == ("assistant", "In a calm tone.")
        with pytest.raises(ToolNotFound, match="probe://nothing"):
            await env.read_resource("probe://nothing")
        with pytest.raises(FunctionFailed, match="OverflowError"):
            await env.read_resource("probe://numbers/70000")
        with pytest.raises(ToolInputInvalid, match="subject"):
            await env.get_prompt("review")


async def test_release_is_idempotent_and_initialize_starts_anew(
    shared: Shared,
) -> None:
    """A released environment can be used again, on a fresh instance."""
    env = shared()
    await env.release()
    assert await env.initialize()
    first = env.instance_id
    assert (await env.call_tool("count")).data == 1
    assert await env.initialize()
    assert env.instance_id == first
    await env.release()
    await env.destroy()
    assert env.instance_id is None
    assert (await env.call_tool("count")).data == 1
    assert env.instance_id not in (None, first)
    await env.destroy()


async def test_attach_uses_a_live_instance(live: Any) -> None:
    """The same state by another client; leaving the block releases it."""
    handle = live
    await handle.call_tool.remote("count")
    async with await Environment.attach(handle.instance_id) as env:
        assert env.instance_id == handle.instance_id
        assert (await env.call_tool("count")).data == 2
        assert (await env.call_tool("probe/count")).data == 3
    with pytest.raises(InstanceNotFound):
        await Environment.attach(handle.instance_id)
    with pytest.raises(InstanceNotFound):
        await Environment.attach("probe-zzzzzzzz")


async def test_get_env_info_has_the_fields_of_the_original(
    shared: Shared,
) -> None:
    """AEnvironment's six fields, and ours beside them."""
    async with shared("mini-terminal@1.0.0", labels={"a": "b"}, owner="ada") as env:
        info = await env.get_env_info()
        assert info["name"] == "mini-terminal@1.0.0"
        assert info["instance_id"] == env.instance_id
        assert info["status"] == "Running"
        assert {"ip", "created_at", "updated_at"} <= set(info)
        assert (info["labels"], info["owner"], info["density"]) == ({"a": "b"}, "ada", "shared")
        renewed = await env.renew("2h")
        assert renewed.deadline > info["deadline"]


async def test_tools_are_listed_under_the_environments_name(
    shared: Shared,
) -> None:
    """`env/tool`, callable by that and by its own name."""
    async with shared("mini-terminal@1.0.0") as env:
        (tool,) = await env.list_tools()
        assert tool["name"] == "mini-terminal@1.0.0/execute_command"
        assert tool["inputSchema"]["required"] == ["command"]
        for name in (tool["name"], "execute_command"):
            result = await env.call_tool(name, {"command": "echo hi"})
            assert result.data["output"] == ["hi\n", True]
        with pytest.raises(ToolNotFound):
            await env.call_tool("other@1.0.0/execute_command", {"command": "true"})


async def test_openai_tools_are_listed_and_called(shared: Shared) -> None:
    """Function tools under names that OpenAI takes, called with the JSON text a model writes."""
    async with shared() as env:
        tools = await env.list_openai_tools()
        functions = {t["function"]["name"]: t["function"] for t in tools}
        assert {t["type"] for t in tools} == {"function"}
        assert functions["add"]["parameters"]["required"] == ["a"]
        assert (await env.call_openai_tool("add", '{"a": 1}')).data == 2
        assert (await env.call_openai_tool("add", {"a": 2})).data == 3
        assert env.tool_of_openai_name("add") == "add"
        for wrong in ('{"a": ', "[1]", '"x"'):
            with pytest.raises(ToolInputInvalid):
                await env.call_openai_tool("add", wrong)
        with pytest.raises(ToolNotFound):
            await env.call_openai_tool("nonsense", "{}")


async def test_functions_rewards_health_commands_and_files(
    shared: Shared,
) -> None:
    """Every other call of the handle, under AEnvironment's names."""
    async with shared() as env:
        assert await env.call_function("double", {"value": 4}) == 8
        assert await env.call_reward({"value": 0.75}) == {"score": 0.75}
        assert await env.call_reward(name="score") == {"score": 0.5}
        with pytest.raises(FunctionFailed):
            await env.call_reward(name="not-a-number")
        with pytest.raises(FunctionFailed):
            await env.call_function("burst")
        health = await env.check_health()
        assert (health["success"], health["data"]["status"]) == (True, "healthy")
        assert {f["name"] for f in (await env.list_functions())["functions"]} >= {"double"}
        assert await env.write_file("a/b", b"\x00\xff") == 2
        assert await env.read_file("a/b") == b"\x00\xff"
        assert [e.name for e in await env.list_files("a")] == ["b"]
        done = await env.exec(["sh", "-c", "cat; exit 4"], stdin=b"in")
        assert (done.exit_code, done.stdout) == (4, b"in")
        ok, bad = await env.call_tools([("add", {"a": 1}), ("nonsense", {})], parallel=True)
        assert ok.data == 2  # type: ignore[union-attr]  # a result, as the test says
        assert isinstance(bad, ToolNotFound)
        await env.wait_for_ready()


async def test_concurrent_calls_get_their_own_results(shared: Shared) -> None:
    """A few hundred at once on one environment."""
    async with shared() as env, asyncio.TaskGroup() as group:
        tasks = [group.create_task(env.call_tool("add", {"a": n, "b": 0})) for n in range(300)]
    assert [t.result().data for t in tasks] == list(range(300))


async def test_a_call_is_stopped_at_its_timeout(shared: Shared) -> None:
    """Given with the call, or once for the environment."""
    async with shared(timeout=0.4) as env:
        with pytest.raises(ToolTimeout):
            await env.call_tool("block")
        with pytest.raises(ToolTimeout):
            await env.call_tool("block", timeout=0.2)
        assert (await env.call_tool("count")).data == 1


async def test_a_dead_sandbox_opens_the_circuit_and_a_new_one_closes_it(
    cluster: Cluster, shared: Shared
) -> None:
    """Five infrastructure failures in a row, then `CircuitOpen`; release and initialize heal."""
    before = cluster.sandboxes()
    env = shared()
    await env.initialize()
    signal_all(cluster.appeared(before))
    for _ in range(5):
        with pytest.raises(SandboxLost):
            await env.call_tool("count")
    with pytest.raises(CircuitOpen) as caught:
        await env.call_tool("count")
    assert "release" in str(caught.value.hint)
    await env.release()
    assert (await env.call_tool("count")).data == 1
    await env.release()


async def test_errors_of_tools_open_no_circuit(shared: Shared) -> None:
    """Timeouts, refusals and failing tools say nothing about the infrastructure."""
    async with shared() as env:
        for _ in range(7):
            with pytest.raises(ToolNotFound):
                await env.call_tool("nonsense")
            with pytest.raises(ToolInputInvalid):
                await env.call_tool("add")
            with pytest.raises(FunctionFailed):
                await env.call_function("burst")
            assert (await env.call_tool("fail", {"text": "x"})).is_error
        with pytest.raises(ToolTimeout):
            await env.call_tool("block", timeout=0.1)
        assert (await env.call_tool("count")).data == 1


async def test_cancelled_error_passes(witness: Witness, shared: Shared) -> None:
    """Invariant 11: by `cancel` and by `asyncio.timeout`; the tool is cancelled each time."""
    async with shared(environment_variables=witness.variables) as env:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await env.call_tool("hold", {"key": "one"})
        await asyncio.to_thread(witness.wait_for, "interrupted one")
        async with asyncio.TaskGroup() as group:
            task = group.create_task(env.call_tool("ahold", {"key": "two"}))
            await asyncio.to_thread(witness.wait_for, "began two")
            task.cancel()
        assert task.cancelled()
        await asyncio.to_thread(witness.wait_for, "interrupted two")
        assert (await env.call_tool("count")).data == 1


async def test_a_cancelled_creation_leaves_nothing(cluster: Cluster, probe: str) -> None:
    """Whenever the cancellation comes, the instance that was under way does not stay."""
    before = cluster.sandboxes()
    for pause_s in (0.0, 0.005, 0.02, 0.1):
        env = Environment(probe, actor="shared")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await env.initialize()
        await env.release()
    await asyncio.to_thread(eventually_empty, lambda: without(cluster.sandboxes(), before))


def test_a_cancelled_creation_leaves_nothing_when_its_loop_ends(
    cluster: Cluster, probe: str
) -> None:
    """The event loop is closed when the instance starts, so no code there receives it."""
    before = cluster.sandboxes()
    listed = {one.id for one in aenv_ray.list_instances()}

    async def give_up() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.001):
                await Environment(probe, actor="shared").initialize()

    for _ in range(3):
        asyncio.run(give_up())
    eventually_empty(lambda: without(cluster.sandboxes(), before))
    assert {one.id for one in aenv_ray.list_instances()} <= listed


async def test_a_failed_start_leaves_nothing(
    cluster: Cluster, project: Callable[..., Path], shared: Shared, named: Named
) -> None:
    """Code that does not load, an unhealthy start, a start that takes too long."""
    before = cluster.sandboxes()
    with pytest.raises(SandboxStartFailed, match="not today"):
        await shared(named(project("raise RuntimeError('not today')\n"))).initialize()
    ill = project(
        "from aenv_ray.runtime import register_health, register_tool\n"
        "@register_tool\ndef fine() -> int: ...\n"
        "@register_health\ndef health(): return {'status': 'unhealthy', 'message': 'no fuel'}\n"
    )
    with pytest.raises(SandboxStartFailed, match="no fuel"):
        await shared(named(ill)).initialize()
    async with shared(named(ill), skip_for_healthy=True) as env:
        assert (await env.check_health())["data"]["status"] == "unhealthy"
    with pytest.raises(DeadlineExceeded, match="not ready within"):
        await shared(startup_timeout=0.001).initialize()
    with pytest.raises(EnvironmentNotFound):
        await shared("no-such-thing").initialize()
    await asyncio.to_thread(eventually_empty, lambda: without(cluster.sandboxes(), before))


async def test_an_unreachable_gateway(monkeypatch: pytest.MonkeyPatch, probe: str) -> None:
    """Typed and told apart from an instance that is lost."""
    monkeypatch.setenv("AENV_SYSTEM_URL", "http://127.0.0.1:1")
    monkeypatch.setattr("aenv_ray.client.gateway_http._LONGEST_PAUSE_S", 0.01)
    with pytest.raises(FabricUnavailable, match="cannot be reached"):
        await Environment(probe, max_retries=0).initialize()


async def test_a_gateway_given_by_argument(
    monkeypatch: pytest.MonkeyPatch, gateway: GatewayBench
) -> None:
    """`aenv_url` and `api_key`, as AEnvironment's users give them; a wrong token is refused."""
    monkeypatch.delenv("AENV_SYSTEM_URL", raising=False)
    monkeypatch.delenv("AENV_API_KEY", raising=False)
    token = gateway.token(Role.PUBLISHER)
    async with Environment("probe", aenv_url=gateway.url, api_key=token) as env:
        assert (await env.call_tool("count")).data == 1
    with pytest.raises(Unauthorized):
        await Environment("probe", aenv_url=gateway.url, api_key="wrong").initialize()
    with pytest.raises(Forbidden):
        await Environment("probe", aenv_url=gateway.url, api_key=token, owner="eve").initialize()
