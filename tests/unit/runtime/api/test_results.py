"""The encoding of return values."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from aenv_ray.models import ToolResult
from aenv_ray.runtime.api.results import Image, error_result, to_json, tool_result

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(JSON)
def test_json_values_round_trip(value: Any) -> None:
    result = ToolResult.from_wire(json.loads(to_json(tool_result(value))))
    assert not result.is_error
    if value is None:
        assert result.content == []
    else:
        assert result.data == value


@given(st.text(st.characters(), max_size=50) | st.text(max_size=20).map(lambda t: t + "\ud800"))
def test_any_text_can_be_sent(text: str) -> None:
    sent = json.loads(to_json(tool_result(text)))
    assert sent["content"][0]["text"].isascii() == text.isascii()


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Pair:
    left: int
    right: tuple[int, ...]


class Model(BaseModel):
    when: datetime.date


@pytest.mark.parametrize(
    ("value", "data"),
    [
        (Colour.RED, "red"), (Pair(1, (2, 3)), {"left": 1, "right": [2, 3]}),
        (Model(when=datetime.date(2026, 1, 2)), {"when": "2026-01-02"}),
        ({1: "a", None: "b"}, {"1": "a", "None": "b"}), ({3}, [3]), ((1, 2), [1, 2]),
        (math.inf, "Infinity"), ([math.nan], ["NaN"]), (2**70, 2**70), (b"", None),
        (datetime.timedelta(seconds=90), "PT1M30S"), (range(3), None), ("", ""), (0, 0), ({}, {}),
    ],
)  # fmt: skip
def test_python_values_become_plain_data(value: Any, data: Any) -> None:
    if isinstance(value, bytes):
        assert tool_result(value)["content"][0]["type"] == "resource"
        return
    if isinstance(value, range):
        value, data = list(value), [0, 1, 2]
    assert ToolResult.from_wire(json.loads(to_json(tool_result(value)))).data == data


def test_an_object_is_structured_as_itself_and_a_value_is_wrapped() -> None:
    """MCP's ``structuredContent`` is an object."""
    assert tool_result({"result": 1}) == {
        "content": [{"type": "text", "text": '{"result":1}'}],
        "isError": False,
        "structuredContent": {"result": 1},
    }
    wrapped = tool_result([1])
    assert wrapped["structuredContent"] == {"result": [1]}
    assert wrapped["_meta"] == {"aenv/wrapped": True, "fastmcp": {"wrap_result": True}}


@pytest.mark.parametrize("size", [99, 100, 101, 1000])
@pytest.mark.parametrize("letter", ["x", "ü", "\U0001f600"])
def test_text_over_the_limit_is_cut_with_a_mark(letter: str, size: int) -> None:
    """Invariant 12."""
    text = letter * size
    result = tool_result(text, limit_bytes=100)
    shown = result["content"][0]["text"]
    total = len(text.encode())
    if total <= 100:
        assert shown == text
        return
    kept, mark = shown.split("\n")
    assert len(kept.encode()) <= 100
    assert text.startswith(kept)
    assert mark == f"[output cut: the first 100 of {total} bytes]"
    assert result["_meta"]["aenv/truncated"] is True
    assert result["structuredContent"]["result"] == shown


def test_json_over_the_limit_is_cut_with_a_mark() -> None:
    """Invariant 12."""
    result = tool_result(list(range(1000)), limit_bytes=100)
    assert "[output cut: the first 100 of" in result["content"][0]["text"]
    assert "structuredContent" not in result


def test_an_image_over_the_limit_is_dropped_with_a_mark() -> None:
    """Invariant 12: half an image is none."""
    result = tool_result(["before", Image(bytes(1000))], limit_bytes=100)
    assert [block["type"] for block in result["content"]] == ["text"]
    assert "[output cut" in result["content"][0]["text"]


def test_an_error_keeps_its_type_and_is_cut_too() -> None:
    result = error_result("ValueError: " + "x" * 1000, "ValueError", limit_bytes=100)
    assert result["isError"] is True
    assert result["_meta"]["aenv/error_type"] == "ValueError"
    assert "[output cut" in result["content"][0]["text"]


@pytest.mark.parametrize(
    ("data", "kind", "mime"),
    [
        (b"\x89PNG\r\n\x1a\nrest", "image", "image/png"),
        (b"\xff\xd8\xffrest", "image", "image/jpeg"),
        (b"GIF89a", "image", "image/gif"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 ", "image", "image/webp"),
        (b"RIFF\x00\x00\x00\x00WAVEfmt ", "resource", None),
        (b"plain", "resource", None),
        (bytearray(b"\x00"), "resource", None),
    ],
)
def test_bytes_are_images_by_their_content(data: bytes, kind: str, mime: str | None) -> None:
    (block,) = tool_result(data)["content"]
    assert block["type"] == kind
    assert block.get("mimeType") == mime


def test_blocks_and_values_mix() -> None:
    blocks = tool_result([1, "two", Image(b"x", "image/gif"), {"three": 3}])["content"]
    assert [b["type"] for b in blocks] == ["text", "text", "image", "text"]
    assert [b.get("text") for b in blocks] == ["1", "two", None, '{"three":3}']


@pytest.mark.parametrize("value", [object(), test_blocks_and_values_mix, [open], {"a": object()}])
def test_values_without_a_json_form_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="cannot be JSON"):
        tool_result(value)


def test_cycles_and_depth_are_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    for value in (cycle, deep):
        with pytest.raises(ValueError, match="cannot be JSON"):
            tool_result(value)
