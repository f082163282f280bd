"""Environments in the OpenAI Agents SDK: as an MCP server, or as function tools.

    agent = Agent("worker", mcp_servers=[EnvironmentServer(env)])
    agent = Agent("worker", tools=await function_tools(env))

The server calls over Ray, a gateway or one server, as the environment does, and without MCP's
HTTP. Both raise infrastructure errors out of ``Runner.run``.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

from mcp.types import (
    CallToolResult,
    GetPromptResult,
    ListPromptsResult,
    ListResourcesResult,
    ListResourceTemplatesResult,
    ReadResourceResult,
    Tool,
)

from aenv_ray.client.environment import Environment
from aenv_ray.client.sync import SyncEnvironment
from aenv_ray.errors import ConfigError
from aenv_ray.integrations.support.requirement import require
from aenv_ray.integrations.support.tools import AnyEnvironment, EnvironmentTools
from aenv_ray.models import ResourceContents, ToolResult

require("openai-agents", "openai-agents", "0.20", "1")

from agents import FunctionTool, ToolOutputImage, ToolOutputText  # noqa: E402
from agents.mcp import MCPServer  # noqa: E402

T = TypeVar("T")


class EnvironmentServer(MCPServer):
    """An environment as an `MCPServer` of the Agents SDK: its tools, prompts and resources.

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
        """Return the prompts of the environment."""
        listed = await self._asked(lambda environment: environment.list_prompts())
        return ListPromptsResult.model_validate({"prompts": listed})

    async def get_prompt(
        self, name: str, arguments: dict[str, Any] | None = None
    ) -> GetPromptResult:
        """Return a prompt with its arguments filled in.

        Raises:
            ToolNotFound: The environment has no such prompt.
        """
        found = await self._asked(lambda environment: environment.get_prompt(name, arguments))
        return GetPromptResult.model_validate(found.model_dump())

    async def list_resources(self, cursor: str | None = None) -> ListResourcesResult:
        """Return the resources of the environment, all at once."""
        del cursor
        listed = await self._asked(lambda environment: environment.list_resources())
        return ListResourcesResult.model_validate({"resources": listed})

    async def list_resource_templates(
        self, cursor: str | None = None
    ) -> ListResourceTemplatesResult:
        """Return the resources whose URI has parameters, all at once."""
        del cursor
        listed = await self._asked(lambda environment: environment.list_resource_templates())
        return ListResourceTemplatesResult.model_validate({"resourceTemplates": listed})

    async def read_resource(self, uri: str) -> ReadResourceResult:
        """Return what the resource at a URI contains.

        Raises:
            ToolNotFound: The environment has no such resource.
        """
        parts = await self._asked(lambda environment: environment.read_resource(str(uri)))
        return ReadResourceResult.model_validate({"contents": [_contents(one) for one in parts]})

    async def _asked(self, call: Callable[[Environment], Coroutine[Any, Any, T]]) -> T:
        environment = self._tools.environment
        if isinstance(environment, SyncEnvironment):
            return await asyncio.wrap_future(environment.submit(call))
        if isinstance(environment, Environment):
            return await call(environment)
        raise ConfigError(
            f"an episode of {self.name} has tools, and no prompts or resources",
            hint="pass an Environment instead of an episode",
        )


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


def _contents(part: ResourceContents) -> dict[str, Any]:
    content = part.content
    shown = (
        {"text": content}
        if isinstance(content, str)
        else {"blob": base64.b64encode(content).decode()}
    )
    return {"uri": part.uri, "mimeType": part.mime_type or None, **shown}


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
