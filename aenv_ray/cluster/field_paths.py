"""Places inside an object, written as kustomize's replacements write them.

``spec.containers.[name=ray].image``: keys and indices between dots, ``[key=value]`` for the
elements of a list that have it, ``*`` for all elements, ``[a.b/c]`` for a key with dots in it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from aenv_ray.errors import ConfigError


def split(path: str) -> list[str]:
    r"""Return the parts of a path; dots in brackets, or after a backslash, divide nothing."""
    parts, part, depth, escaped = [], "", 0, False
    for character in path:
        if escaped or (character not in ".\\" or depth):
            part += character
            escaped = False
            depth += {"[": 1, "]": -1}.get(character, 0)
        elif character == "\\":
            escaped = True
        else:
            parts.append(part)
            part = ""
    parts.append(part)
    return [part for part in parts if part]


def get(document: Any, path: str) -> Any:
    """Return what is at a path; None where nothing is.

    Raises:
        ConfigError: The path leads to several places.
    """
    found = list(_places(document, split(path), create=False))
    if len(found) > 1:
        raise ConfigError(f"{path} is {len(found)} places, and one is wanted")
    return found[0][0][found[0][1]] if found else None


def put(document: Any, path: str, value: Any, *, create: bool = False) -> int:
    """Replace what is at a path.

    A text, number or flag in place of another becomes one of that kind; what is a map or a list is
    replaced as it is.

    Args:
        document: Changed in place.
        path: May be several places.
        value: Copied.
        create: Make the last keys where they are missing.

    Returns:
        How many places there are.

    Raises:
        ConfigError: A text does not become a number or a flag.
    """
    count = 0
    for container, key in _places(document, split(path), create=create):
        existing = container[key]
        container[key] = _as(existing, value, path)
        count += 1
    return count


def _places(node: Any, parts: list[str], *, create: bool) -> Iterator[tuple[Any, Any]]:
    """Yield the container and key of each place."""
    part, rest = parts[0], parts[1:]
    for key in _keys(node, part, create=create):
        if not rest:
            yield node, key
            continue
        if create and isinstance(node, dict) and node[key] is None:
            node[key] = {}
        yield from _places(node[key], rest, create=create)


def _keys(node: Any, part: str, *, create: bool) -> list[Any]:
    if isinstance(node, list):
        if part == "*":
            return list(range(len(node)))
        if part.startswith("[") and "=" in part:
            name, _, value = part[1:-1].partition("=")
            return [
                index
                for index, element in enumerate(node)
                if isinstance(element, dict) and str(element.get(name)) == value
            ]
        return [int(part)] if part.isdigit() and int(part) < len(node) else []
    if not isinstance(node, dict):
        return []
    key = part[1:-1] if part.startswith("[") else part
    if key not in node:
        if not create:
            return []
        node[key] = None
    return [key]


def _as(existing: Any, value: Any, path: str) -> Any:
    """Return a value as the kind of scalar that is there."""
    if isinstance(value, dict | list) or isinstance(existing, dict | list) or existing is None:
        return copy.deepcopy(value)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(existing, str):
        return text
    if isinstance(existing, bool):
        if text in {"true", "false"}:
            return text == "true"
    else:
        try:
            return int(text)
        except ValueError:
            pass
    raise ConfigError(f"{path} is {existing!r}, and {value!r} is no such thing")
