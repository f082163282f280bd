"""Tool calls of a model, as the loops of OpenAI's and Anthropic's APIs make them."""

from __future__ import annotations

from typing import Any, cast

import pytest

from aenv_ray.client.openai_names import openai_name
from aenv_ray.errors import SandboxLost
from aenv_ray.integrations.anthropic import AnthropicTools
from aenv_ray.integrations.episodes import LiveEpisode
from aenv_ray.integrations.openai import OpenAITools
from aenv_ray.integrations.support.tools import (
    EnvironmentTools,
    framework_tools,
    identifier,
    is_identifier,
)
from aenv_ray.models import ToolResult
from tests.fixtures.listed_tools import ILLEGAL, ListedTools, arguments


class LostEpisode:
    """An episode whose sandbox is lost."""

    env_name = "fake"

    async def list_tools(self) -> list[dict[str, Any]]:
        return [{"name": "add", "inputSchema": {"type": "object", "properties": {}}}]

    async def call_tool(self, name: str, arguments: Any, timeout: float | None) -> ToolResult:
        raise SandboxLost("the node is gone")


async def test_a_lost_sandbox_is_raised_as_itself_by_calls_at_the_same_time() -> None:
    """Loops catch `AenvError`, and not a group of them, to leave the episode out."""
    episode = cast("LiveEpisode", LostEpisode())
    openai = OpenAITools(episode)
    await openai.chat_tools()
    calls = [{"id": str(n), "function": {"name": "add", "arguments": "{}"}} for n in range(2)]
    with pytest.raises(SandboxLost):
        await openai.answer_chat({"role": "assistant", "tool_calls": calls})
    anthropic = AnthropicTools(episode)
    await anthropic.tools()
    uses = [{"type": "tool_use", "id": str(n), "name": "add", "input": {}} for n in range(2)]
    with pytest.raises(SandboxLost):
        await anthropic.answer(uses)


def test_names_that_become_equal_stay_apart() -> None:
    """Otherwise one tool would hide another one."""
    listed = [{"name": name, "inputSchema": arguments()} for name in ILLEGAL]
    for naming in (openai_name, identifier):
        tools = framework_tools(listed, "fake", naming=naming)
        assert len({tool.name for tool in tools}) == len(ILLEGAL)
        assert [tool.own_name for tool in tools] == list(ILLEGAL)


async def test_arguments_whose_names_a_framework_uses_get_others_and_arrive() -> None:
    env = ListedTools(use=arguments("self", "self_", "a-b", "1st", "class", "fine"))
    tools = EnvironmentTools(
        cast("LiveEpisode", env), takes=lambda name: is_identifier(name) and name != "self"
    )
    [tool] = await tools.load()
    offered = list(tool.parameters["properties"])
    assert offered[1:] == ["self_", "a_b", "argument_1st", "class_", "fine"]
    assert tool.parameters["required"] == offered
    assert all(name != "self" and name.isidentifier() for name in offered)
    await tools.call("use", {name: number for number, name in enumerate(offered)})
    given = {"self": 0, "self_": 1, "a-b": 2, "1st": 3, "class": 4, "fine": 5}
    assert env.called == [("use", given)]
