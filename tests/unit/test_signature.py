"""From a Python function to its JSON Schema and the validator of its arguments."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel, Field

from aenv_ray.runtime.faults import Fault
from aenv_ray.runtime.signature import Signature


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    x: int
    y: int = 0


class Shape(BaseModel):
    points: list[Point]


def everything(
    text: str,
    count: int,
    ratio: float,
    flag: bool,
    names: list[str],
    color: Color,
    shape: Shape,
    note: Optional[str] = None,  # noqa: UP045  # the spelling that many projects use
    mode: Literal["a", "b"] = "a",
    limit: Annotated[int, Field(ge=1)] = 5,
) -> None:
    """Take everything.

    Args:
        text: Some text.
        limit: How many.
    """


ARGUMENTS: dict[str, Any] = {
    "text": "t",
    "count": 1,
    "ratio": 0.5,
    "flag": True,
    "names": ["a"],
    "color": "red",
    "shape": {"points": [{"x": 1}]},
}


def refusal(function: Callable[..., Any], arguments: dict[str, Any]) -> Fault:
    with pytest.raises(Fault) as caught:
        Signature(function).bind("tool", arguments)
    assert caught.value.code == "tool_input_invalid"
    assert caught.value.context == {"tool_name": "tool"}
    return caught.value


def test_the_schema_has_types_defaults_and_descriptions() -> None:
    signature = Signature(everything)
    properties = signature.schema["properties"]
    assert signature.description == "Take everything."
    assert properties["text"] == {"type": "string", "description": "Some text."}
    assert properties["count"]["type"] == "integer"
    assert properties["ratio"]["type"] == "number"
    assert properties["flag"]["type"] == "boolean"
    assert properties["names"] == {"type": "array", "items": {"type": "string"}}
    assert properties["note"]["anyOf"] == [{"type": "string"}, {"type": "null"}]
    assert properties["note"]["default"] is None
    assert properties["mode"]["enum"] == ["a", "b"]
    assert properties["limit"]["default"] == 5
    assert properties["limit"]["description"] == "How many."
    assert properties["limit"]["minimum"] == 1
    assert signature.schema["required"] == list(ARGUMENTS)
    assert signature.schema["additionalProperties"] is False
    assert set(signature.schema["$defs"]) == {"Color", "Point", "Shape"}


def test_arguments_become_the_types_that_the_function_wants() -> None:
    bound = Signature(everything).bind("tool", ARGUMENTS)
    assert bound["color"] is Color.RED
    assert bound["shape"] == Shape(points=[Point(x=1)])
    assert (bound["note"], bound["mode"], bound["limit"]) == (None, "a", 5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"count": "many"}, "count: Input should be a valid integer"),
        ({"count": 1.5}, "count: "),
        ({"text": 3}, "text: Input should be a valid string"),
        ({"names": "a"}, "names: Input should be a valid list"),
        ({"names": [1]}, "names.0: "),
        ({"color": "green"}, "color: Input should be 'red' or 'blue'"),
        ({"shape": {"points": [{"y": 1}]}}, "shape.points.0.x: Field required"),
        ({"mode": "c"}, "mode: "),
        ({"limit": 0}, "limit: Input should be greater than or equal to 1"),
        ({"extra": 1}, "extra: Extra inputs are not permitted"),
        ({"p_text": "t"}, "p_text: Extra inputs are not permitted"),
    ],
)
def test_each_bad_argument_is_named(changes: dict[str, Any], words: str) -> None:
    fault = refusal(everything, ARGUMENTS | changes)
    assert words in fault.message
    assert "tool takes text, count, ratio" in (fault.hint or "")


def test_all_problems_are_told_at_once_and_no_value_is_repeated() -> None:
    """Invariant 10: a secret that was given in the wrong place is in no message."""
    fault = refusal(everything, {"count": "s3cret", "extra": "s3cret"})
    for name in ("text", "count", "extra", "shape"):
        assert f"{name}: " in fault.message
    assert "s3cret" not in f"{fault.message}{fault.hint}"


def test_a_function_without_parameters_takes_none() -> None:
    def nothing() -> None: ...

    assert Signature(nothing).bind("tool", {}) == {}
    assert Signature(nothing).schema["properties"] == {}
    assert refusal(nothing, {"a": 1}).hint == "tool takes no arguments"


def test_keyword_arguments_take_anything() -> None:
    def open_ended(a: int, **rest: Any) -> None: ...

    signature = Signature(open_ended)
    assert signature.bind("tool", {"a": 1, "b": [2]}) == {"a": 1, "b": [2]}
    assert signature.schema["additionalProperties"] is True
    assert "rest" not in signature.schema["properties"]


def test_a_parameter_without_a_type_takes_anything() -> None:
    def untyped(value, other=3) -> None: ...  # type: ignore[no-untyped-def]

    assert Signature(untyped).bind("tool", {"value": {"a": [1]}}) == {
        "value": {"a": [1]},
        "other": 3,
    }


def test_names_that_pydantic_uses_itself_are_ordinary_names() -> None:
    def awkward(_private: int, schema: str, model_config: int, self: int, json: bool) -> None: ...

    arguments = {"_private": 1, "schema": "s", "model_config": 2, "self": 3, "json": True}
    signature = Signature(awkward)
    assert signature.bind("tool", arguments) == arguments
    assert signature.names == list(arguments)
    assert list(signature.schema["properties"]) == list(arguments)


def test_a_mutable_default_is_not_shared_between_calls() -> None:
    def collect(items: list[int] = []) -> None: ...  # noqa: B006  # what is tested

    signature = Signature(collect)
    signature.bind("tool", {})["items"].append(1)
    assert signature.bind("tool", {})["items"] == []


def test_positional_only_parameters_are_refused_when_registered() -> None:
    def positional(a: int, /) -> None: ...

    with pytest.raises(TypeError, match="positional: parameter 'a' is positional-only"):
        Signature(positional)


def test_a_type_without_a_json_form_is_refused_when_registered() -> None:
    class Opaque: ...

    def opaque(value: Opaque) -> None: ...

    opaque.__annotations__ = {"value": Opaque}

    def callback(value: Callable[[], int]) -> None: ...

    for function in (opaque, callback):
        with pytest.raises(TypeError, match=function.__name__):
            Signature(function)


def test_a_type_hint_that_does_not_resolve_is_said() -> None:
    def unknown(value: NoSuchType) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(TypeError, match=r"unknown: its type hints do not resolve: .*NoSuchType"):
        Signature(unknown)
