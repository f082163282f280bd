"""JSON Schemas in the forms that frameworks accept."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Final

from aenv_ray.errors import ConfigError

JsonSchema = dict[str, Any]


def inlined(schema: Mapping[str, Any], tool: str) -> JsonSchema:
    """Return a schema without ``$ref`` and ``$defs``: each reference becomes what it names.

    Args:
        schema: The schema of a tool's arguments.
        tool: Named in the error.

    Raises:
        ConfigError: A definition contains itself, or a reference leads nowhere.
    """
    definitions = {
        f"#/{keyword}/{name}": definition
        for keyword in ("$defs", "definitions")
        for name, definition in schema.get(keyword, {}).items()
    }

    def expanded(part: Any, inside: tuple[str, ...]) -> Any:
        if isinstance(part, list):
            return [expanded(item, inside) for item in part]
        if not isinstance(part, Mapping):
            return part
        reference = part.get("$ref")
        if not isinstance(reference, str):
            return {key: expanded(value, inside) for key, value in part.items()}
        if reference in inside:
            raise ConfigError(
                f"tool {tool!r}: {reference} contains itself, which this framework cannot express",
                hint="declare the argument as a JSON object (dict) or as text",
            )
        if reference not in definitions:
            raise ConfigError(
                f"tool {tool!r}: its schema refers to {reference}, which it lacks",
                hint="add it to $defs of the tool's schema",
            )
        beside = {key: value for key, value in part.items() if key != "$ref"}
        named = expanded(definitions[reference], (*inside, reference))
        return {**named, **expanded(beside, inside)}

    top = {key: value for key, value in schema.items() if key not in {"$defs", "definitions"}}
    found = expanded(top, ())
    return {"type": "object", "properties": {}, **found}


_STRUCTURE: Final = frozenset({"oneOf", "allOf", "anyOf", "not", "if", "prefixItems", "const"})
"""Keywords without which a model would not know what values are valid; others may be dropped."""


def check_keywords(schema: Mapping[str, Any], tool: str, *, allowed: Collection[str]) -> None:
    """Check that a framework keeps the structure of a schema.

    Args:
        schema: The schema of a tool's arguments, or a part of it.
        tool: Named in the error.
        allowed: Keywords that the framework keeps; it drops the others.

    Raises:
        ConfigError: It drops one that the model needs.
    """
    for keyword in schema.keys() & _STRUCTURE - frozenset(allowed):
        raise ConfigError(
            f"tool {tool!r}: its schema uses {keyword!r}, which this framework cannot express",
            hint="declare the argument with one type, or leave the tool out with only=…",
        )
    for name in ("properties", "patternProperties"):
        for part in schema.get(name, {}).values():
            check_keywords(part, tool, allowed=allowed)
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), Mapping):
            check_keywords(schema[name], tool, allowed=allowed)
    for part in schema.get("anyOf", ()):
        check_keywords(part, tool, allowed=allowed)


def simple_type(schema: Mapping[str, Any]) -> str:
    """Return the one JSON type of a schema; ``any`` if it allows several."""
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return kinds
    options = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    names = {simple_type(option) for option in options} - {"null"}
    return names.pop() if len(names) == 1 else "any"


_ALL_TYPES: Final = ("string", "number", "integer", "boolean", "array", "object", "null")


def flat_parameters(schema: Mapping[str, Any]) -> JsonSchema:
    """Return a schema of arguments in which each has only a type, a description and choices.

    What this cannot express, such as the items of an array, becomes part of the description.
    """
    return {
        "type": "object",
        "properties": {
            name: _flat(name, part) for name, part in schema.get("properties", {}).items()
        },
        "required": list(schema.get("required", ())),
    }


def _flat(name: str, schema: Mapping[str, Any]) -> JsonSchema:
    kinds = sorted(_types(schema))
    plain = {"type", "description", "enum", "title", "default"}
    text = str(schema.get("description") or name)
    if schema.keys() - plain:
        text = f"{text} JSON Schema: {json.dumps(schema)}"
    flat: JsonSchema = {"type": kinds[0] if len(kinds) == 1 else kinds, "description": text}
    if "enum" in schema:
        flat["enum"] = list(schema["enum"])
    return flat


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types of the values that a schema allows."""
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds}
    if kinds is not None:
        return set(kinds)
    options = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if not options:
        return set(_ALL_TYPES)
    return {kind for option in options for kind in _types(option)}
