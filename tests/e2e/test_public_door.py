"""The public door as a real process, spoken to by real clients."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import uuid
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from aenv_ray.client.over_http import HttpInstance
from tests.e2e.serving import Server, cancel_begun

pytestmark = pytest.mark.e2e


def fast_door(server: Server, method: str, params: dict[str, Any]) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(server.socket))
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        sock.sendall(json.dumps(message).encode() + b"\n")
        with sock.makefile("rb") as lines:
            answer: dict[str, Any] = json.loads(lines.readline())
            return answer


async def plain_mcp(server: Server, method: str, params: dict[str, Any]) -> dict[str, Any]:
    """POST as with curl: no session, no special headers."""
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    async with httpx.AsyncClient(timeout=30) as client:
        response = await client.post(f"{server.url}/mcp", json=message)
    answer: dict[str, Any] = response.json()
    return answer


# --- both doors ----------------------------------------------------------------------------------


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("echo", {"text": "hällo\u2028\n\x0b", "times": 2}),
    ("echo", {"text": "", "times": 1}),
    ("aecho", {"text": "\U0001f600"}),
    ("add", {"a": 1, "b": "2"}),
    ("add", {"a": 2**80, "b": -1}),
    ("move-point", {"point": {"x": 1}, "by": [2, 3]}),
    ("nothing", {}),
    ("not_a_number", {}),
    ("some_bytes", {}),
    ("picture", {}),
    ("mixed", {}),
    ("huge", {}),
    ("broken", {"text": "why"}),
    ("unsendable", {}),
    ("too_slow", {}),
    ("steps", {}),
    ("add", {"a": "x"}),
    ("add", {"a": 1, "b": 2, "c": 3}),
    ("no-such-tool", {}),
]


@pytest.mark.parametrize(("name", "arguments"), CALLS, ids=lambda value: str(value)[:30])
async def test_both_doors_give_the_same_result(
    server: Server, name: str, arguments: dict[str, Any]
) -> None:
    """The doors differ in nothing but their wire."""
    params = {"name": name, "arguments": arguments}
    fast = fast_door(server, "tools/call", params)
    public = (await plain_mcp(server, "tools/call", params))["result"]
    if "error" in fast:
        assert public["isError"] is True
        assert public["_meta"]["aenv/error"] == fast["error"]["data"]
        assert fast["error"]["message"] in public["content"][0]["text"]
    else:
        assert public == fast["result"]


async def test_both_doors_list_the_same_tools(server: Server) -> None:
    def stated(answer: dict[str, Any]) -> list[dict[str, Any]]:
        tools = answer["result"]["tools"]
        return [{k: v for k, v in tool.items() if v is not None} for tool in tools]

    public = stated(await plain_mcp(server, "tools/list", {}))
    assert public == stated(fast_door(server, "tools/list", {}))
    moved = next(tool for tool in public if tool["name"] == "move-point")
    assert moved["description"] == "Move a point."
    assert moved["annotations"] == {"idempotentHint": True}


@pytest.mark.parametrize(
    ("method", "path", "params"),
    [
        ("aenv/function", "/functions/reset", {"name": "reset", "arguments": {"seed": 1}}),
        ("aenv/function", "/functions/areset", {"name": "areset", "arguments": {"seed": "x"}}),
        ("aenv/function", "/functions/fail", {"name": "fail", "arguments": {"message": "no"}}),
        ("aenv/reward", "/task/reward", {"arguments": {"answer": "42"}}),
        ("aenv/reward", "/task/reward/length", {"name": "length", "arguments": {"answer": "42"}}),
        ("aenv/reward", "/task/reward/broken-reward", {"name": "broken-reward"}),
        ("aenv/reward", "/task/reward/none", {"name": "none", "arguments": {}}),
    ],
)
async def test_both_doors_call_the_same_functions(
    server: Server, method: str, path: str, params: dict[str, Any]
) -> None:
    fast = fast_door(server, method, params)
    async with httpx.AsyncClient() as client:
        body = (await client.post(server.url + path, json=params.get("arguments", {}))).json()
    if "error" in fast:
        data = dict(fast["error"]["data"])
        assert body == {"success": False, "error": data.pop("message"), **data}
    else:
        assert body == {"success": True, **fast["result"]}


# --- clients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["legacy", "auto", "2026-07-28"])
async def test_fastmcp_client(server: Server, tmp_path: Path, mode: Any) -> None:
    from fastmcp import Client
    from fastmcp.client.transports import StreamableHttpTransport

    progress: list[float] = []

    async def on_progress(done: float, total: float | None, message: str | None) -> None:
        progress.append(done)

    async with Client(StreamableHttpTransport(f"{server.url}/mcp"), mode=mode) as client:
        assert "add" in [tool.name for tool in await client.list_tools()]
        result = await client.call_tool("aecho", {"text": "hi"})
        assert result.structured_content == {"text": "hi"}
        refused = await client.call_tool("add", {"a": "x", "b": 1}, raise_on_error=False)
        assert refused.is_error
        await client.call_tool("steps", {"total": 3}, progress_handler=on_progress)
        assert progress == [1, 2, 3]
        huge = await client.call_tool("huge", {})
        assert huge.meta is not None
        assert huge.meta["aenv/truncated"] is True
        marker = tmp_path / "call"
        call = asyncio.create_task(client.call_tool("until_stopped", {"marker": str(marker)}))
        await cancel_begun(call, tmp_path / "call")
        added = await client.call_tool("add", {"a": 1, "b": 1})
        assert (added.structured_content, added.data) == ({"result": 2}, 2)


@pytest.mark.parametrize("tool", ["until_stopped", "auntil_stopped"])
async def test_official_mcp_client(server: Server, tmp_path: Path, tool: str) -> None:
    from mcp import ClientSession
    from mcp.client.streamable_http import streamable_http_client
    from mcp_types import CallToolResult, ImageContent

    try:
        async with (
            streamable_http_client(f"{server.url}/mcp") as (read, write),
            ClientSession(read, write) as session,
        ):
            await session.initialize()
            assert len((await session.list_tools()).tools) > 10
            result = await session.call_tool("picture", {})
            assert isinstance(result, CallToolResult)
            (image,) = result.content
            assert isinstance(image, ImageContent)
            assert image.mime_type == "image/png"
            assert base64.b64decode(image.data).startswith(b"\x89PNG")
            marker = tmp_path / "call"
            call = asyncio.create_task(session.call_tool(tool, {"marker": str(marker)}))
            await cancel_begun(call, tmp_path / "call")
    except* anyio.BrokenResourceError:
        pass  # the library's own (mcp 2.3): the cancelled call's answer comes while it closes


# --- concurrency, cancellation -------------------------------------------------------------------


async def test_a_hundred_slow_calls_run_at_once_and_do_not_block_health(
    server: Server, instance: HttpInstance
) -> None:
    """AEnvironment W13: one slow sync function blocked everything."""
    arguments = {"key": uuid.uuid4().hex, "parties": 120}
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(instance.call_tool("meet", arguments, 30.0)) for _ in range(119)]
        await instance.call_function("reset", {})
        assert (await instance.check_health(timeout_s=5.0))["data"]["status"] == "healthy"
        assert not any(call.done() for call in calls)
        last = await instance.call_tool("meet", arguments, 30.0)
    assert last.data == 120
    assert all(call.result().data == 120 for call in calls)


async def test_disconnecting_cancels_a_function(server: Server, tmp_path: Path) -> None:
    """Invariant 11: cancelling a call cancels it."""
    arguments = {"seconds": 30, "marker": str(tmp_path / "call")}
    async with httpx.AsyncClient(timeout=30) as client:
        call = asyncio.create_task(client.post(f"{server.url}/functions/pause", json=arguments))
        await cancel_begun(call, tmp_path / "call")


async def test_disconnecting_cancels_a_tool_called_without_a_session(
    server: Server, tmp_path: Path
) -> None:
    """Invariant 11: cancelling a call cancels it."""
    arguments = {"marker": str(tmp_path / "call")}
    params = {"name": "until_stopped", "arguments": arguments}
    call = asyncio.create_task(plain_mcp(server, "tools/call", params))
    await cancel_begun(call, tmp_path / "call")
