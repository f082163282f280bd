"""Functions, rewards, health and files through the gateway, with AEnvironment's requests."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from aenv_ray.actors.calls.local_door import LocalDoor
from aenv_ray.client.over_http import HttpInstance
from aenv_ray.errors import (
    FunctionFailed,
    InstanceReleased,
    ToolInputInvalid,
    ToolNotFound,
    ToolTimeout,
)
from tests.ray.faults import Witness, eventually_empty
from tests.ray.gateway.data_gateway import Door, GatewayBench

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture
async def http(door: Door) -> AsyncIterator[httpx.AsyncClient]:
    """A client that sends the headers of AEnvironment's client, and no token."""
    async with door.http(door.client_headers) as client:
        yield client


@pytest.fixture
async def instance(door: Door) -> AsyncIterator[HttpInstance]:
    instance = HttpInstance(door.gateway.url, headers=door.client_headers)
    yield instance
    await instance.close()


# --- answers -------------------------------------------------------------------------------------


async def test_answers_equal_those_of_the_environments_own_server(
    http: httpx.AsyncClient,
) -> None:
    for method, path, body, status, told in (
        ("POST", "/functions/reset", {"seed": 3}, 200, {"success": True, "data": {"seed": 3}}),
        ("POST", "/task/reward", {"answer": "42"}, 200,
         {"success": True, "data": {"score": 1.0}}),
        ("POST", "/task/reward/length", {"answer": "42"}, 200, {"success": True, "data": 2.0}),
        ("POST", "/task/reward?name=length", {"answer": "4"}, 200,
         {"success": True, "data": 1.0}),
        ("PUT", "/admin/note", {"note": "n"}, 200, {"success": True, "data": "n"}),
        ("DELETE", "/admin/note/remove", None, 200, {"success": True, "data": "n"}),
    ):  # fmt: skip
        answer = await http.request(method, path, json=body)
        assert (answer.status_code, answer.json()) == (status, told), path
    query = {"key": "k", "tags": '["a", "b"]', "limit": "2", "exact": "true"}
    found = (await http.get("/functions/lookup", params=query)).json()
    assert found["data"] == {"key": "k", "limit": 2, "exact": True, "tags": ["a", "b"]}
    listed = (await http.get("/functions/list")).json()
    assert listed["data"]["total"] > 8


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/functions/fail", b"{}", 500, "function_failed"),
        ("POST", "/functions/nope", b"{}", 404, "tool_not_found"),
        ("POST", "/functions/lookup", b"{}", 405, "config_error"),
        ("POST", "/functions/reset", b'{"seed": []}', 422, "tool_input_invalid"),
        ("POST", "/functions/reset", b"{nonsense", 400, "tool_input_invalid"),
        ("POST", "/functions/reset", b"[1]", 400, "tool_input_invalid"),
        ("POST", "/task/reward/broken-reward", b"{}", 500, "function_failed"),
        ("POST", "/task/reward/none", b"{}", 404, "tool_not_found"),
        ("GET", "/task/reward", b"", 405, "config_error"),
        ("POST", "/nowhere/at/all", b"{}", 404, "tool_not_found"),
    ],
)
async def test_failures_have_their_status_and_code(
    http: httpx.AsyncClient, method: str, path: str, body: bytes, status: int, code: str
) -> None:
    answer = await http.request(method, path, content=body)
    told = answer.json()
    assert (answer.status_code, told["success"], told["code"]) == (status, False, code)
    assert told["error"]


async def test_health_comes_from_the_environment(http: httpx.AsyncClient) -> None:
    """200 with "healthy" or "success"; anything else is 503."""
    answer = await http.get("/health")
    assert (answer.status_code, answer.json()["data"]["status"]) == (200, "healthy")
    await http.post("/functions/set_health", json={"status": "starting"})
    try:
        answer = await http.get("/health")
        assert (answer.status_code, answer.json()["data"]["status"]) == (503, "starting")
    finally:
        await http.post("/functions/set_health", json={"status": "healthy"})


async def test_the_http_client_works_through_the_gateway(instance: HttpInstance) -> None:
    """The client for `aenv run` servers needs only the headers."""
    assert (await instance.wait_healthy(30.0))["data"]["status"] == "healthy"
    assert (await instance.call_tool("add", {"a": 1, "b": 2})).data == 3
    assert (await instance.call_tool("huge", {})).meta["aenv/truncated"] is True
    assert await instance.call_function("lookup", {"key": "k"})
    assert await instance.call_reward({"answer": "42"}) == {"score": 1.0}
    with pytest.raises(ToolNotFound):
        await instance.call_tool("nope", {})
    with pytest.raises(ToolTimeout):
        await instance.call_tool("nap", {"seconds": 30}, timeout_s=0.1)
    with pytest.raises(ToolTimeout):
        await instance.call_function("pause", {"seconds": 30}, timeout_s=0.1)
    with pytest.raises(ToolInputInvalid):
        await instance.call_function("reset", {"seed": []})
    with pytest.raises(FunctionFailed, match="the function failed"):
        await instance.call_function("fail", {})


