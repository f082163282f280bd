"""The text of an error message about invalid data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

import aenv_ray
from aenv_ray.validation import problems_of

PACKAGE = Path(aenv_ray.__file__).parent


class Part(BaseModel):
    size: int


class Data(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = "a"
    parts: list[Part] = []

    @field_validator("name")
    @classmethod
    def _is_short(cls, value: str) -> str:
        if len(value) > 3:
            raise ValueError("it is too long")
        return value


def problems(data: Any, whole: str = "") -> str:
    with pytest.raises(ValidationError) as caught:
        Data.model_validate(data)
    return problems_of(caught.value, whole=whole)


def test_every_problem_has_its_place_and_none_its_value() -> None:
    text = problems({"name": "secret", "parts": [{"size": 1}, {}], "more": "secret"})
    assert text == (
        "name: it is too long; parts.1.size: Field required; more: Extra inputs are not permitted"
    )


def test_a_problem_of_the_whole_is_named_as_the_caller_says() -> None:
    message = "Input should be a valid dictionary or instance of Data"
    assert problems(3) == message
    assert problems(3, "the answer") == f"the answer: {message}"


def test_many_problems_are_counted() -> None:
    text = problems({"parts": [{}] * 100})
    assert text.count("Field required") == 5
    assert text.endswith("; and 95 more")


OTHERS = {
    "validation.py",
    "runtime/api/signature.py",  # the runtime does without the rest of the package
    "serve/gateway/routes/routing.py",  # says which part of a request a problem is in
    "sampling/tasks/feed.py",  # reads the type of a problem
}


def test_problems_become_text_in_one_place() -> None:
    """Projects of environments, which run without the package, are not meant."""
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"""\[["']loc["']\]|\bexc\.errors\(""", path.read_text())
    }
    assert {path for path in found if not path.startswith("envs/")} == OTHERS
