"""Tools of an environment as a toolset of Pydantic AI.

    agent = Agent(model, toolsets=[EnvironmentToolset(env)])

A tool that fails, or whose arguments do not match, raises `ToolFailed`, which the model sees.
Infrastructure errors end the run.
"""

from __future__ import annotations

import base64
from collections.abc import Collection
from typing import Any

from pydantic_core import SchemaValidator, core_schema

from aenv_ray.integrations.support.requirement import require
from aenv_ray.integrations.support.tools import AnyEnvironment, EnvironmentTools, model_text

require("pydantic-ai-slim", "pydantic-ai", "2.0", "3")

from pydantic_ai import BinaryContent, RunContext, ToolDefinition  # noqa: E402
from pydantic_ai.exceptions import ToolFailed  # noqa: E402
from pydantic_ai.toolsets import AbstractToolset, ToolsetTool  # noqa: E402

_ANY_OBJECT = SchemaValidator(core_schema.dict_schema(core_schema.str_schema()))


class EnvironmentToolset(AbstractToolset[Any]):
    """The tools of an environment.

    Args:
        environment: The agent acts on it; it is not released with the agent.
        only: Names of the tools to offer. None: all.
        timeout_s: Timeout of a call. None: the environment's.
        id: The id of the toolset. None: the environment's name.
    """

    def __init__(
        self,
        environment: AnyEnvironment,
        *,
        only: Collection[str] | None = None,
        timeout_s: float | None = None,
        id: str | None = None,  # the framework's word
    ) -> None:
        self._tools = EnvironmentTools(environment, only=only, timeout_s=timeout_s)
        self._id = id or environment.env_name

    @property
    def id(self) -> str | None:
        """The id of the toolset."""
        return self._id

    async def get_tools(self, ctx: RunContext[Any]) -> dict[str, ToolsetTool[Any]]:
        """Return the tools of the environment."""
        del ctx
        return {
            tool.name: ToolsetTool(
                toolset=self,
                tool_def=ToolDefinition(
                    name=tool.name,
                    description=tool.description,
                    parameters_json_schema=tool.parameters,
                ),
                max_retries=0,
                args_validator=_ANY_OBJECT,  # the environment checks arguments itself
            )
            for tool in await self._tools.load()
        }

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[Any], tool: ToolsetTool[Any]
    ) -> Any:
        """Call a tool; return its data, or a list of text and images."""
        del ctx, tool
        result = await self._tools.call(name, tool_args)
        if result.is_error:
            raise ToolFailed(model_text(result))
        if all(block.get("type") == "text" for block in result.content):
            return result.data
        parts: list[Any] = []
        for block in result.content:
            match block:
                case {"type": "image", "data": str(data), "mimeType": str(kind)}:
                    parts.append(BinaryContent(base64.b64decode(data), media_type=kind))
                case {"type": "text", "text": str(text)}:
                    parts.append(text)
                case {"type": str(other)}:
                    parts.append(f"[{other}]")
        return parts
