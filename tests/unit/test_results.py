"""From what a tool returned to what the wire carries; nothing is lost silently."""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
import math
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from aenv_ray.models import ToolResult
from aenv_ray.runtime.results import Image, error_result, to_json, tool_result

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)


class Model(BaseModel):
    a: int
    when: datetime = datetime(2026, 1, 1, tzinfo=UTC)


@dataclasses.dataclass
class Data:
    a: int
    inner: list[Model]


class Color(enum.Enum):
    RED = "red"


def arrived(value: Any, limit_bytes: int | None = None) -> ToolResult:
    """Return what the caller has after the wire."""
    made = tool_result(value) if limit_bytes is None else tool_result(value, limit_bytes)
    return ToolResult.from_wire(json.loads(to_json(made)))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(json_values.filter(lambda value: value is not None))
def test_json_values_arrive_as_they_were_returned(value: Any) -> None:
    result = arrived(value)
    assert result.data == value
    assert type(result.data) is type(value)
    assert not result.is_error


@pytest.mark.parametrize(
    ("value", "text", "structured"),
    [
        ("hé\n", "hé\n", {"result": "hé\n"}),
        ("", "", {"result": ""}),
        ({"a": [1]}, '{"a":[1]}', {"a": [1]}),
        ([1, "b"], '[1,"b"]', {"result": [1, "b"]}),
        ([], "[]", {"result": []}),
        (7, "7", {"result": 7}),
        (False, "false", {"result": False}),
        (Model(a=1), '{"a":1,"when":"2026-01-01T00:00:00Z"}', None),
        (Color.RED, '"red"', {"result": "red"}),
        ((1, 2), "[1,2]", {"result": [1, 2]}),
    ],
)
def test_values_are_text_and_structured(value: Any, text: str, structured: Any) -> None:
    result = arrived(value)
    assert result.text() == text
    assert result.structured == (structured or json.loads(text))


def test_an_object_with_a_key_called_result_stays_that_object() -> None:
    assert arrived({"result": 1}).data == {"result": 1}
    assert arrived(1).data == 1


def test_nothing_is_no_content() -> None:
    result = arrived(None)
    assert (result.content, result.structured, result.is_error) == ([], None, False)


def test_models_and_dataclasses_are_their_fields() -> None:
    result = arrived(Data(1, [Model(a=2)]))
    assert result.data == {"a": 1, "inner": [{"a": 2, "when": "2026-01-01T00:00:00Z"}]}


def test_numbers_that_json_has_not_are_words_not_null() -> None:
    """Invariant 12: null would hide them."""
    assert arrived([math.nan, math.inf, -math.inf]).data == ["NaN", "Infinity", "-Infinity"]


def test_images_are_image_blocks() -> None:
    jpeg = b"\xff\xd8\xff\xe0"
    for value, mime_type, data in (
        (PNG, "image/png", PNG),
        (bytearray(PNG), "image/png", PNG),
        (jpeg, "image/jpeg", jpeg),
        (Image(b"any"), "image/png", b"any"),
        (Image(b"any", "image/webp"), "image/webp", b"any"),
    ):
        (block,) = arrived(value).content
        assert (block["type"], block["mimeType"]) == ("image", mime_type)
        assert base64.b64decode(block["data"]) == data


@pytest.mark.parametrize("data", [b"", b"plain", b"\x00\xff"])
def test_other_bytes_are_a_resource(data: bytes) -> None:
    (block,) = arrived(data).content
    assert block["type"] == "resource"
    assert base64.b64decode(block["resource"]["blob"]) == data


def test_a_list_with_images_is_a_block_for_each() -> None:
    kinds = [block["type"] for block in arrived(["look", PNG, {"a": 1}, Image(b"x")]).content]
    assert kinds == ["text", "image", "text", "image"]
    assert arrived(["look", PNG, {"a": 1}]).text() == 'look\n{"a":1}'


def test_bytes_inside_an_object_are_text_or_base64() -> None:
    assert arrived({"a": b"text"}).data == {"a": "text"}
    # pydantic writes the alphabet of URLs here, with - and _.
    assert base64.urlsafe_b64decode(arrived({"a": b"\xff\xfe"}).data["a"]) == b"\xff\xfe"


def test_what_cannot_be_json_is_a_value_error() -> None:
    circle: list[Any] = []
    circle.append(circle)
    around: dict[str, Any] = {}
    around["a"] = around
    for value in (circle, around, object(), {"a": object()}, {"a": lambda: 0}):
        with pytest.raises(ValueError, match="cannot be JSON"):
            tool_result(value)


@pytest.mark.parametrize("text", ["a\ud800b", "\udcff"])
def test_lone_surrogates_become_the_replacement_character(text: str) -> None:
    """A file name that is no UTF-8 must not void the whole result."""
    clean = arrived(text).text()
    assert "\ufffd" in clean
    assert arrived(text).data == clean
    assert "\ufffd" in error_result(text, "ValueError")["content"][0]["text"]
    assert "\ufffd" in arrived([text, PNG]).text()


@pytest.mark.parametrize("value", ["x" * 1000, "é" * 500, {"a": "x" * 1000}, ["x" * 1000] * 2])
def test_output_that_is_too_long_is_cut_and_says_so(value: Any) -> None:
    """Invariant 12: what is cut says so, to the agent and to the program."""
    result = arrived(value, limit_bytes=99)
    assert result.meta["aenv/truncated"] is True
    total = len(value.encode()) if isinstance(value, str) else len(to_json(value))
    mark = f"\n[output cut: the first 99 of {total} bytes]"
    assert result.text().endswith(mark)
    assert 90 <= len(result.text().removesuffix(mark).encode()) <= 99


def test_text_at_the_limit_is_whole() -> None:
    result = arrived("x" * 100, limit_bytes=100)
    assert result.text() == "x" * 100
    assert "aenv/truncated" not in result.meta


def test_cut_text_is_still_the_value_of_its_result() -> None:
    result = arrived("x" * 1000, limit_bytes=100)
    assert result.data == result.text()


def test_the_blocks_of_a_list_share_the_limit() -> None:
    """Invariant 12: a binary block that does not fit is left out, and that is said."""
    result = arrived(["a" * 50, PNG + bytes(1000), "b" * 100], limit_bytes=100)
    assert [block["type"] for block in result.content] == ["text", "text"]
    assert result.meta["aenv/truncated"] is True
    assert "[output cut" in result.text()
    alone = arrived(Image(bytes(1000)), limit_bytes=100)
    assert alone.text().startswith("[output cut")


def test_an_error_that_is_too_long_is_cut_and_stays_an_error() -> None:
    """Invariant 12."""
    result = error_result("x" * 1000, "ValueError", limit_bytes=100)
    assert result["isError"] is True
    assert result["_meta"] == {"aenv/truncated": True, "aenv/error_type": "ValueError"}
    assert "[output cut" in result["content"][0]["text"]


@given(st.text(), st.integers(1, 200))
def test_any_text_within_any_limit_has_a_result(text: str, limit_bytes: int) -> None:
    result = arrived(text, limit_bytes)
    clean = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    if result.meta.get("aenv/truncated"):
        assert len(clean.encode()) > limit_bytes
        assert clean.startswith(result.text().rpartition("\n[output cut")[0])
    else:
        assert result.text() == clean
