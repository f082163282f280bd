"""Every call gets an outcome, whatever classes its tool uses."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, field_validator

from aenv_ray.runtime.api.registry import Registry
from aenv_ray.runtime.door.dispatch import Dispatcher


class Unspeakable(Exception):
    """An exception that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Moody(BaseModel):
    """A model whose validator raises what pydantic does not catch."""

    value: int

    @field_validator("value")
    @classmethod
    def _refuse(cls, value: int) -> int:
        raise LookupError(str(value))


def _raise_unspeakable() -> None:
    raise Unspeakable


def _raise_surrogate() -> None:
    raise ValueError("\ud800")


def _take(moody: Moody) -> int:
    return moody.value


def outcome(function: Any, **arguments: Any) -> dict[str, Any]:
    registry = Registry()
    registry.add_tool(function, name="tool")
    told: list[bytes] = []
    params = {"name": "tool", "arguments": arguments, "_meta": {"aenv/call_id": "one"}}
    Dispatcher(registry).submit("tools/call", params, told.append)
    (line,) = told
    answer: dict[str, Any] = json.loads(b"{" + line + b"}")
    return answer


def test_an_exception_whose_message_fails_is_a_result() -> None:
    result = outcome(_raise_unspeakable)["result"]
    assert result["isError"]
    assert "Unspeakable" in result["content"][0]["text"]


def test_an_exception_with_lone_surrogates_is_a_result() -> None:
    assert outcome(_raise_surrogate)["result"]["isError"]


def test_a_validator_that_raises_is_an_error() -> None:
    error = outcome(_take, moody={"value": 1})["error"]
    assert error["data"]["code"] == "function_failed"
    assert "LookupError" in error["message"]
