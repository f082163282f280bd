"""Tools of an environment as a workbench of AutoGen.

agent = AssistantAgent("worker", model_client=…, workbench=EnvironmentWorkbench(env))
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

from aenv_ray.errors import ConfigError
from aenv_ray.integrations.support.requirement import require
from aenv_ray.integrations.support.tools import AnyEnvironment, EnvironmentTools

require("autogen-core", "autogen", "0.7", "1")

from autogen_core import CancellationToken, Image  # noqa: E402
from autogen_core.tools import (  # noqa: E402
    ImageResultContent,
    TextResultContent,
    ToolResult,
    ToolSchema,
    Workbench,
)
from pydantic import BaseModel  # noqa: E402


class _NoConfig(BaseModel):
    pass


class EnvironmentWorkbench(Workbench):
    """The tools of an environment.

    Args:
        environment: The agents act on it; stopping the workbench leaves its instance.
        only: Names of the tools to offer. None: all.
        timeout_s: Timeout of a call. None: the environment's.
    """

    component_config_schema = _NoConfig

    def __init__(
        self,
        environment: AnyEnvironment,
        *,
        only: Collection[str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._tools = EnvironmentTools(environment, only=only, timeout_s=timeout_s)

    async def list_tools(self) -> list[ToolSchema]:
        """Return the tools of the environment."""
        return [
            ToolSchema(name=tool.name, description=tool.description, parameters=tool.parameters)
            for tool in await self._tools.load()
        ]

    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        cancellation_token: CancellationToken | None = None,
        call_id: str | None = None,
    ) -> ToolResult:
        """Call a tool; an error that the model caused is a result with ``is_error``."""
        del call_id
        call = asyncio.ensure_future(self._tools.call(name, arguments))
        if cancellation_token is not None:
            cancellation_token.link_future(call)
        found = await call
        content: list[TextResultContent | ImageResultContent] = []
        for block in found.content:
            match block:
                case {"type": "image", "data": str(data)}:
                    content.append(ImageResultContent(content=Image.from_base64(data)))
                case {"type": "text", "text": str(text)}:
                    content.append(TextResultContent(content=text))
                case {"type": str(other)}:
                    content.append(TextResultContent(content=f"[{other}]"))
        return ToolResult(name=name, result=content, is_error=found.is_error)

    async def start(self) -> None:
        """List the tools, which creates the instance if there is none yet."""
        await self._tools.load()

    async def stop(self) -> None:
        """Do nothing: the caller releases the environment."""

    async def reset(self) -> None:
        """Do nothing: reset the environment itself, `Environment.reset`."""

    async def save_state(self) -> Mapping[str, Any]:
        """Raise: the state is the sandbox's."""
        raise _no_state()

    async def load_state(self, state: Mapping[str, Any]) -> None:
        """Raise: the state is the sandbox's."""
        raise _no_state()


def _no_state() -> ConfigError:
    return ConfigError(
        "the state of an environment stays in its sandbox and cannot be saved",
        hint="attach to the running instance with Environment.attach",
    )
