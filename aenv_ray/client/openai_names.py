"""Tools under names that OpenAI and most model servers accept."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from aenv_ray.errors import ToolInputInvalid, ToolNotFound

_OPENAI_NAME: Final = re.compile(r"[^a-zA-Z0-9_-]")
_OPENAI_NAME_LENGTH: Final = 64


def openai_name(name: str, taken: Mapping[str, str]) -> str:
    """Return `name` in OpenAI's alphabet, at most 64 characters, distinct from `taken`."""
    legal = _OPENAI_NAME.sub("_", name)[:_OPENAI_NAME_LENGTH] or "tool"
    if legal not in taken:
        return legal
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{legal[: _OPENAI_NAME_LENGTH - 9]}_{digest}"


class OpenAITools:
    """The tools of one listing, and the way back from their OpenAI names."""

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
        """Return the tool's own name for its OpenAI name.

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
    """Return a call's arguments from what a model wrote: JSON text or an object.

    Raises:
        ToolInputInvalid: The text is no JSON object.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as exc:
            raise ToolInputInvalid(
                f"arguments of {tool!r} are not JSON: {exc}", tool_name=tool
            ) from None
    if not isinstance(arguments, Mapping):
        raise ToolInputInvalid(f"arguments of {tool!r} are no object", tool_name=tool)
    return arguments
