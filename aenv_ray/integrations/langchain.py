"""Tools of an environment for LangChain and LangGraph.

    agent = create_react_agent(model, await tools(env))

A tool that fails raises `ToolException`, which LangChain shows to the model. Infrastructure errors
pass through ``invoke`` and ``ainvoke``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from aenv_ray.integrations.support.requirement import require
from aenv_ray.integrations.support.tools import AnyEnvironment, EnvironmentTools, model_text
from aenv_ray.models import ToolResult

require("langchain-core", "langchain", "1.0", "2")

from langchain_core.tools import StructuredTool, ToolException  # noqa: E402

_OWN_ARGUMENTS: Final = frozenset({"self", "config", "run_manager"})
"""Own parameters of the methods that LangChain passes a tool's arguments to: no tool argument may
have these names."""


async def tools(
    environment: AnyEnvironment,
    *,
    only: Collection[str] | None = None,
    timeout_s: float | None = None,
) -> list[StructuredTool]:
    """Return the tools of an environment as `StructuredTool`s.

    Args:
        environment: The agent acts on it. With a `SyncEnvironment`, the tools can also be called
            by ``invoke``; with an `Environment` only by ``ainvoke``.
        only: Names of the tools to offer. None: all.
        timeout_s: Timeout of a call. None: the environment's.

    Returns:
        Tools whose artifact is the `ToolResult`.

    Raises:
        AenvError: The environment cannot be reached, or `only` names a tool that it lacks.
    """
    source = EnvironmentTools(
        environment, only=only, timeout_s=timeout_s,
        takes=lambda argument: argument not in _OWN_ARGUMENTS,
    )  # fmt: skip

    def tool(name: str, description: str, parameters: dict[str, Any]) -> StructuredTool:
        async def call(**arguments: Any) -> tuple[Any, ToolResult]:
            return _output(await source.call(name, arguments))

        def call_blocking(**arguments: Any) -> tuple[Any, ToolResult]:
            return _output(source.call_blocking(name, arguments))

        return StructuredTool(
            name=name,
            description=description,
            args_schema=parameters,
            func=call_blocking,
            coroutine=call,
            response_format="content_and_artifact",
            handle_tool_error=True,
        )

    return [tool(one.name, one.description, one.parameters) for one in await source.load()]


def _output(result: ToolResult) -> tuple[Any, ToolResult]:
    if result.is_error:
        raise ToolException(model_text(result) or "the tool failed")
    if all(block.get("type") == "text" for block in result.content):
        return result.text(), result
    blocks: list[Any] = []
    for block in result.content:
        match block:
            case {"type": "image", "data": str(data), "mimeType": str(kind)}:
                blocks.append({"type": "image", "base64": data, "mime_type": kind})
            case {"type": "text", "text": str(text)}:
                blocks.append({"type": "text", "text": text})
            case {"type": str(other)}:
                blocks.append({"type": "text", "text": f"[{other}]"})
    return blocks, result
