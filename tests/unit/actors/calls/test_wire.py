"""The messages between a handle and its host."""

from __future__ import annotations

import base64
import json
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv_ray.actors.calls import wire
from aenv_ray.actors.calls.wire import (
    CallMessage,
    WireResult,
    call_message,
    decode,
    decode_json,
)
from aenv_ray.errors import (
    CallOutcomeUnknown,
    ConfigError,
    ToolInputInvalid,
    ToolNotFound,
)
from aenv_ray.ids import CallId, InstanceId
from aenv_ray.models import (
    ExecResult,
    FileEntry,
    ToolResult,
)

INSTANCE = InstanceId("env-abcdefgh")

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=8,
)
arguments_of_tools = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"])), json_values, max_size=3
)


def message(arguments: Any, timeout_s: Any = 5.0) -> CallMessage:
    params = {"name": "tool", "arguments": arguments}
    return CallMessage.decode(
        call_message(INSTANCE, "tools/call", params, CallId("call-1"), timeout_s)
    )


@given(arguments=arguments_of_tools)
def test_decoding_a_message_gives_the_call(arguments: dict[str, Any]) -> None:
    arrived = message(arguments)
    assert arrived[:3] == (INSTANCE, "tools/call", 5.0)
    params = json.loads(arrived.params)
    assert params["arguments"] == arguments
    assert params["_meta"] == {"aenv/call_id": "call-1", "aenv/timeout_s": 5.0}


@given(arguments=arguments_of_tools)
def test_parameters_are_one_line(arguments: dict[str, Any]) -> None:
    """The fast door reads lines, so no argument may contain an unescaped line break."""
    assert b"\n" not in message(arguments).params


@given(
    method=st.sampled_from(["tools/call", "aenv/exec"]),
    timeout_s=st.floats(1e-6, 1e9),
    params=st.binary(),
    sent_at=st.floats(0.0, 4e9),
)
def test_encode_and_decode_are_inverse(
    method: str, timeout_s: float, params: bytes, sent_at: float
) -> None:
    sent = CallMessage(INSTANCE, method, timeout_s, params, sent_at)
    assert CallMessage.decode(sent.encode()) == sent


class Opaque:
    """Cannot be encoded as JSON."""


@pytest.mark.parametrize("value", [Opaque(), lambda: None, "\ud800", {"deep": [Opaque()]}])
def test_arguments_that_json_cannot_encode_are_rejected_before_sending(value: Any) -> None:
    with pytest.raises(
        ToolInputInvalid, match="arguments of 'tool' cannot be encoded as JSON"
    ) as caught:
        message({"value": value})
    assert caught.value.tool_name == "tool"


def test_circular_arguments_are_rejected() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(ToolInputInvalid, match="cannot be encoded as JSON"):
        message({"value": circle})


def test_errors_of_calls_without_a_tool_name_the_method() -> None:
    with pytest.raises(ToolInputInvalid, match="arguments of 'aenv/exec'"):
        call_message(INSTANCE, "aenv/exec", {"command": Opaque()}, CallId("c"), 1.0)


def test_oversized_arguments_are_rejected_with_size_and_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The runtime closes a connection that exceeds its limit, which would lose the instance."""
    monkeypatch.setattr(wire, "MAX_CALL_BYTES", 10_000)
    message({"text": "x" * 9_000})
    with pytest.raises(ToolInputInvalid, match="10,000") as caught:
        message({"text": "x" * 10_000})
    assert caught.value.tool_name == "tool"
    assert "file" in str(caught.value.hint)


def test_nan_and_infinity_become_strings() -> None:
    sent = json.loads(message({"a": math.nan, "b": math.inf, "c": -math.inf}).params)
    assert sent["arguments"] == {"a": "NaN", "b": "Infinity", "c": "-Infinity"}


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan, True, False, "5", None, [1]])
def test_an_invalid_timeout_is_a_config_error(timeout_s: Any) -> None:
    """Invariant 9: every wait has a deadline."""
    with pytest.raises(ConfigError, match="timeout"):
        message({}, timeout_s)


def arrive(method: str, result: Any) -> Any:
    """Return the value that the caller unpickles."""
    return pickle.loads(pickle.dumps(WireResult(method, json.dumps(result).encode())))


def test_a_tool_result_unpickles_into_the_decoded_value() -> None:
    content = [{"type": "text", "text": "hé"}]
    wire = {"content": content, "structuredContent": {"result": "hé"}, "isError": True}
    got = arrive("tools/call", wire | {"_meta": {"aenv/wrapped": True}})
    assert got == ToolResult(content, {"result": "hé"}, True, {"aenv/wrapped": True})
    assert got.data == "hé"


def test_a_command_result_unpickles_into_bytes() -> None:
    data = {
        "exit_code": 3,
        "stdout": base64.b64encode(b"\xff\x00").decode(),
        "stderr": "",
        "truncated": True,
        "duration_s": 0.5,
    }
    expected = ExecResult(
        exit_code=3, stdout=b"\xff\x00", stderr=b"", truncated=True, duration_s=0.5
    )
    assert arrive("aenv/exec", {"data": data}) == expected


def test_files_unpickle_into_their_types() -> None:
    entry = {"name": "a", "type": "file", "size_bytes": 1, "modified_at": 2.0}
    assert arrive("aenv/list_files", {"data": {"entries": [entry]}}) == [FileEntry(**entry)]
    assert arrive("aenv/read_file", {"data": {"data": "AAE="}}) == b"\x00\x01"
    assert arrive("aenv/write_file", {"data": {"size_bytes": 7}}) == 7


def test_a_batch_unpickles_into_results_and_errors_in_order() -> None:
    """Invariant 2: an item without a result is an error, not an empty result."""
    results = [
        {"result": {"content": [], "isError": False}},
        {"error": {"data": {"code": "tool_not_found", "message": "no x", "tool_name": "x"}}},
        {"error": {"data": {"code": "call_outcome_unknown", "message": "?"}}},
    ]
    first, second, third = arrive("aenv/call_tools", {"results": results})
    assert first == ToolResult([])
    assert isinstance(second, ToolNotFound)
    assert second.tool_name == "x"
    assert isinstance(third, CallOutcomeUnknown)


@pytest.mark.parametrize(
    ("method", "result", "value"),
    [
        (
            "tools/list",
            {"tools": [{"name": "a"}]},
            [{"name": "a", "inputSchema": {"type": "object"}}],
        ),
        ("ping", {}, {}),
        ("aenv/functions", {"total": 0}, {"total": 0}),
        ("aenv/reward", {"data": 0.5}, 0.5),
        ("aenv/function", {"data": None}, None),
        ("aenv/health", {"data": {"status": "healthy"}}, {"status": "healthy"}),
    ],
)
def test_other_results_are_their_data(method: str, result: Any, value: Any) -> None:
    assert arrive(method, result) == value
    assert decode(method, result) == value
    assert decode_json(method, json.dumps(result).encode()) == value
