"""`Environment` with ``DUMMY_INSTANCE_IP``: one real environment server, no Ray."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.cli.local.free_ports import free_port
from aenv_ray.client import Environment, SyncEnvironment
from aenv_ray.errors import (
    CircuitOpen,
    ConfigError,
    FabricUnavailable,
    FunctionFailed,
    SandboxLost,
    ToolInputInvalid,
    ToolNotFound,
    ToolTimeout,
)
from tests.e2e.serving import PROJECT, Server, serving

pytestmark = pytest.mark.e2e


@pytest.fixture
def pointed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point ``DUMMY_INSTANCE_IP`` at the server."""
    monkeypatch.setenv("DUMMY_INSTANCE_IP", server.url.removeprefix("http://"))


@pytest.mark.usefixtures("pointed")
async def test_the_client_speaks_to_one_server() -> None:
    """Tools, functions, rewards, health and names are those of an instance over Ray."""
    async with Environment("kitchen-sink@1.0.0") as env:
        tools = {t["name"] for t in await env.list_tools()}
        assert "kitchen-sink@1.0.0/echo" in tools
        assert (await env.call_tool("echo", {"text": "hi"})).data == "hi"
        assert (await env.call_tool("kitchen-sink@1.0.0/add", {"a": 1, "b": 2})).data == 3
        assert (await env.call_tool("broken")).is_error
        assert await env.call_function("reset", {"seed": 4}) == {"seed": 4}
        assert await env.call_function("lookup", {"key": "k"}, method="GET") == {
            "key": "k", "limit": 10, "exact": False, "tags": None,
        }  # fmt: skip
        assert await env.call_reward({"answer": "42"}) == {"score": 1.0}
        assert await env.call_reward({"answer": "four"}, name="length") == 4.0
        assert (await env.check_health())["data"]["status"] == "healthy"
        info = await env.get_env_info()
        assert (info["status"], info["ip"].startswith("http")) == ("Running", True)
        functions = {t["function"]["name"] for t in await env.list_openai_tools()}
        assert "move-point" in functions
        assert (await env.call_openai_tool("echo", '{"text": "hey"}')).data == "hey"
        for parallel in (False, True):
            calls = [("add", {"a": 1, "b": 1}), ("nonsense", {}), ("broken", {})]
            good, unknown, broken = await env.call_tools(calls, parallel=parallel)
            assert good.data == 2  # type: ignore[union-attr]  # a result, as the test says
            assert isinstance(unknown, ToolNotFound)
            assert broken.is_error  # type: ignore[union-attr]  # a result, as the test says


@pytest.mark.usefixtures("pointed")
async def test_errors_are_those_of_an_instance_over_ray() -> None:
    """The same typed errors by HTTP."""
    async with Environment("kitchen-sink@1.0.0") as env:
        for call, error in (
            (env.call_tool("nonsense"), ToolNotFound),
            (env.call_tool("other@1.0.0/echo", {"text": ""}), ToolNotFound),
            (env.call_tool("add", {"a": "x"}), ToolInputInvalid),
            (env.call_tool("nap", {"seconds": 30}, timeout=0.3), ToolTimeout),
            (env.call_function("fail"), FunctionFailed),
            (env.call_reward(name="broken-reward"), FunctionFailed),
            (env.exec("true"), ConfigError),
            (env.read_file("x"), ConfigError),
            (env.renew("1h"), ConfigError),
        ):
            with pytest.raises(error):
                await call


@pytest.mark.usefixtures("pointed")
async def test_concurrent_calls_and_a_second_block() -> None:
    """Many calls at once; leaving the block leaves the server, whose state stays."""
    env = Environment("kitchen-sink@1.0.0")
    async with env, asyncio.TaskGroup() as group:
        tasks = [group.create_task(env.call_tool("count", {"key": "k"})) for _ in range(30)]
    assert sorted(t.result().data for t in tasks) == list(range(1, 31))
    async with Environment("kitchen-sink@1.0.0") as again:
        assert (await again.call_tool("count", {"key": "k"})).data == 31


async def test_a_server_that_dies_is_a_lost_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 2: an infrastructure failure by HTTP too, and then an open circuit."""
    with serving(PROJECT, tmp_path) as mortal:
        monkeypatch.setenv("DUMMY_INSTANCE_IP", mortal.url.removeprefix("http://"))
        async with Environment("kitchen-sink@1.0.0") as env:
            await env.call_tool("echo", {"text": "hi"})
            mortal.stop(signal.SIGKILL)
            for _ in range(5):
                with pytest.raises(SandboxLost):
                    await env.call_tool("echo", {"text": "hi"})
            with pytest.raises(CircuitOpen):
                await env.call_tool("echo", {"text": "hi"})


async def test_an_address_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server there: `FabricUnavailable` within the startup timeout, or at once when told so."""
    monkeypatch.setenv("DUMMY_INSTANCE_IP", f"127.0.0.1:{free_port()}")
    with pytest.raises((FabricUnavailable, TimeoutError)):
        await Environment("kitchen-sink", startup_timeout=0.5).initialize()
    env = Environment("kitchen-sink", skip_for_healthy=True)
    with pytest.raises(FabricUnavailable):
        await env.call_tool("echo", {"text": "hi"})
    await env.release()


@pytest.mark.parametrize("address", ["http://user@host", "ftp://host", "host:port", "http://"])
async def test_an_invalid_address(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """`ConfigError` says how to write it."""
    monkeypatch.setenv("DUMMY_INSTANCE_IP", address)
    with pytest.raises(ConfigError):
        await Environment("kitchen-sink").initialize()


@pytest.mark.usefixtures("pointed")
def test_the_sync_client_speaks_to_one_server() -> None:
    """`SyncEnvironment` is the same without `await`."""
    env: Any = SyncEnvironment("kitchen-sink@1.0.0")
    try:
        with env:
            assert env.call_tool("echo", {"text": "hi"}).data == "hi"
            assert env.call_reward({"answer": "1"}) == {"score": 0.0}
    finally:
        env.close()
