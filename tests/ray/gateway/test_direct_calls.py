"""Calls of a gateway to instances on its node go to their sandboxes, past the host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aenv_ray.actors.calls.call_batching import BatchClient
from aenv_ray.actors.calls.json_calls import InstanceCalls
from aenv_ray.actors.calls.local_door import LocalDoor
from aenv_ray.errors import InstanceReleased, SandboxLost
from tests.ray.cluster import Cluster
from tests.ray.faults import Witness, actor_pid, eventually, host_of, kill, stop
from tests.ray.gateway.data_gateway import Door, GatewayBench

pytestmark = pytest.mark.usefixtures("cluster")

Told = Callable[..., Any]


@pytest.fixture
def by_host(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The messages that go to hosts."""
    sent: list[bytes] = []
    send = BatchClient.send

    def noted(self: BatchClient, message: bytes, *args: Any) -> Any:
        sent.append(message)
        return send(self, message, *args)

    monkeypatch.setattr(BatchClient, "send", noted)
    return sent


def calls_of(gateway: GatewayBench, replica: int = 0) -> InstanceCalls:
    return gateway.replicas[replica].gateway.deps.calls


def open_door(gateway: GatewayBench, door: Door) -> LocalDoor | None:
    return calls_of(gateway)._open_doors.get(door.id)


async def tool(door: Door, name: str, session: str = "", **arguments: Any) -> Any:
    headers = {"mcp-session-id": session} if session else None
    answer = await door.rpc("tools/call", {"name": name, "arguments": arguments}, headers)
    return answer.body


async def connected(gateway: GatewayBench, handle: Any) -> Door:
    """An instance that has been called often enough."""
    door = Door(gateway, handle)
    for _ in range(5):
        assert (await door.rpc("tools/list", {})).status == 200
    await asyncio.to_thread(eventually, lambda: open_door(gateway, door))
    return door


async def test_no_call_passes_through_the_host(
    gateway: GatewayBench, told: Told, by_host: list[bytes]
) -> None:
    """Tools, with and without progress, functions and rewards; even while the host is stopped."""
    door = await connected(gateway, told())
    pid = actor_pid(host_of(door.handle))
    by_host.clear()
    stop(pid)
    try:
        for n in range(1, 4):
            assert (await tool(door, "count"))["result"]["structuredContent"] == {"result": n}
        followed = {"name": "count", "arguments": {}, "_meta": {"progressToken": "p"}}
        events = await door.rpc("tools/call", followed)
        assert events.body["result"]["structuredContent"] == {"result": 4}
        async with door.http(door.client_headers) as http:
            doubled = await http.post("/functions/double", json={"value": 4})
            assert doubled.json() == {"success": True, "data": 8}
            assert (await http.post("/task/reward")).json()["data"] == {"score": 0.5}
    finally:
        kill(pid, 18)
    assert by_host == []
    await asyncio.to_thread(  # calls count for the idle timeout
        eventually, lambda: gateway.replicas[0].run(info_of(gateway, door)).calls >= 11
    )


async def info_of(gateway: GatewayBench, door: Door) -> Any:
    return await gateway.replicas[0].gateway.deps.fabric.info(door.id)


@pytest.mark.parametrize("what", ["connection", "host"])
async def test_a_call_survives_the_end_of_the_connection_or_of_the_host(
    gateway: GatewayBench, told: Told, witness: Witness, what: str
) -> None:
    """Invariant 1: it continues through the host under its id and runs once; then anew directly."""
    door = await connected(gateway, told())
    async with asyncio.TaskGroup() as group:
        held = [group.create_task(tool(door, name, key=name)) for name in ("hold", "ahold")]
        for name in ("hold", "ahold"):
            await asyncio.to_thread(witness.wait_for, f"began {name}")
        if what == "host":
            kill(actor_pid(host_of(door.handle)))
        else:
            opened = open_door(gateway, door)
            assert opened is not None
            gateway.replicas[0].run(broken(opened))
        async with door.http() as http:
            for name in ("hold", "ahold"):
                await http.put(f"{door.path}/files", params={"path": name}, content=b"")
    results = [task.result()["result"]["structuredContent"]["result"] for task in held]
    assert results == ["held hold", "held ahold"]
    assert sorted(witness.heard()) == ["began ahold", "began hold", "ended ahold", "ended hold"]
    eventually_open = asyncio.to_thread(eventually, lambda: open_door(gateway, door))
    async with asyncio.TaskGroup() as group:
        opening = group.create_task(eventually_open)
        counts = []
        while not opening.done():
            counts.append((await tool(door, "count"))["result"]["structuredContent"]["result"])
    assert counts == list(range(1, len(counts) + 1))


