"""Tools of an environment for Anthropic's messages API, as plain JSON data.

    tools = AnthropicTools(env)
    response = client.messages.create(model=…, messages=messages, tools=await tools.tools())
    messages.append({"role": "user", "content": await tools.answer(response.content)})

Needs no package of Anthropic's: content blocks may be objects of it, or mappings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from aenv_ray.integrations.support.tools import (
    AnyEnvironment,
    EnvironmentTools,
    at_once,
    field_of,
)
from aenv_ray.models import ToolResult


class AnthropicTools:
    """The tools of one environment for a loop over Anthropic's API.

    Args:
        environment: The environment whose tools the model may call.
        only: Names of the tools to offer. None: all.
        timeout_s: Timeout of a call. None: the environment's.
    """

    def __init__(
        self,
        environment: AnyEnvironment,
        *,
        only: Collection[str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._tools = EnvironmentTools(environment, only=only, timeout_s=timeout_s)

    async def tools(self) -> list[dict[str, Any]]:
        """Return the value of ``tools`` of a request."""
        return [
            {"name": tool.name, "description": tool.description, "input_schema": tool.parameters}
            for tool in await self._tools.load()
        ]

    async def answer(self, content: Iterable[Any]) -> list[dict[str, Any]]:
        """Run the ``tool_use`` blocks of an assistant message, all at once.

        Returns:
            A ``tool_result`` block for each, in order: the content of the next user message.

        Raises:
            AenvError: The infrastructure failed; the episode is void.
        """
        uses = [block for block in content if field_of(block, "type") == "tool_use"]
        results = await at_once(
            self._tools.call(field_of(use, "name"), field_of(use, "input")) for use in uses
        )
        return [
            {
                "type": "tool_result",
                "tool_use_id": field_of(use, "id"),
                "is_error": result.is_error,
                "content": _blocks(result),
            }
            for use, result in zip(uses, results, strict=True)
        ]


def _blocks(result: ToolResult) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for block in result.content:
        match block:
            case {"type": "text", "text": str(text)} if text:
                blocks.append({"type": "text", "text": text})
            case {"type": "image", "data": str(data), "mimeType": str(kind)}:
                source = {"type": "base64", "media_type": kind, "data": data}
                blocks.append({"type": "image", "source": source})
            case {"type": str(other)} if other != "text":
                blocks.append({"type": "text", "text": f"[{other}]"})
    return blocks
