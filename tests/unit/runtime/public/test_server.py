"""The public door as an ASGI application: HTTP contract, envelopes, MCP errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from aenv_ray.runtime.api.registry import Registry
from aenv_ray.runtime.door.dispatch import Dispatcher
from aenv_ray.runtime.public.server import build_app

LIMIT_BYTES = 5_000_000


class Filter(BaseModel):
    name: str
    limit: int = 1


def make_registry() -> Registry:
    registry = Registry()

    def echo(text: str) -> str:
        return text

    def reset(seed: int = 0) -> dict[str, int]:
        return {"seed": seed}

    def fail() -> None:
        raise RuntimeError("it broke")

    def look(
        key: str,
        limit: int = 3,
        exact: bool = False,
        tags: list[str] | None = None,
        where: Filter | None = None,
    ) -> Any:
        return [key, limit, exact, tags, where]

    def item(item_id: int, extra: str = "") -> Any:
        return [item_id, extra]

    def size(data: str) -> int:
        return len(data)

    def slow() -> None:
        threading.Event().wait(5.0)

    def score(answer: str = "") -> float:
        return float(answer == "42")

    def length(answer: str) -> int:
        return len(answer)

    registry.add_tool(echo)
    for function in (reset, fail, size, slow):
        registry.add_function(function)
    registry.add_function(look, method="GET")
    registry.add_function(item, endpoint="/items/{item_id}", method="DELETE")
    registry.add_reward(score)
    registry.add_reward(length)
    return registry


@asynccontextmanager
async def client_of(dispatcher: Dispatcher) -> AsyncIterator[httpx.AsyncClient]:
    """Run the application's lifespan in a task of its own, as a server does."""
    app = build_app(dispatcher, body_limit_bytes=LIMIT_BYTES)
    incoming: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    outgoing: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    async with asyncio.TaskGroup() as group:
        group.create_task(app({"type": "lifespan"}, incoming.get, outgoing.put))
        incoming.put_nowait({"type": "lifespan.startup"})
        assert (await outgoing.get())["type"] == "lifespan.startup.complete"
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client
        incoming.put_nowait({"type": "lifespan.shutdown"})
        assert (await outgoing.get())["type"] == "lifespan.shutdown.complete"


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(Dispatcher(make_registry())) as client:
        yield client


async def rpc(client: httpx.AsyncClient, method: str, params: dict[str, Any]) -> dict[str, Any]:
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    response = await client.post("/mcp", json=message, headers={"accept": "application/json"})
    answer: dict[str, Any] = response.json()
    return answer


# --- functions -----------------------------------------------------------------------------------


async def test_function_result_is_in_the_envelope(client: httpx.AsyncClient) -> None:
    response = await client.post("/functions/reset", json={"seed": 7})
    assert response.status_code == 200
    assert response.json() == {"success": True, "data": {"seed": 7}}


@pytest.mark.parametrize("content", [b"", b"{}", b" ", b"null"])
async def test_no_arguments_are_an_empty_object(client: httpx.AsyncClient, content: bytes) -> None:
    response = await client.post("/functions/reset", content=content)
    assert response.json() == {"success": True, "data": {"seed": 0}}


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("POST", "/functions/reset", b"{", 400, "tool_input_invalid"),
        ("POST", "/functions/reset", b"\xff", 400, "tool_input_invalid"),
        ("POST", "/functions/reset", b"[1]", 400, "tool_input_invalid"),
        ("POST", "/functions/reset", b'{"seed":"x"}', 422, "tool_input_invalid"),
        ("POST", "/functions/reset", b'{"unknown":1}', 422, "tool_input_invalid"),
        ("GET", "/functions/look", b"", 422, "tool_input_invalid"),
        ("POST", "/functions/nope", b"{}", 404, "tool_not_found"),
        ("GET", "/functions/reset", b"", 405, "config_error"),
        ("POST", "/health", b"", 405, "config_error"),
        ("POST", "/functions/fail", b"{}", 500, "function_failed"),
        ("POST", "/task/reward/nope", b"{}", 404, "tool_not_found"),
        ("GET", "/nowhere", b"", 404, "tool_not_found"),
    ],
)
async def test_failures_have_a_status_and_an_envelope(
    client: httpx.AsyncClient, method: str, path: str, content: bytes, status: int, code: str
) -> None:
    response = await client.request(method, path, content=content)
    body = response.json()
    assert (response.status_code, body["success"], body["code"]) == (status, False, code)
    assert body["error"]


async def test_a_wrong_method_is_answered_with_the_right_one(
    client: httpx.AsyncClient,
) -> None:
    response = await client.get("/functions/reset")
    assert response.headers["allow"] == "POST"


