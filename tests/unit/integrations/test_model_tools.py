"""Tool calls of a model, as the loops of OpenAI's and Anthropic's APIs make them."""

from __future__ import annotations

from typing import Any, cast

import pytest

from aenv_ray.errors import SandboxLost
from aenv_ray.integrations.anthropic import AnthropicTools
from aenv_ray.integrations.episodes import LiveEpisode
from aenv_ray.integrations.openai import OpenAITools
from aenv_ray.models import ToolResult


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
