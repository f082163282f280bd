"""Schemas that a framework cannot express are refused, with the tool's name."""

from __future__ import annotations

import pytest

from aenv_ray.errors import ConfigError
from aenv_ray.integrations.support.schemas import check_keywords, flat_parameters

KEPT = ("type", "properties", "items", "anyOf")


@pytest.mark.parametrize(
    "part",
    [
        {"oneOf": [{"type": "string"}]},
        {"type": "array", "items": {"const": 1}},
        {"anyOf": [{"type": "object", "additionalProperties": {"allOf": []}}]},
    ],
)
def test_a_keyword_that_changes_what_is_valid_is_refused_where_it_is_dropped(
    part: dict[str, object],
) -> None:
    with pytest.raises(ConfigError, match="tool 'pick': its schema uses"):
        check_keywords({"type": "object", "properties": {"x": part}}, "pick", allowed=KEPT)


def test_limits_may_be_dropped() -> None:
    part = {"type": "array", "minItems": 1, "items": {"type": "integer", "maximum": 3}}
    check_keywords({"type": "object", "properties": {"x": part}}, "pick", allowed=KEPT)


def test_flat_parameters_say_in_words_what_they_cannot_express() -> None:
    """verl refuses arguments without a type, and drops the items of an array."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "enum": ["a", "b"]},
            "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
            "paths": {"type": "array", "items": {"type": "string"}, "description": "Which."},
            "value": {},
        },
        "required": ["name"],
    }
    flat = flat_parameters(schema)
    properties = flat["properties"]
    assert properties["name"] == {"type": "string", "description": "name", "enum": ["a", "b"]}
    assert properties["limit"]["type"] == ["integer", "null"]
    assert properties["paths"]["description"].startswith('Which. JSON Schema: {"type": "array"')
    assert "string" in properties["value"]["type"]
    assert flat["required"] == ["name"]