async def test_a_disconnected_client_stops_its_function(
    gateway: GatewayBench, make: Callable[..., Any], witness: Witness, project: Callable[..., Any]
) -> None:
    """Invariant 11: the function is cancelled."""
    source = project(
        "import os, socket, time\n"
        "from aenv_ray.runtime import register_function\n"
        "def tell(text):\n"
        "    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:\n"
        "        sock.sendto(text, ('127.0.0.1', int(os.environ['PROBE_WITNESS'])))\n"
        "@register_function\n"
        "def wait() -> None:\n"
        "    tell(b'began')\n"
        "    try:\n"
        "        while True: time.sleep(0.01)\n"
        "    except BaseException:\n"
        "        tell(b'stopped')\n"
        "        raise\n",
        "host",
    )
    door = Door(gateway, make(source, environment_variables=witness.variables))
    async with door.http(door.client_headers) as http:
        call = asyncio.create_task(http.post("/functions/wait"))
        await asyncio.to_thread(witness.wait_for, "began")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.to_thread(witness.wait_for, "stopped")


# --- addresses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "told"), [("/mcp", 400), ("/functions/list", 400), ("/task/reward", 400)]
)
async def test_the_error_names_missing_headers(gateway: GatewayBench, path: str, told: int) -> None:
    """AEnvironment's client sends none with `skip_for_healthy`."""
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        answer = await http.post(path, json={})
    assert answer.status_code == told
    assert "AEnvCore-MCPProxy-URL" in answer.text


async def test_an_address_is_a_credential_and_is_never_connected_to(
    gateway: GatewayBench, door: Door
) -> None:
    """The gateway connects to no URL of a caller: the name in it must be a lease's."""
    dialled = []

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader
        dialled.append(writer.get_extra_info("peername"))
        writer.close()

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    own = {"AEnvCore-EnvInstance-ID": door.id}
    lease = door.address
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        for address, status in (
            (f"http://{lease}:8081", 200),
            (f"http://{lease.upper()}", 200),
            (f"https://{lease}:9/mcp", 200),
            (lease, 200),
            (f"http://127.0.0.1:{port}", 404),
            (f"http://{lease[:-1]}:8081", 404),
            (f"http://{lease}@127.0.0.1:{port}", 404),
            ("http://", 400),
            ("http://[", 400),
        ):
            headers = {**own, "AEnvCore-MCPProxy-URL": address}
            answer = await http.get("/functions/list", headers=headers)
            assert answer.status_code == status, address
        other = {"AEnvCore-EnvInstance-ID": "other-1", "AEnvCore-MCPProxy-URL": f"http://{lease}"}
        assert (await http.get("/functions/list", headers=other)).status_code == 404
        assert (await http.get("/functions/list", headers=own)).status_code == 400
    server.close()
    await server.wait_closed()
    assert dialled == []


async def test_calls_to_an_ended_instance_fail_with_its_error(
    gateway: GatewayBench, make: Callable[..., Any]
) -> None:
    """Invariant 2: an infrastructure failure is typed, with its status, and never a reward."""
    door = Door(gateway, make())
    async with door.http(door.client_headers) as http:
        assert (await http.post("/task/reward")).json()["data"] == {"score": 0.5}
        await door.handle.release.remote()
        answer = await http.post("/task/reward")
        assert answer.status_code == 410
        assert answer.json()["code"] == InstanceReleased.code
        assert "data" not in answer.json()


# --- files ---------------------------------------------------------------------------------------


def direct_connections(instance_id: str) -> list[LocalDoor]:
    """Return the direct connections of this process to an instance, also those being opened."""
    doors = [found for found in gc.get_objects() if type(found) is LocalDoor]
    return [
        door
        for door in doors
        if door._handle.instance_id == instance_id and (door.is_open or door._opening is not None)
    ]


async def test_files_are_written_read_and_listed(
    gateway: GatewayBench, make: Callable[..., Any]
) -> None:
    """Raw bytes in both directions; reads may exceed the limit of a body, and leave nothing."""
    door = Door(gateway, make())
    path = f"{door.path}/files"
    large = bytes(range(256)) * 4096 * 20  # 20 MiB: several pieces
    async with door.http() as http:
        wrote = await http.put(path, params={"path": "a/large", "mode": "600"}, content=large)
        assert wrote.json()["data"] == {"size_bytes": len(large)}
        assert (await http.get(path, params={"path": "a/large"})).content == large
        await asyncio.to_thread(eventually_empty, lambda: direct_connections(door.id))
        part = {"path": "a/large", "offset": "5000000", "length": "6000000"}
        assert (await http.get(path, params=part)).content == large[5_000_000:11_000_000]
        for _ in range(2):
            added = {"path": "a/small", "append": "true"}
            await http.put(path, params=added, content=b"xy")
        assert (await http.get(path, params={"path": "a/small"})).content == b"xyxy"
        listed = (await http.get(f"{path}/list", params={"path": "a"})).json()["data"]
        assert [(e["name"], e["size_bytes"]) for e in listed] == [
            ("large", len(large)), ("small", 4),
        ]  # fmt: skip
        missing = await http.get(path, params={"path": "none"})
        assert (missing.status_code, missing.json()["error"]["code"]) == (400, "file_access_error")
        for params in ({}, {"path": "x", "offset": "-1"}, {"path": "x", "length": "many"}):
            assert (await http.get(path, params=params)).status_code == 400
        bad_mode = {"path": "x", "mode": "rw"}
        assert (await http.put(path, params=bad_mode, content=b"")).status_code == 400
