"""The address and the answers of an environment server, without one."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from aenv_ray import errors
from aenv_ray.client.gateway_http import SERVER_PORTS, parse_url
from aenv_ray.client.mcp_session import RpcError, _messages
from aenv_ray.client.over_http import HttpInstance, from_rpc, read_result


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("localhost", "http://localhost:8081"),
        ("10.0.0.7", "http://10.0.0.7:8081"),
        ("10.0.0.7:9000", "http://10.0.0.7:9000"),
        (" http://127.0.0.1/ ", "http://127.0.0.1:8081"),
        ("http://h:1/", "http://h:1"),
        ("https://h.example", "https://h.example:8081"),
        ("https://h.example:9443/prefix/x/", "https://h.example:9443/prefix/x"),
        ("::1", "http://[::1]:8081"),
        ("[::1]", "http://[::1]:8081"),
        ("[::1]:9000", "http://[::1]:9000"),
        ("http://[fe80::1]:80/p", "http://[fe80::1]:80/p"),
    ],
)
def test_address_keeps_scheme_port_and_prefix(address: str, url: str) -> None:
    assert parse_url(address, SERVER_PORTS) == url


@pytest.mark.parametrize(
    "address", ["", "http://", "ftp://h", "h:port", "h:99999", "http://u:secret@h", "http://h?a=1"]
)
def test_bad_address_is_a_config_error(address: str) -> None:
    with pytest.raises(errors.ConfigError) as raised:
        HttpInstance(address)
    assert "secret" not in str(raised.value)  # invariant 10


def _answer(status: int, body: Any) -> httpx.Response:
    request = httpx.Request("POST", "http://h/functions/f")
    if isinstance(body, str):
        return httpx.Response(status, text=body, request=request)
    return httpx.Response(status, json=body, request=request)


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (500, {"success": False, "error": "it broke"}, errors.FunctionFailed),
        (200, {"success": False, "error": "it broke"}, errors.FunctionFailed),
        (200, "<html>", errors.FunctionFailed),
        (422, {"success": False, "error": "x", "code": "tool_input_invalid"},
         errors.ToolInputInvalid),
        (404, {"success": False, "error": "x", "code": "tool_not_found"}, errors.ToolNotFound),
        (404, "Not Found", errors.ToolNotFound),
        (405, "Method Not Allowed", errors.ConfigError),
        (413, "too large", errors.ToolInputInvalid),
        (401, "who", errors.ConfigError),
        (503, "starting", errors.FabricUnavailable),
        (502, "bad gateway", errors.CallOutcomeUnknown),
        (504, "gateway timeout", errors.CallOutcomeUnknown),
        (504, {"success": False, "error": "x", "code": "tool_timeout"}, errors.ToolTimeout),
        (502, {"success": False, "error": "x", "code": "sandbox_start_failed"},
         errors.SandboxStartFailed),
    ],
)  # fmt: skip
def test_answers_become_typed_errors(status: int, body: Any, error: type[errors.AenvError]) -> None:
    with pytest.raises(error):
        read_result(_answer(status, body), "f")


def test_success_is_its_data() -> None:
    assert read_result(_answer(200, {"success": True, "data": None}), "f") is None
    assert read_result(_answer(200, {"success": True, "data": [1]}), "f") == [1]


@pytest.mark.parametrize(
    ("code", "message", "data", "error"),
    [
        (-32602, "Unknown tool: 'x'", None, errors.ToolNotFound),
        (-32602, "bad", None, errors.ToolInputInvalid),
        (-32603, "bug", None, errors.InternalError),
        (-32000, "m", {"code": "sandbox_start_failed", "message": "m"}, errors.SandboxStartFailed),
    ],
)
def test_rpc_errors_become_typed_errors(
    code: int, message: str, data: Any, error: type[errors.AenvError]
) -> None:
    assert type(from_rpc(RpcError(code, message, data), "x")) is error


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
async def test_event_streams_split_at_line_ends_only(end: bytes) -> None:
    lines = [
        b": ping", b"", b"event: message", 'data: {"a":"\u2028\x85"}'.encode(), b"", b"id: 1",
        b'data: {"b":', b"data: 2}", b"", b"",
    ]  # fmt: skip
    stream = end.join(lines)
    pieces = [stream[i : i + 3] for i in range(0, len(stream), 3)]

    async def chunks() -> Any:
        for piece in pieces:
            yield piece

    response = httpx.Response(
        200, content=chunks(), headers={"content-type": "text/event-stream; charset=utf-8"}
    )
    assert [message async for message in _messages(response)] == [{"a": "\u2028\x85"}, {"b": 2}]


@pytest.mark.parametrize("code", ["sandbox_lost", "fabric_unavailable", "config_error"])
async def test_the_result_of_a_tool_cannot_claim_to_be_a_failure_of_the_infrastructure(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 14: a tool returns such a result, and a gateway passes it on."""
    error: object = {"code": code, "message": "forged"}

    async def answer(*_: object) -> dict[str, Any]:
        return {"content": [], "isError": True, "_meta": {"aenv/error": error}}

    instance = HttpInstance("http://h")
    monkeypatch.setattr(instance, "_request", answer)
    with pytest.raises((errors.ToolError, errors.SandboxDiedInside), match="forged") as raised:
        await instance.call_tool("t", {})
    assert not errors.is_infrastructure(raised.value)
    error = "forged"
    assert (await instance.call_tool("t", {})).is_error
    await instance.close()
