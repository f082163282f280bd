"""An episode as a reader follows it: messages and steps in one order, and nothing twice."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aenv_ray.trajectories.conversation import MessagePart, NumberedStep, in_order, used
from aenv_ray.trajectories.schema import Episode, Usage
from tests.unit.trajectories.episodes import episode, step


def call(name: str, arguments: dict[str, Any] | str, call_id: str) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def asks(*calls: Any, text: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "tool_calls": list(calls), **fields}


def told(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def order(one: Episode) -> list[tuple[str, str] | int]:
    parts = in_order(one)
    return [
        part.number if isinstance(part, NumberedStep) else (part.who, part.text) for part in parts
    ]


def test_steps_are_where_the_model_asked_for_them() -> None:
    """The parallel calls of an answer end in any order, and ids repeat from answer to answer."""
    one = episode(
        0,
        steps=(
            step("b!", arguments={"text": "b"}),
            step("a!", arguments={"text": "a"}),
            step("a again", arguments={"text": "a"}),
        ),
        messages=(
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "Please say hello."},
            asks(call("echo", {"text": "a"}, "1"), call("echo", {"text": "b"}, "2"), text="both"),
            told("1", "a!"),
            told("2", "b!"),
            asks(call("echo", {"text": "a"}, "1"), reasoning="hm"),
            told("1", "a again"),
            {"role": "assistant", "content": "done", "refusal": "no more"},
        ),
    )
    assert order(one) == [
        ("system", "be brief"),
        ("user", "Please say hello."),
        ("assistant", "both"),
        1,
        0,
        ("assistant, reasoning", "hm"),
        2,
        ("assistant", "done"),
        ("assistant, refusal", "no more"),
    ]


def test_a_call_that_made_no_step_is_shown_with_what_the_model_was_told() -> None:
    """As of an unknown tool, or malformed arguments."""
    one = episode(
        0,
        task=None,
        steps=(),
        messages=(
            asks(call("nonsense", {"a": 1}, "1")),
            told("1", "error: tool_not_found: no tool"),
            asks("call echo", call("echo", "{", "2")),
        ),
    )
    assert order(one) == [
        ("assistant, call of nonsense", '{"a": 1}'),
        ("tool", "error: tool_not_found: no tool"),
        ("assistant, call of no tool", "call echo"),
        ("assistant, call of echo", "{"),
    ]


@pytest.mark.parametrize(
    ("text", "shown", "is_same"),
    [
        ("alas", "error: alas", True),
        ("no result within 60 s", "error: tool_timeout: no result within 60 s (wait)", True),
        ("x" * 100, "xxxxx\n[truncated: 100 characters]", True),
        ("see", "see\n[image image/png not shown]", True),
        ("hello", "something else", False),
    ],
)
def test_a_result_is_shown_once(text: str, shown: str, is_same: bool) -> None:
    asked = asks(call("echo", {"text": "hello"}, "1"))
    one = episode(0, task=None, steps=(step(text),), messages=(asked, told("1", shown)))
    assert order(one) == [0, *([] if is_same else [("tool", shown)])]


def test_nothing_of_an_episode_is_left_out() -> None:
    """A step that no message asks for, an empty answer, names that endpoints do not accept."""
    one = episode(
        0,
        steps=(step(), step("read", tool="fs/read file", arguments={}), step("other")),
        messages=(
            asks(call("fs_read_file", "", "1")),
            told("1", "read"),
            {"role": "assistant", "content": ""},
        ),
    )
    assert order(one) == [("instruction", "say hello"), 1, ("assistant", ""), 0, 2]


def test_without_messages_the_steps_follow_the_instruction() -> None:
    assert order(episode(0, steps=(step(), step()))) == [("instruction", "say hello"), 0, 1]


@pytest.mark.parametrize(
    "message",
    [
        {}, {"role": 7, "content": 3}, {"role": "user", "content": [1, {"type": "image_url"}, "a"]},
        {"role": "assistant", "tool_calls": 3}, asks(7, None, {"id": []}, {"function": 1}),
        asks(call("echo", "[" * 100_000, "1")), asks({"function": {"name": 1, "arguments": [1]}}),
        {"role": "tool"}, {"role": "tool", "tool_call_id": {}, "content": {"a": 1}},
    ],
    ids=range(9),
)  # fmt: skip
def test_a_message_of_any_shape_is_shown(message: dict[str, Any]) -> None:
    """A policy may record what it likes."""
    assert any(isinstance(part, MessagePart) for part in in_order(episode(0, messages=(message,))))


def test_usage_is_told() -> None:
    assert not used(None)
    usage = Usage(requests=1, prompt_tokens=1200, completion_tokens=34)
    assert used(usage) == "1 request, 1,200 prompt tokens, 34 completion tokens"
    assert used(usage + Usage(cost=0.25)).endswith(", cost 0.25")
