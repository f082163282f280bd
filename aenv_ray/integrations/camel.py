"""Tools of an environment for CAMEL.

    toolkit = await environment_toolkit(env)
    agent = ChatAgent("You solve tasks.", model=model, tools=toolkit.get_tools())
    response = await agent.astep("Count the files in /etc.")
    toolkit.check()

With a `SyncEnvironment`, ``environment_toolkit_blocking`` does the same for ``agent.step``. CAMEL
shows every exception of a tool to its model, those of the infrastructure too: `check` raises them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from aenv_ray.errors import AenvError
from aenv_ray.integrations.support.requirement import require
from aenv_ray.integrations.support.tools import (
    AnyEnvironment,
    BlockingEnvironment,
    EnvironmentTools,
    FrameworkTool,
    images,
    model_text,
)
from aenv_ray.models import ToolResult

require("camel-ai", "camel", "0.2.90", "0.3")
require(
    "mcp", "camel", "1.3", "2",  # CAMEL imports names that version 2 has removed
    way_out="uv pip install 'aenv-ray[camel]' --overrides FILE, with the line mcp<2 in the file",
)  # fmt: skip

from camel.toolkits import FunctionTool  # noqa: E402
from camel.toolkits.base import BaseToolkit, manual_timeout  # noqa: E402
from camel.utils.tool_result import ToolResult as CamelResult  # noqa: E402


class ToolFailed(Exception):
    """A tool failed; the message is the tool's."""


class EnvironmentToolkit(BaseToolkit):
    """The tools of one environment.

    Args:
        tools: Of the environment, loaded.
        offered: Those to offer.
        is_blocking: They are called without an event loop.
    """

    def __init__(
        self, tools: EnvironmentTools, offered: Collection[FrameworkTool], *, is_blocking: bool
    ) -> None:
        super().__init__()
        self._tools = tools
        self._offered = list(offered)
        self._is_blocking = is_blocking
        self.failure: AenvError | None = None
        """The first failure of the infrastructure; the episode is void."""

    @manual_timeout
    def check(self) -> None:
        """Raise the failure of the infrastructure, if there was one.

        Raises:
            AenvError: The episode is void.
        """
        if self.failure is not None:
            raise self.failure

    @manual_timeout
    def get_tools(self) -> list[FunctionTool]:
        """Return the tools."""
        return [
            FunctionTool(
                _blocking(self, tool) if self._is_blocking else _awaited(self, tool),
                openai_tool_schema={
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description or tool.own_name,
                        "parameters": tool.parameters,
                    },
                },
            )
            for tool in self._offered
        ]

    @manual_timeout
    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool; see `_shown` for what CAMEL gets."""
        try:
            return _shown(await self._tools.call(name, arguments))
        except AenvError as exc:
            self.failure = self.failure or exc
            raise

    @manual_timeout
    def call_blocking(self, name: str, arguments: dict[str, Any]) -> Any:
        """Do the same as `call`, without an event loop."""
        try:
            return _shown(self._tools.call_blocking(name, arguments))
        except AenvError as exc:
            self.failure = self.failure or exc
            raise


def _awaited(toolkit: EnvironmentToolkit, tool: FrameworkTool) -> Any:
    async def call(**arguments: Any) -> Any:
        return await toolkit.call(tool.name, arguments)

    call.__name__ = tool.name
    return call


def _blocking(toolkit: EnvironmentToolkit, tool: FrameworkTool) -> Any:
    def call(**arguments: Any) -> Any:
        return toolkit.call_blocking(tool.name, arguments)

    call.__name__ = tool.name
    return call


def _takes(argument: str) -> bool:
    """Return whether CAMEL's method can be called with an argument of this name."""
    return argument != "self"


def _shown(result: ToolResult) -> Any:
    """Return text, or text with images.

    Raises:
        ToolFailed: The tool failed.
    """
    if result.is_error:
        raise ToolFailed(model_text(result))
    shown = [f"data:{kind};base64,{data}" for kind, data in images(result)]
    return CamelResult(model_text(result), shown) if shown else model_text(result)


async def environment_toolkit(
    environment: AnyEnvironment,
    *,
    only: Collection[str] | None = None,
    timeout_s: float | None = None,
) -> EnvironmentToolkit:
    """Return the tools of an environment, for ``agent.astep``.

    Args:
        environment: The agent acts on it.
        only: Names of the tools to offer. None: all.
        timeout_s: Timeout of a call. None: the environment's.

    Raises:
        ConfigError: The environment lacks a tool of `only`.
        AenvError: The environment cannot be reached.
    """
    tools = EnvironmentTools(environment, only=only, timeout_s=timeout_s, takes=_takes)
    return EnvironmentToolkit(tools, await tools.load(), is_blocking=False)


def environment_toolkit_blocking(
    environment: BlockingEnvironment,
    *,
    only: Collection[str] | None = None,
    timeout_s: float | None = None,
) -> EnvironmentToolkit:
    """Do the same as `environment_toolkit` with a `SyncEnvironment`, for ``agent.step``."""
    tools = EnvironmentTools(environment, only=only, timeout_s=timeout_s, takes=_takes)
    return EnvironmentToolkit(tools, tools.load_blocking(), is_blocking=True)