async def test_invalid_arguments_name_the_parameters(
    client: httpx.AsyncClient,
) -> None:
    body = (await client.post("/functions/reset", json={"seed": "x"})).json()
    assert "seed" in body["error"]
    assert body["hint"] == "reset takes seed"


async def test_query_text_is_converted_by_the_signature(client: httpx.AsyncClient) -> None:
    response = await client.get(
        "/functions/look", params={"key": "1", "limit": "9", "exact": "true"}
    )
    assert response.json()["data"] == ["1", 9, True, None, None]


@pytest.mark.parametrize("query", ["tags=a&tags=b", 'tags=["a","b"]'])
async def test_query_lists(client: httpx.AsyncClient, query: str) -> None:
    response = await client.get(f"/functions/look?key=k&{query}")
    assert response.json()["data"][3] == ["a", "b"]


async def test_query_one_item_list_and_object(client: httpx.AsyncClient) -> None:
    response = await client.get(
        "/functions/look", params={"key": "k", "tags": "a", "where": '{"name": "n"}'}
    )
    assert response.json()["data"][3:] == [["a"], {"name": "n", "limit": 1}]


async def test_own_endpoint_with_a_parameter_in_its_path(client: httpx.AsyncClient) -> None:
    response = await client.delete("/items/5", params={"extra": "x"})
    assert response.json() == {"success": True, "data": [5, "x"]}


async def test_listing(client: httpx.AsyncClient) -> None:
    data = (await client.get("/functions/list")).json()["data"]
    assert [entry["name"] for entry in data["reward"]] == ["score", "length"]
    assert data["total"] == 8
    assert data["functions"][0]["endpoint"] == "/functions/reset"


async def test_body_over_the_limit_is_413(client: httpx.AsyncClient) -> None:
    response = await client.post("/functions/size", json={"data": "x" * LIMIT_BYTES})
    assert response.status_code == 413
    assert response.json()["success"] is False


async def test_body_over_the_limit_without_a_length_is_413(client: httpx.AsyncClient) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"x" * (LIMIT_BYTES // 8)

    for path in ("/functions/size", "/mcp"):
        response = await client.post(path, content=chunks())
        assert response.status_code == 413


async def test_body_limit_of_mcp_is_ours_not_the_librarys_4_mib(client: httpx.AsyncClient) -> None:
    text = "x" * (LIMIT_BYTES - 1000)
    answer = await rpc(client, "tools/call", {"name": "echo", "arguments": {"text": text}})
    assert answer["result"]["structuredContent"] == {"result": text}


async def test_header_bounds_the_call(client: httpx.AsyncClient) -> None:
    response = await client.post("/functions/slow", headers={"aenv-timeout-s": "0.05"})
    assert response.status_code == 504
    assert response.json()["code"] == "tool_timeout"


async def test_header_that_is_not_a_number_is_400(client: httpx.AsyncClient) -> None:
    response = await client.post("/functions/reset", headers={"aenv-timeout-s": "soon"})
    assert response.status_code == 400


async def test_repeated_call_id_gives_the_first_outcome(client: httpx.AsyncClient) -> None:
    """Invariant 1: no call runs a function twice."""
    headers = {"aenv-call-id": "one"}
    first = await client.post("/functions/reset", json={"seed": 1}, headers=headers)
    again = await client.post("/functions/reset", json={"seed": 2}, headers=headers)
    assert first.json() == again.json()


# --- rewards -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "data"),
    [("/task/reward", 1.0), ("/task/reward/length", 2), ("/task/reward?name=length", 2)],
)
async def test_rewards(client: httpx.AsyncClient, path: str, data: float) -> None:
    response = await client.post(path, json={"answer": "42"})
    assert response.json() == {"success": True, "data": data}


# --- health --------------------------------------------------------------------------------------


async def test_default_health(client: httpx.AsyncClient) -> None:
    response = await client.get("/health")
    assert response.status_code == 200
    assert response.json()["data"]["status"] == "success"


def _raises() -> None:
    raise OSError("no display")


@pytest.mark.parametrize(
    ("check", "http_status", "status"),
    [
        (lambda: {"status": "ok"}, 200, "healthy"),  # AEnvironment's client knows no "ok"
        (lambda: {"detail": 1}, 200, "healthy"),
        (lambda: True, 200, "healthy"),
        (lambda: {"status": "starting"}, 503, "starting"),
        (lambda: False, 503, "unhealthy"),
        (_raises, 503, "unhealthy"),
    ],
)
async def test_health_returns_what_the_function_returns(
    check: Any, http_status: int, status: str
) -> None:
    registry = make_registry()
    registry.set_health(check)
    async with client_of(Dispatcher(registry)) as client:
        response = await client.get("/health")
    assert response.status_code == http_status
    assert response.json()["success"] is True
    assert response.json()["data"]["status"] == status


