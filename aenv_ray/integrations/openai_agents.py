"""Environments in the OpenAI Agents SDK: as an MCP server, or as function tools.

    agent = Agent("worker", mcp_servers=[EnvironmentServer(env)])
    agent = Agent("worker", tools=await function_tools(env))

The server calls over Ray, a gateway or one server, as the environment does, and without MCP's
HTTP. Both raise infrastructure errors out of ``Runner.run``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mcp.types import CallToolResult, GetPromptResult, ListPromptsResult, Tool

from aenv_ray.integrations.support.requirement import require
from aenv_ray.integrations.support.tools import AnyEnvironment, EnvironmentTools
from aenv_ray.models import ToolResult

require("openai-agents", "openai-agents", "0.20", "1")

from agents import FunctionTool, ToolOutputImage, ToolOutputText  # noqa: E402
from agents.mcp import MCPServer  # noqa: E402


class EnvironmentServer(MCPServer):
    """The tools of an environment as an `MCPServer` of the Agents SDK.

    Args:
        environment: The agent acts on it. Connecting creates its instance if there is none yet;
            cleaning up leaves it, since the caller may still want the reward.
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
        # What the model caused is a result already; all other errors end the run.
        super().__init__(failure_error_function=None)
        self._tools = EnvironmentTools(environment, only=only, timeout_s=timeout_s)
        self._listed: list[Tool] | None = None

    @property
    def name(self) -> str:
        """The environment's name."""
        return self._tools.environment.env_name

    async def connect(self) -> None:
        """Create the instance if necessary, and list its tools."""
        self._listed = [
            Tool(name=tool.name, description=tool.description, input_schema=tool.parameters)
            for tool in await self._tools.load()
        ]

    async def cleanup(self) -> None:
        """Forget the tools. The instance stays until its environment is released."""
        self._listed = None

    async def list_tools(self, run_context: Any = None, agent: Any = None) -> list[Tool]:
        """Return the tools of the environment."""
        del run_context, agent
        if self._listed is None:
            await self.connect()
        return self._listed or []

    async def call_tool(
        self,
        tool_name: str,
        arguments: dict[str, Any] | None,
        meta: dict[str, Any] | None = None,
    ) -> CallToolResult:
        """Call a tool; an error that the model caused is a result with ``is_error``."""
        del meta
        result = await self._tools.call(tool_name, arguments)
        return CallToolResult.model_validate(
            {
                "content": result.content,
                "structuredContent": result.structured,
                "isError": result.is_error,
            }
        )

    async def list_prompts(self) -> ListPromptsResult:
        """Return no prompts: environments have none."""
        return ListPromptsResult(prompts=[])

    async def get_prompt(
        self, name: str, arguments: dict[str, Any] | None = None
    ) -> GetPromptResult:
        """Raise: environments have no prompts."""
        del arguments
        raise LookupError(f"{self.name} has no prompt {name!r}")


async def function_tools(
    environment: AnyEnvironment,
    *,
    only: Collection[str] | None = None,
    timeout_s: float | None = None,
) -> list[FunctionTool]:
    """Return the tools of an environment as `FunctionTool`s.

    Args:
        environment: The agent acts on it.
        only: Names of the tools to offer. None: all.
        timeout_s: Timeout of a call. None: the environment's.

    Raises:
        AenvError: The environment cannot be reached, or `only` names a tool that it lacks.
    """
    tools = EnvironmentTools(environment, only=only, timeout_s=timeout_s)

    def invoke(name: str) -> Any:
        async def run(context: Any, arguments: str) -> Any:
            del context
            return _output(await tools.call(name, arguments))

        return run

    return [
        FunctionTool(
            name=tool.name,
            description=tool.description,
            params_json_schema=tool.parameters,
            on_invoke_tool=invoke(tool.name),
            strict_json_schema=False,  # optional arguments are not strict
        )
        for tool in await tools.load()
    ]


def _output(result: ToolResult) -> Any:
    """Return text, or text and images, as tools of the SDK return them."""
    parts: list[Any] = []
    for block in result.content:
        match block:
            case {"type": "text", "text": str(text)}:
                parts.append(ToolOutputText(text=text))
            case {"type": "image", "data": str(data), "mimeType": str(kind)}:
                parts.append(ToolOutputImage(image_url=f"data:{kind};base64,{data}"))
            case {"type": str(other)}:
                parts.append(ToolOutputText(text=f"[{other}]"))
    if all(isinstance(part, ToolOutputText) for part in parts):
        return "\n".join(part.text for part in parts)
    return parts