async def broken(door: LocalDoor) -> None:
    """Break a connection, as the runtime would when it runs out of threads."""
    assert door._connection is not None
    door._connection._on_broken(None)


@pytest.mark.parametrize("replica", [0, 1])
async def test_any_replica_cancels_a_direct_call(
    gateway: GatewayBench, told: Told, witness: Witness, replica: int
) -> None:
    """Invariant 11: the host passes the cancellation on."""
    door = await connected(gateway, told())
    call = asyncio.create_task(tool(door, "hold", "session", key="k"))
    await asyncio.to_thread(witness.wait_for, "began k")
    note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}}
    headers = {"mcp-session-id": "session"}
    async with door.http(replica=replica) as http:
        assert (await http.post(f"{door.path}/mcp", json=note, headers=headers)).status_code == 202
    await asyncio.to_thread(witness.wait_for, "interrupted k")
    error = (await call)["error"]["data"]
    assert (error["code"], error["hint"]) == ("call_cancelled", "its tool was told to stop")


async def test_a_disconnected_client_stops_its_direct_call(
    gateway: GatewayBench, told: Told, witness: Witness
) -> None:
    """Invariant 11; a call with an id goes on, and its outcome can be asked for."""
    door = await connected(gateway, told())
    for params in (
        {"name": "hold", "arguments": {"key": "a"}},
        {"name": "hold", "arguments": {"key": "b"}, "_meta": {"aenv/call_id": "mine"}},
    ):
        call = asyncio.create_task(door.rpc("tools/call", params))
        await asyncio.to_thread(witness.wait_for, f"began {params['arguments']['key']}")  # type: ignore[index]
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    await asyncio.to_thread(witness.wait_for, "interrupted a")
    async with door.http() as http:
        await http.put(f"{door.path}/files", params={"path": "b"}, content=b"")
    told_again = await door.rpc("tools/call", params)
    assert told_again.body["result"]["structuredContent"] == {"result": "held b"}
    assert sorted(witness.heard()) == ["began a", "began b", "ended b", "interrupted a"]


async def test_an_ended_instance_has_no_door(
    gateway: GatewayBench, told: Told, cluster: Cluster
) -> None:
    """Invariant 2: running and later calls fail with the cause; nothing of it stays open."""
    before = cluster.sandboxes()
    door = await connected(gateway, told())
    (pid,) = cluster.appeared(before)
    running = asyncio.create_task(tool(door, "block"))
    await tool(door, "count")
    kill(pid)
    for awaited in (running, tool(door, "count")):
        assert (await awaited)["error"]["data"]["code"] == SandboxLost.code
    assert open_door(gateway, door) is None
    other = await connected(gateway, told())
    await other.handle.release.remote()
    assert (await tool(other, "count"))["error"]["data"]["code"] == InstanceReleased.code
    assert open_door(gateway, other) is None


async def test_a_replica_has_a_limited_number_of_doors(
    gateway: GatewayBench, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least recently used one is closed; its instance is called through the host again."""
    monkeypatch.setattr(calls_of(gateway)._open_doors, "_max_entries", 1)
    first = await connected(gateway, told())
    assert open_door(gateway, first) is not None
    opened = open_door(gateway, first)
    second = await connected(gateway, told())
    assert opened is not None
    assert not opened.is_open
    assert open_door(gateway, second) is not None
    assert (await tool(first, "count"))["result"]["structuredContent"] == {"result": 1}


async def test_a_call_keeps_the_connection_of_an_evicted_door(
    gateway: GatewayBench,
    told: Told,
    witness: Witness,
    by_host: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant 12: through the host it would lose what its tool reports, logs and asks."""
    monkeypatch.setattr(calls_of(gateway)._open_doors, "_max_entries", 1)
    first = await connected(gateway, told())
    opened = open_door(gateway, first)
    held = asyncio.create_task(tool(first, "hold", key="k"))
    await asyncio.to_thread(witness.wait_for, "began k")
    await connected(gateway, told())
    assert open_door(gateway, first) is None
    async with first.http() as http:
        await http.put(f"{first.path}/files", params={"path": "k"}, content=b"")
    assert (await held)["result"]["structuredContent"] == {"result": "held k"}
    assert not [message for message in by_host if b'"hold"' in message]
    assert opened is not None
    await asyncio.to_thread(eventually, lambda: not opened.is_open)