async def test_an_agent_cannot_act_at_the_public_door_while_a_reward_runs() -> None:
    """Invariant 14: the reward may come through any door."""
    registry, begun, done = make_registry(), threading.Event(), threading.Event()

    def slow_score() -> float:
        begun.set()
        assert done.wait(10)
        return 1.0

    registry.add_reward(slow_score)
    async with client_of(Dispatcher(registry)) as client:
        graded = asyncio.create_task(client.post("/task/reward/slow_score", json={}))
        assert await asyncio.to_thread(begun.wait, 10)
        params = {"name": "echo", "arguments": {"text": "x"}}
        refused = await rpc(client, "tools/call", params)
        assert refused["error"]["data"]["code"] == "call_cancelled"
        done.set()
        assert (await graded).json()["data"] == 1.0
        assert not (await rpc(client, "tools/call", params))["result"].get("isError")


# --- load failure --------------------------------------------------------------------------------


async def test_every_route_reports_a_load_failure() -> None:
    async with client_of(Dispatcher(Registry(), load_error="boom at line 3")) as client:
        health = await client.get("/health")
        assert health.status_code == 503
        assert health.json()["data"] == {
            "status": "unhealthy",
            "message": "boom at line 3",
            "code": "sandbox_start_failed",
        }
        for method, path in [
            ("GET", "/functions/list"),
            ("POST", "/functions/reset"),
            ("POST", "/task/reward"),
        ]:
            response = await client.request(method, path)
            assert (response.status_code, response.json()["error"]) == (502, "boom at line 3")
        for mcp_method, params in [("tools/list", {}), ("tools/call", {"name": "echo"})]:
            error = (await rpc(client, mcp_method, params))["error"]
            assert "boom at line 3" in error["message"]
            assert error["data"]["code"] == "sandbox_start_failed"


# --- mcp -----------------------------------------------------------------------------------------


async def test_tools_are_listed_with_the_registrys_schema(client: httpx.AsyncClient) -> None:
    (tool,) = (await rpc(client, "tools/list", {}))["result"]["tools"]
    assert tool["name"] == "echo"
    assert tool["inputSchema"] == make_registry().tool("echo").signature.schema


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"name": "nope", "arguments": {}}, "tool_not_found"),
        ({"name": "echo", "arguments": {"txt": 1}}, "tool_input_invalid"),
    ],
)
async def test_refusals_are_results_for_the_model_and_data_for_programs(
    client: httpx.AsyncClient, params: dict[str, Any], code: str
) -> None:
    result = (await rpc(client, "tools/call", params))["result"]
    assert result["isError"] is True
    assert "echo" in result["content"][0]["text"]
    assert result["_meta"]["aenv/error"]["code"] == code


@pytest.mark.parametrize("name", ["score", "length", "reset", "health", "aenv/reward"])
async def test_mcp_serves_only_tools(client: httpx.AsyncClient, name: str) -> None:
    """Invariant 8: the agent's door cannot call rewards, reset or release."""
    result = (await rpc(client, "tools/call", {"name": name}))["result"]
    assert result["_meta"]["aenv/error"]["code"] == "tool_not_found"


@pytest.mark.parametrize("method", ["aenv/reward", "aenv/function", "aenv/exec", "aenv/call_tools"])
async def test_mcp_serves_only_mcp_methods(client: httpx.AsyncClient, method: str) -> None:
    """Invariant 8: the agent's door cannot call rewards, reset or release."""
    answer = await rpc(client, method, {"name": "score", "arguments": {}, "command": "true"})
    assert answer["error"]["code"] == -32601


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),  # a server of somebody else on this machine
        ({"origin": "null"}, 403),
        ({"host": "evil.example", "origin": "http://evil.example"}, 421),  # DNS rebinding
    ],
)
async def test_web_pages_of_other_origins_are_refused(
    client: httpx.AsyncClient, headers: dict[str, str], status: int
) -> None:
    """A page that its reader's browser runs must not call tools on the reader's machine."""
    assert (await client.post("/functions/reset", headers=headers)).status_code == status


async def test_pages_of_the_server_itself_may_call_it(client: httpx.AsyncClient) -> None:
    origin = str(client.base_url).rstrip("/")
    answer = await client.post("/functions/reset", headers={"origin": origin})
    assert answer.status_code == 200
