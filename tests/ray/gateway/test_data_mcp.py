"""MCP through the gateway: all clients, the instance's results, stateless replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from aenv_ray.errors import InstanceReleased
from tests.ray.faults import Witness
from tests.ray.gateway.data_gateway import Door, GatewayBench

pytestmark = pytest.mark.usefixtures("cluster")


def transport(door: Door, **headers: str) -> Any:
    from fastmcp.client.transports import StreamableHttpTransport

    return StreamableHttpTransport(door.mcp_url, headers={**door.owner, **headers})


# --- clients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["legacy", "auto", "2026-07-28"])
async def test_fastmcp_client(door: Door, mode: Any) -> None:
    """Both generations of the protocol: tools, results, errors, progress, annotations."""
    from fastmcp import Client

    progress: list[float] = []

    async def on_progress(done: float, total: float | None, message: str | None) -> None:
        progress.append(done)

    async with Client(transport(door), mode=mode) as client:
        assert "add" in [tool.name for tool in await client.list_tools()]
        result = await client.call_tool("aecho", {"text": "hällo"})
        assert result.structured_content == {"text": "hällo"}
        refused = await client.call_tool("add", {"a": "x", "b": 1}, raise_on_error=False)
        assert refused.is_error
        await client.call_tool("steps", {"total": 3}, progress_handler=on_progress)
        assert progress == [1, 2, 3]
        assert [str(one.uri) for one in await client.list_resources()] == ["sink://manual"]
        (manual,) = await client.read_resource("sink://manual")
        assert (manual.mime_type, manual.text) == ("text/markdown", "# Sink")
        prompt = await client.get_prompt("review", {"subject": "it"})
        assert [message.role for message in prompt.messages] == ["user", "assistant"]
        huge = await client.call_tool("huge", {})
        assert huge.meta is not None
        assert huge.meta["aenv/truncated"] is True


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
@pytest.mark.parametrize("tool", ["hold", "ahold"])
async def test_a_client_that_cancels_stops_the_tool(
    gateway: GatewayBench, make: Callable[..., Any], witness: Witness, mode: Any, tool: str
) -> None:
    """Invariant 11, with ``notifications/cancelled`` or a disconnect, depending on the version."""
    from fastmcp import Client

    door = Door(gateway, make(environment_variables=witness.variables))
    async with Client(transport(door), mode=mode) as client:
        call = asyncio.create_task(client.call_tool(tool, {"key": "k"}))
        await asyncio.to_thread(witness.wait_for, "began k")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.to_thread(witness.wait_for, "interrupted k")
        assert (await client.call_tool("add", {"a": 1})).structured_content == {"result": 2}


async def test_official_mcp_client(door: Door) -> None:
    from mcp import ClientSession
    from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client
    from mcp_types import CallToolResult, ImageContent

    async with (
        create_mcp_http_client(headers=door.owner) as http,
        streamable_http_client(door.mcp_url, http_client=http) as (read, write),
        ClientSession(read, write) as session,
    ):
        await session.initialize()
        assert len((await session.list_tools()).tools) > 10
        result = await session.call_tool("picture", {})
        assert isinstance(result, CallToolResult)
        assert isinstance(result.content[0], ImageContent)
        (manual,) = (await session.list_resources()).resources
        assert str(manual.uri) == "sink://manual"
        await session.send_ping()


# --- the same results as everywhere --------------------------------------------------------------

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("echo", {"text": "hällo\u2028\n\x0b", "times": 2}),
    ("aecho", {"text": "\U0001f600"}),
    ("add", {"a": 2**80, "b": -1}),
    ("move-point", {"point": {"x": 1}, "by": [2, 3]}),
    ("nothing", {}),
    ("not_a_number", {}),
    ("some_bytes", {}),
    ("mixed", {}),
    ("huge", {}),
    ("broken", {"text": "why"}),
]


@pytest.mark.parametrize(("name", "arguments"), CALLS, ids=lambda value: str(value)[:20])
async def test_results_equal_those_of_the_handle(
    door: Door, name: str, arguments: dict[str, Any]
) -> None:
    """Output, annotations and errors of a tool are not changed."""
    told = await door.rpc("tools/call", {"name": name, "arguments": arguments})
    result = await door.handle.call_tool.remote(name, arguments)
    assert told.status == 200
    assert told.body["result"]["content"] == result.content
    assert told.body["result"].get("structuredContent") == result.structured
    assert told.body["result"].get("_meta", {}) == result.meta
    assert told.body["result"]["isError"] is result.is_error


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"name": "no-such-tool"}, "tool_not_found"),
        ({"name": "add", "arguments": {"a": "x"}}, "tool_input_invalid"),
        ({"name": "add", "arguments": [1]}, "tool_input_invalid"),
        ({"name": "too_slow"}, "tool_timeout"),
        ({"name": "nap", "arguments": {"seconds": 30}, "_meta": {"aenv/timeout_s": 0.1}},
         "tool_timeout"),
    ],
)  # fmt: skip
async def test_errors_that_a_model_can_act_on_are_results(
    door: Door, params: dict[str, Any], code: str
) -> None:
    told = await door.rpc("tools/call", params)
    assert told.status == 200
    assert told.body["result"]["isError"] is True
    assert told.body["result"]["_meta"]["aenv/error"]["code"] == code


async def test_a_call_with_an_id_runs_once(door: Door) -> None:
    """Invariant 1: repeated with its id through any replica, it returns the first outcome."""
    params = {"name": "count", "arguments": {"key": "once"}, "_meta": {"aenv/call_id": "mine-1"}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    for replica in (0, 1, 0):
        async with door.http(replica=replica) as http:
            answer = await http.post(f"{door.path}/mcp", json=message)
        assert answer.json()["result"]["structuredContent"] == {"result": 1}


# --- no state in a replica -----------------------------------------------------------------------


async def test_a_session_continues_at_another_replica(
    gateway: GatewayBench, make: Callable[..., Any], witness: Witness
) -> None:
    """One replica opens it, another one serves it, and any can cancel its calls."""
    door = Door(gateway, make(environment_variables=witness.variables))
    path = f"{door.path}/mcp"

    def message(method: str, params: dict[str, Any], request_id: int | None = 1) -> dict[str, Any]:
        rpc = {"jsonrpc": "2.0", "method": method, "params": params}
        return rpc if request_id is None else {**rpc, "id": request_id}

    async with door.http(replica=0) as one, door.http(replica=1) as other:
        hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {}}
        opened = await one.post(path, json=message("initialize", hello))
        assert opened.json()["result"]["protocolVersion"] == "2025-06-18"
        session = {"mcp-session-id": opened.headers["mcp-session-id"]}
        listed = await other.post(path, json=message("tools/list", {}, 2), headers=session)
        assert listed.json()["result"]["tools"]
        held = {"name": "hold", "arguments": {"key": "k"}}
        call = asyncio.create_task(
            one.post(path, json=message("tools/call", held, 3), headers=session)
        )
        await asyncio.to_thread(witness.wait_for, "began k")
        note = message("notifications/cancelled", {"requestId": 3}, None)
        assert (await other.post(path, json=note, headers=session)).status_code == 202
        await asyncio.to_thread(witness.wait_for, "interrupted k")
        answer = await call
        assert answer.status_code == 200
        assert answer.json()["error"]["data"]["code"] == "call_cancelled"
        assert (await other.delete(path, headers=session)).status_code == 200


async def test_a_disconnected_client_stops_its_tool(
    gateway: GatewayBench, make: Callable[..., Any], witness: Witness
) -> None:
    """Invariant 11: a POST without session or call id."""
    door = Door(gateway, make(environment_variables=witness.variables))
    call = asyncio.create_task(door.rpc("tools/call", {"name": "hold", "arguments": {"key": "k"}}))
    await asyncio.to_thread(witness.wait_for, "began k")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.to_thread(witness.wait_for, "interrupted k")


async def test_a_hundred_calls_at_once(door: Door) -> None:
    arguments = {"key": "hundred", "parties": 100}
    message = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": "meet", "arguments": arguments},
    }
    async with door.http() as http, asyncio.TaskGroup() as group:
        calls = [group.create_task(http.post(f"{door.path}/mcp", json=message)) for _ in range(100)]
    assert {c.result().json()["result"]["structuredContent"]["result"] for c in calls} == {100}


# --- refusals ------------------------------------------------------------------------------------


async def test_calls_to_an_ended_instance_fail_with_its_error(
    gateway: GatewayBench, make: Callable[..., Any]
) -> None:
    """Invariant 2: a typed error with its status; in a session 200, which old clients need."""
    door = Door(gateway, make())
    await door.rpc("tools/list", {})
    await door.handle.release.remote()
    told = await door.rpc("tools/call", {"name": "count"})
    assert told.status == 410
    assert told.body["error"]["data"]["code"] == InstanceReleased.code
    told = await door.rpc("tools/call", {"name": "count"}, {"mcp-session-id": "s"})
    assert (told.status, told.body["id"]) == (200, 1)
    assert told.body["error"]["data"]["code"] in {InstanceReleased.code, "instance_not_found"}


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{nonsense", 400, -32700),
        (b"[]", 400, -32600),
        (b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]', 400, -32600),
        (b'{"jsonrpc":"2.0","id":1,"method":7}', 400, -32600),
        (b'{"jsonrpc":"2.0","id":true,"method":"ping"}', 400, -32600),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":[]}', 400, -32600),
        (b'{"jsonrpc":"2.0","id":1,"method":"nonsense"}', 200, -32601),
    ],
)
async def test_invalid_messages_are_rejected(
    door: Door, body: bytes, status: int, code: int
) -> None:
    async with door.http() as http:
        answer = await http.post(f"{door.path}/mcp", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_get_is_rejected(door: Door) -> None:
    async with door.http() as http:
        answer = await http.get(f"{door.path}/mcp", headers={"accept": "text/event-stream"})
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST, DELETE")


async def test_bodies_up_to_64_mib_pass_and_larger_ones_do_not(door: Door) -> None:
    """Whether or not the client announces the length."""
    text = "x" * (60 * 1024 * 1024)
    told = await door.rpc("tools/call", {"name": "huge", "arguments": {"size": 1, "no": text}})
    assert told.body["result"]["_meta"]["aenv/error"]["code"] == "tool_input_invalid"
    async with door.http() as http:
        answer = await http.post(f"{door.path}/mcp", content=b"x" * (64 * 1024 * 1024 + 1))
    assert answer.status_code == 413


# --- who may do what -----------------------------------------------------------------------------


async def test_an_agent_can_use_only_the_tools_of_its_instance(
    gateway: GatewayBench, door: Door, make: Callable[..., Any]
) -> None:
    """Invariant 8: no reward, function, file or other instance."""
    other = Door(gateway, make())
    async with httpx.AsyncClient(base_url=gateway.url, headers=door.agent, timeout=30) as http:
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        assert (await http.post(f"{door.path}/mcp", json=message)).status_code == 200
        assert (await http.post(f"{other.path}/mcp", json=message)).status_code == 403
        named = {"AEnvCore-EnvInstance-ID": door.id}
        assert (await http.post("/mcp", json=message, headers=named)).status_code == 200
        for method, path in (
            ("POST", "/task/reward"), ("POST", "/functions/reset"), ("GET", "/functions/list"),
            ("GET", "/health"), ("PUT", "/admin/note"),
        ):  # fmt: skip
            answer = await http.request(method, path, headers=named)
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
        for method, path in (
            ("GET", "files?path=a"),
            ("PUT", "files?path=a"),
            ("GET", "files/list"),
        ):
            answer = await http.request(method, f"{door.path}/{path}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")


async def test_other_owners_and_anonymous_callers_are_rejected(
    gateway: GatewayBench, door: Door
) -> None:
    """404 for another owner's instance, 401 without a token."""
    from aenv_ray.hub.records import Role

    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
    eve = {"authorization": f"Bearer {gateway.token(Role.PUBLISHER, 'eve')}"}
    admin = {"authorization": f"Bearer {gateway.token(Role.ADMIN, 'root')}"}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as http:
        path = f"{door.path}/mcp"
        refused = await http.post(path, json=message)
        assert (refused.status_code, refused.json()["error"]["data"]["code"]) == (
            401, "unauthorized",
        )  # fmt: skip
        assert (await http.post(path, json=message, headers=eve)).status_code == 404
        assert (await http.post(path, json=message, headers=admin)).status_code == 200
