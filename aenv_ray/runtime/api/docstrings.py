"""From a docstring to a description for a model and a description per argument."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

_SECTION = re.compile(
    r"(args|arguments|parameters|params|returns?|yields?|raises|examples?|notes?|attributes)\s*:?",
    re.IGNORECASE,
)
_ARGUMENT_SECTION = re.compile(r"(args|arguments|parameters|params)\s*:?", re.IGNORECASE)
_GOOGLE_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_NUMPY_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?::\s*\S.*)?")
_SPHINX_ARGUMENT = re.compile(r":param\s+(?:[\w\[\], ]+\s+)?(\w+)\s*:\s*(.*)")


def describe(function: Callable[..., Any]) -> tuple[str | None, dict[str, str]]:
    """Return the text before the first section, and the text of each documented argument.

    Understands the Google, NumPy and Sphinx layouts. None when there is no docstring.
    """
    text = inspect.getdoc(function)
    if not text:
        return None, {}
    lines = text.splitlines()
    body: list[str] = []
    arguments: dict[str, str] = {}
    index = 0
    while index < len(lines):
        line = lines[index]
        sphinx = _SPHINX_ARGUMENT.match(line.strip())
        if sphinx:
            arguments[sphinx[1]] = sphinx[2].strip()
        elif _is_section(lines, index):
            end = _section_end(lines, index)
            if _ARGUMENT_SECTION.fullmatch(line.strip()):
                arguments.update(_arguments(lines[index + 1 : end]))
            index = end
            continue
        elif not line.strip().startswith((":return", ":rtype", ":raise")):
            body.append(line)
        index += 1
    return "\n".join(body).strip() or None, arguments


def _is_section(lines: list[str], index: int) -> bool:
    line = lines[index]
    if line.startswith((" ", "\t")) or not _SECTION.fullmatch(line.strip()):
        return False
    following = lines[index + 1] if index + 1 < len(lines) else ""
    return line.rstrip().endswith(":") or bool(re.fullmatch(r"-{3,}", following.strip()))


def _section_end(lines: list[str], start: int) -> int:
    underlined = start + 1 < len(lines) and re.fullmatch(r"-{3,}", lines[start + 1].strip())
    for index in range(start + 1, len(lines)):
        if _is_section(lines, index):
            return index
        flush_left = lines[index].strip() and not lines[index].startswith((" ", "\t"))
        if flush_left and not underlined:
            return index
    return len(lines)


def _arguments(lines: list[str]) -> dict[str, str]:
    numpy = bool(lines) and bool(re.fullmatch(r"-{3,}", lines[0].strip()))
    block = inspect.cleandoc("\n".join(lines[1:] if numpy else lines)).splitlines()
    found: dict[str, str] = {}
    name = ""
    for line in block:
        if not line.strip():
            continue
        indented = line.startswith((" ", "\t"))
        match = (
            None
            if indented
            else (_NUMPY_ARGUMENT if numpy else _GOOGLE_ARGUMENT).fullmatch(line.strip())
        )
        if match:
            name = match[1]
            found[name] = "" if numpy else match[2].strip()
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return {key: value for key, value in found.items() if value}
