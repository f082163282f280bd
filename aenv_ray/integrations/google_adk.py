"""Tools of an environment as a toolset of Google's Agent Development Kit.

    agent = LlmAgent(name="worker", model=…, tools=[EnvironmentToolset(env)])

A tool that fails returns ``{"error": …}``, which the model sees. Infrastructure errors end the run.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from aenv_ray.integrations.support.requirement import require
from aenv_ray.integrations.support.tools import (
    AnyEnvironment,
    EnvironmentTools,
    FrameworkTool,
    model_text,
)

require("google-adk", "google-adk", "2.0", "3")

from google.adk.tools.base_tool import BaseTool  # noqa: E402
from google.adk.tools.base_toolset import BaseToolset  # noqa: E402
from google.genai import types  # noqa: E402


class EnvironmentTool(BaseTool):
    """One tool of an environment."""

    def __init__(self, tools: EnvironmentTools, tool: FrameworkTool) -> None:
        super().__init__(name=tool.name, description=tool.description)
        self._tools = tools
        self._own_name = tool.name
        self._parameters = tool.parameters

    def _get_declaration(self) -> types.FunctionDeclaration:
        return types.FunctionDeclaration(
            name=self.name,
            description=self.description,
            parameters_json_schema=self._parameters,
        )

    async def run_async(self, *, args: dict[str, Any], tool_context: Any) -> Any:
        """Call the tool; return ``{"result": …}`` or ``{"error": …}``."""
        del tool_context
        result = await self._tools.call(self._own_name, args)
        if result.is_error:
            return {"error": model_text(result)}
        if all(block.get("type") == "text" for block in result.content):
            return {"result": result.data}
        return {"result": result.content}


class EnvironmentToolset(BaseToolset):
    """The tools of an environment.

    Args:
        environment: The agent acts on it; closing the toolset leaves its instance.
        only: Names of the tools to offer. None: all.
        timeout_s: Timeout of a call. None: the environment's.
        tool_name_prefix: Put before the names, by the framework.
    """

    def __init__(
        self,
        environment: AnyEnvironment,
        *,
        only: Collection[str] | None = None,
        timeout_s: float | None = None,
        tool_name_prefix: str | None = None,
    ) -> None:
        super().__init__(tool_name_prefix=tool_name_prefix)
        self._tools = EnvironmentTools(environment, only=only, timeout_s=timeout_s)

    async def get_tools(self, readonly_context: Any = None) -> list[BaseTool]:
        """Return the tools of the environment."""
        del readonly_context
        return [EnvironmentTool(self._tools, tool) for tool in await self._tools.load()]

    async def close(self) -> None:
        """Do nothing: the caller releases the environment."""
