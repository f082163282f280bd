"""OpenEnv's own clients play episodes on a server of ours."""

from __future__ import annotations

import asyncio
import runpy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from openenv.core.env_server.mcp_types import CallToolAction, ListToolsAction
from openenv.core.generic_client import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient

import aenv_ray
from aenv_ray.errors import ConfigError
from aenv_ray.integrations.episodes import EpisodePool
from aenv_ray.integrations.openenv import FINISH, EpisodeEnvironment
from tests.fixtures.doc_blocks import doc_blocks
from tests.fixtures.killed_trainers import kill_once_it_acts
from tests.fixtures.listed_tools import ILLEGAL, TREE, arguments, listed_project

EXAMPLE = Path(__file__).parents[2] / "examples" / "integrations" / "trainers" / "openenv_server.py"
PROJECTS = Path(__file__).parents[1] / "fixtures" / "projects"
CORRIDOR, AGENT_TOOLS = PROJECTS / "corridor", PROJECTS / "agent-tools"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Yield the address of the example's server."""
    servers: list[uvicorn.Server] = []

    def run(app: Any, **options: Any) -> None:
        servers.append(uvicorn.Server(uvicorn.Config(app, log_level="warning", **options)))
        servers[0].run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn, "run", run)
        main = runpy.run_path(str(EXAMPLE))["main"]
        thread = threading.Thread(target=main, args=(str(CORRIDOR), "0"))
        thread.start()
        while thread.is_alive() and not (servers and servers[0].started):
            thread.join(0.05)
        port = servers[0].servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
        servers[0].should_exit = True
        thread.join(30)


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "call_tool", "tool_name": tool, "arguments": arguments}


async def test_a_client_plays_an_episode(url: str) -> None:
    async with GenericEnvClient(base_url=url) as env:
        begun = await env.reset(seed=3, task={"id": "go", "instruction": "Walk."})
        assert begun.observation["instruction"] == "Walk."
        stepped = await env.step(call("step", action=1))
        assert stepped.observation["result"]["terminated"] is True
        failed = await env.step(call("step", action=7))
        assert "7 is no step" in failed.observation["error"]["message"]
        assert not failed.done
        ended = await env.step(call(FINISH))
        assert (ended.reward, ended.done, ended.observation["void"]) == (1.0, True, False)
        late = await env.step(call("step", action=1))
        assert "reset begins one" in late.observation["error"]["message"]


async def test_tools_are_found_and_called_by_name(url: str) -> None:
    async with MCPToolClient(base_url=url) as env:
        names = [tool.name for tool in await env.list_tools()]
        assert {"step", "get_observation", FINISH} <= set(names)
        await env.reset(seed=2)
        result = await env.step(CallToolAction(tool_name="get_observation"))
        assert result.observation.result["info"] == {"place": 2}


async def test_a_tool_with_the_name_of_the_one_that_ends_an_episode_has_another(
    tmp_path: Path,
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "config.json").write_text('{"name": "ends", "deployConfig": {"network": "none"}}')
    (tmp_path / "src" / "tools.py").write_text(
        "from aenv_ray.runtime import register_tool\n\n"
        f"@register_tool\ndef {FINISH}() -> str:\n    return 'of the environment'\n"
    )
    with EpisodePool(tmp_path) as pool:
        env = EpisodeEnvironment(pool)
        await env.reset_async()
        [own, end] = (await env.step_async(ListToolsAction())).tools
        assert (own.name != FINISH, end.name) == (True, FINISH)
        called = await env.step_async(CallToolAction(tool_name=own.name))
        assert (called.result, called.done) == ("of the environment", False)
        assert (await env.step_async(CallToolAction(tool_name=FINISH))).done


async def test_the_docs_serve_and_play(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    apps: list[Any] = []
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: apps.append(app))
    exec(doc_blocks("openenv-server")[0], {"__name__": "__main__"})
    server = uvicorn.Server(uvicorn.Config(apps[0], port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while thread.is_alive() and not server.started:
        await asyncio.to_thread(thread.join, 0.05)
    found: dict[str, Any] = {}
    exec(doc_blocks("openenv-client")[0], found)
    port = server.servers[0].sockets[0].getsockname()[1]
    await found["main"](f"http://127.0.0.1:{port}")
    server.should_exit = True
    thread.join(30)
    shown, reward = capsys.readouterr().out.strip().splitlines()
    assert "hello" in shown
    assert reward == "None"


async def test_a_lost_sandbox_is_a_void_episode_without_a_reward(url: str) -> None:
    async with GenericEnvClient(base_url=url) as env:
        await env.reset()
        for info in await asyncio.to_thread(aenv_ray.list_instances):
            await aenv_ray.get(info.id).release.remote()
        lost = await env.step(call("step", action=1))
        assert (lost.reward, lost.done, lost.observation["void"]) == (None, True, True)
        assert (await env.reset(seed=1)).done is False


async def test_an_image_of_a_tool_is_in_the_observation() -> None:
    with EpisodePool(AGENT_TOOLS) as pool:
        env = EpisodeEnvironment(pool)
        await env.reset_async()
        drawn: Any = await env.step_async(CallToolAction(tool_name="draw"))
        assert [block["mimeType"] for block in drawn.result] == ["image/png"]


async def test_names_become_legal_and_lead_to_their_own_tools(tmp_path: Path) -> None:
    listed = {name: arguments("number") for name in ILLEGAL}
    with EpisodePool(listed_project(tmp_path / "illegal", **listed)) as pool:
        env = EpisodeEnvironment(pool)
        await env.reset_async()
        offered: Any = await env.step_async(ListToolsAction())
        *names, end = [tool.name for tool in offered.tools]
        assert (len(set(names)), end) == (len(ILLEGAL), FINISH)
        for number, name in enumerate(names):
            action = CallToolAction(tool_name=name, arguments={"number": number})
            called: Any = await env.step_async(action)
            assert called.result == {"number": number}


async def test_a_schema_that_contains_itself_is_refused(tmp_path: Path) -> None:
    """It is a mistake of the environment, which ends no episode with a reward."""
    with EpisodePool(listed_project(tmp_path / "tree", tree=TREE)) as pool:
        env = EpisodeEnvironment(pool)
        await env.reset_async()
        for action in (ListToolsAction(), CallToolAction(tool_name="tree")):
            with pytest.raises(ConfigError, match="contains itself"):
                await env.step_async(action)


SESSION = f"""
from openenv.core.env_server.mcp_types import CallToolAction
from aenv_ray.integrations.episodes import EpisodePool
from aenv_ray.integrations.openenv import EpisodeEnvironment

env = EpisodeEnvironment(EpisodePool({str(CORRIDOR)!r}))
env.reset(seed=0)
print("begun")
while True:
    env.step(CallToolAction(tool_name="get_observation"))
"""


def test_a_killed_server_leaves_no_instance(tmp_path: Path) -> None:
    kill_once_it_acts(SESSION, directory=tmp_path)
