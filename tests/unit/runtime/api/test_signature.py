"""The schema for models, and the validation of arguments."""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel, Field

from aenv_ray.runtime.api.signature import Signature
from aenv_ray.runtime.faults import Fault


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Inner(BaseModel):
    name: str
    size: int = 1


class Outer(BaseModel):
    inner: Inner
    more: list[Inner] = []


def every(
    text: str,
    number: int,
    ratio: float,
    flag: bool,
    names: list[str],
    table: dict[str, int],
    maybe: Optional[str] = None,  # noqa: UP045  # environments write it so
    either: int | str = 3,
    colour: Colour = Colour.RED,
    mode: Literal["fast", "slow"] = "fast",
    outer: Outer | None = None,
    anything: Any = None,
    bounded: Annotated[int, Field(ge=1, le=5, description="How far.")] = 2,
    pair: tuple[int, str] = (1, "a"),
) -> str:
    """Take everything.

    Args:
        text: Some text.
        number: A number,
            told in two lines.
    """
    return text


FULL = {
    "text": "t", "number": 1, "ratio": 0.5, "flag": True, "names": ["a"], "table": {"k": 1},
}  # fmt: skip


def test_the_schema_names_every_parameter_with_its_type() -> None:
    schema = Signature(every).schema
    properties = schema["properties"]
    assert schema["type"] == "object"
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["text", "number", "ratio", "flag", "names", "table"]
    types = {name: properties[name].get("type") for name in FULL}
    assert types == {
        "text": "string", "number": "integer", "ratio": "number", "flag": "boolean",
        "names": "array", "table": "object",
    }  # fmt: skip
    assert properties["text"]["description"] == "Some text."
    assert properties["number"]["description"] == "A number, told in two lines."
    assert properties["mode"]["enum"] == ["fast", "slow"]
    assert properties["bounded"]["maximum"] == 5
    assert properties["bounded"]["description"] == "How far."
    assert {"Colour", "Outer", "Inner"} <= set(schema["$defs"])
    assert "title" not in schema


def test_arguments_are_converted_to_the_annotated_types() -> None:
    signature = Signature(every)
    bound = signature.bind(
        "every",
        {**FULL, "colour": "blue", "outer": {"inner": {"name": "x"}}, "pair": [2, "b"]},
    )
    assert bound["colour"] is Colour.BLUE
    assert isinstance(bound["outer"], Outer)
    assert bound["outer"].inner.size == 1
    assert bound["pair"] == (2, "b")
    assert bound["maybe"] is None
    assert signature.names == list(bound)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text": 3}, "text"), ({"number": "many"}, "number"), ({"number": 1.5}, "number"),
        ({"names": "abc"}, "names"), ({"table": {"k": "x"}}, "table.k"), ({"flag": "what"}, "flag"),
        ({"colour": "green"}, "colour"), ({"mode": "medium"}, "mode"), ({"bounded": 6}, "bounded"),
        ({"outer": {"inner": {}}}, "outer.inner.name"), ({"unknown": 1}, "unknown"),
        ({"text": None}, "text"), ({"p_text": "x"}, "p_text"), ({"self": 1}, "self"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(Fault) as raised:
        Signature(every).bind("every", {**FULL, **change})
    assert raised.value.code == "tool_input_invalid"
    assert words in raised.value.message
    assert "text, number" in str(raised.value.hint)


def test_missing_arguments_are_all_named() -> None:
    with pytest.raises(Fault) as raised:
        Signature(every).bind("every", {})
    for name in FULL:
        assert name in raised.value.message


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"text": 3}, "text"), ({"outer": {"inner": {}, "no": 1}}, "outer"),
        ({"pair": ["x", 1]}, "pair"), ({"text": 3, "number": "many"}, ""),
        ({"unknown": 1}, ""), ({"text": 3, "unknown": 1}, ""),
    ],
)  # fmt: skip
def test_an_argument_that_alone_does_not_fit_is_named(
    change: dict[str, Any], argument: str
) -> None:
    """Not one that is missing or unknown: then the caller means another function."""
    with pytest.raises(Fault) as raised:
        Signature(every).bind("every", {**FULL, **change})
    assert raised.value.context["argument"] == argument
    with pytest.raises(Fault) as raised:
        Signature(every).bind("every", {name: FULL[name] for name in FULL if name != "text"})
    assert raised.value.context["argument"] == ""


def test_the_error_does_not_repeat_the_callers_values() -> None:
    """Invariant 10: an argument may be a secret."""
    with pytest.raises(Fault) as raised:
        Signature(every).bind("every", {**FULL, "number": "hunter2"})
    assert "hunter2" not in raised.value.message


def test_defaults_are_not_shared_between_calls() -> None:
    def collect(items: list[int] = []) -> list[int]:  # noqa: B006  # environments write it so
        items.append(1)
        return items

    signature = Signature(collect)
    assert collect(**signature.bind("collect", {})) == [1]
    assert collect(**signature.bind("collect", {})) == [1]


def test_untyped_and_open_functions_take_anything() -> None:
    def loose(a, b=2, **rest):  # type: ignore[no-untyped-def]
        return a, b, rest

    signature = Signature(loose)
    assert signature.bind("loose", {"a": [1], "c": None}) == {"a": [1], "b": 2, "c": None}
    assert signature.schema["additionalProperties"] is True


def test_a_wrapper_passes_on_arguments_by_name() -> None:
    """A decorator without `functools.wraps`, as projects write them."""

    def wrapper(*args, **kwargs):  # type: ignore[no-untyped-def]
        return args, kwargs

    assert wrapper(**Signature(wrapper).bind("wrapper", {"a": 1})) == ((), {"a": 1})


def test_parameters_can_have_names_that_pydantic_reserves() -> None:
    def odd(model_config: int, schema: str, copy: int, _private: int, json: str = "") -> None: ...

    arguments = {"model_config": 1, "schema": "s", "copy": 2, "_private": 3}
    assert Signature(odd).bind("odd", arguments) == {**arguments, "json": ""}
    assert set(Signature(odd).schema["properties"]) == {*arguments, "json"}


def test_a_function_without_parameters_takes_an_empty_object() -> None:
    schema = Signature(lambda: None).schema
    assert schema["properties"] == {}
    assert schema["type"] == "object"
    with pytest.raises(Fault, match="x"):
        Signature(lambda: None).bind("none", {"x": 1})


def test_positional_parameters_and_unresolvable_hints_are_refused() -> None:
    def positional(x: int, /) -> None: ...

    def variadic(x: int, *rest: int) -> None: ...

    def unresolved(x: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    for function in (positional, variadic, unresolved):
        with pytest.raises(TypeError, match=function.__name__):
            Signature(function)
