"""Tool names that OpenAI and most model servers accept."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Container, Iterable, Mapping
from typing import Any, Final

from aenv_ray.errors import ToolInputInvalid, ToolNotFound

_OPENAI_NAME: Final = re.compile(r"[^a-zA-Z0-9_-]")
_OPENAI_NAME_LENGTH: Final = 64


def openai_name(name: str, taken: Mapping[str, str]) -> str:
    """Return `name` with only characters that OpenAI allows, at most 64, distinct from `taken`."""
    return distinct_name(_OPENAI_NAME.sub("_", name) or "tool", name, taken)


def distinct_name(legal: str, name: str, taken: Container[str]) -> str:
    """Return `legal`, cut to 64 characters; with a digest of `name` if that is in `taken`."""
    legal = legal[:_OPENAI_NAME_LENGTH]
    if legal not in taken:
        return legal
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{legal[: _OPENAI_NAME_LENGTH - 9]}_{digest}"


class OpenAIToolNames:
    """The tools of one listing, and the mapping from OpenAI names to tool names."""

    def __init__(self, tools: Iterable[Mapping[str, Any]] = ()) -> None:
        self._own: dict[str, str] = {}
        self.listed: list[dict[str, Any]] = []
        """OpenAI function tools."""
        for tool in tools:
            name = openai_name(tool["name"], taken=self._own)
            self._own[name] = tool["name"]
            function = {
                "name": name,
                "description": tool.get("description") or "",
                "parameters": tool["inputSchema"],
            }
            self.listed.append({"type": "function", "function": function})

    def own_name(self, name: str) -> str:
        """Return the tool name for an OpenAI name.

        Raises:
            ToolNotFound: No tool was listed under that name.
        """
        if name not in self._own:
            known = ", ".join(self._own) or "none; call list_openai_tools first"
            raise ToolNotFound(
                f"there is no OpenAI tool name {name!r}", tool_name=name, hint=f"names: {known}"
            )
        return self._own[name]


def openai_arguments(tool: str, arguments: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a model's tool call, given as JSON text or an object.

    Raises:
        ToolInputInvalid: They are not a JSON object.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as exc:
            raise ToolInputInvalid(
                f"arguments of {tool!r} are not JSON: {exc}",
                tool_name=tool,
                hint="pass a JSON object of the arguments by name",
            ) from None
    if not isinstance(arguments, Mapping):
        raise ToolInputInvalid(
            f"arguments of {tool!r} are not an object",
            tool_name=tool,
            hint="pass a JSON object of the arguments by name",
        )
    return arguments
