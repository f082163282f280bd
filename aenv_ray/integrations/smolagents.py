"""Tools of an environment for smolagents, whose tools are called without an event loop.

    agent = ToolCallingAgent(tools=tools(env), model=model, step_callbacks=[end_if_void])

A tool that fails raises `ToolFailed`, which the agent shows to its model. smolagents shows it every
other exception of a tool too, those of the infrastructure included; `end_if_void` ends the run.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Collection, Mapping
from typing import Any, Final

from aenv_ray.client.sync import SyncEnvironment
from aenv_ray.errors import AenvError
from aenv_ray.integrations.support.requirement import require
from aenv_ray.integrations.support.schemas import simple_type
from aenv_ray.integrations.support.tools import (
    EnvironmentTools,
    FrameworkTool,
    identifier,
    is_identifier,
    model_text,
)

require("smolagents", "smolagents", "1.20", "2")

from smolagents import Tool  # noqa: E402

_TYPES: Final = frozenset({"string", "boolean", "integer", "number", "array", "object", "null"})
_OWN_ARGUMENTS: Final = frozenset({"self", "sanitize_inputs_outputs"})
"""Own parameters of the method that agents pass a tool's arguments to: no tool argument may have
these names."""


class ToolFailed(Exception):
    """A tool failed; the message is the tool's."""


class EnvironmentTool(Tool):
    """One tool of an environment."""

    skip_forward_signature_validation = True
    output_type = "any"

    def __init__(self, tools: EnvironmentTools, tool: FrameworkTool) -> None:
        self.name = tool.name
        self.description = tool.description or tool.own_name
        required = tool.parameters.get("required", ())
        self.inputs = {
            name: {
                "type": kind if (kind := simple_type(schema)) in _TYPES else "any",
                "description": str(schema.get("description") or name),
                **({} if name in required else {"nullable": True}),
            }
            for name, schema in tool.parameters["properties"].items()
        }
        self._tools = tools
        super().__init__()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the tool; return its data, an image as one of PIL, or a list of text and images."""
        given = dict(zip(self.inputs, args, strict=False)) | kwargs
        result = self._tools.call_blocking(self.name, given)
        if result.is_error:
            raise ToolFailed(model_text(result))
        if all(block.get("type") == "text" for block in result.content):
            return result.data
        parts = [_part(block) for block in result.content]
        return parts[0] if len(parts) == 1 else parts


def _part(block: Mapping[str, Any]) -> Any:
    match block:
        case {"type": "image", "data": str(data)}:
            import PIL.Image  # a requirement of smolagents

            return PIL.Image.open(io.BytesIO(base64.b64decode(data)))
        case {"type": "text", "text": str(text)}:
            return text
    return f"[{block.get('type')}]"


def tools(
    environment: SyncEnvironment,
    *,
    only: Collection[str] | None = None,
    timeout_s: float | None = None,
) -> list[EnvironmentTool]:
    """Return the tools of an environment, under names that are Python identifiers.

    Args:
        environment: The agent acts on it.
        only: Names of the tools to offer. None: all.
        timeout_s: Timeout of a call. None: the environment's.

    Raises:
        ConfigError: The environment is not a `SyncEnvironment`, or lacks a tool of `only`.
        AenvError: The environment cannot be reached.
    """
    source = EnvironmentTools(
        environment, only=only, timeout_s=timeout_s, naming=identifier,
        takes=lambda argument: is_identifier(argument) and argument not in _OWN_ARGUMENTS,
    )  # fmt: skip
    return [EnvironmentTool(source, tool) for tool in source.load_blocking()]


def end_if_void(step: Any) -> None:
    """Raise the failure that a step of an agent has met, if its environment has failed.

    For ``step_callbacks`` of an agent, whose ``run`` it ends.

    Raises:
        AenvError: The environment's; the model has not caused it.
    """
    error: BaseException | None = getattr(step, "error", None)
    while error is not None:
        if isinstance(error, AenvError):
            raise error
        error = error.__cause__ or error.__context__
