"""Direct calls to a sandbox on the same node: what holds through the host holds here too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import ray

import aenv_ray
from aenv_ray.actors.calls import local_door
from aenv_ray.actors.calls.handle import EnvHandle
from aenv_ray.actors.calls.introduction import DoorClaim
from aenv_ray.actors.calls.local_door import LocalDoor, present
from aenv_ray.actors.calls.wire import CallMessage, call_message
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.errors import (
    CallOutcomeUnknown,
    Forbidden,
    InstanceReleased,
    SandboxLost,
    ToolTimeout,
)
from aenv_ray.ids import CallId
from aenv_ray.models import InstanceStatus
from aenv_ray.runtime.door.roles import DoorRole
from tests.ray.cluster import Cluster
from tests.ray.faults import (
    GONE_S,
    PROBE,
    Driver,
    Witness,
    actor_pid,
    eventually,
    host_of,
    kill,
    stop,
)

Told = Callable[..., EnvHandle]


@pytest.fixture
async def direct(told: Told) -> AsyncIterator[AsyncEnvHandle]:
    """An instance that this process is connected to."""
    instance = AsyncEnvHandle(told())
    assert await instance.connect_directly()
    yield instance
    await instance.close()


def call(handle: EnvHandle, method: str, name: str, call_id: str, **arguments: Any) -> CallMessage:
    params = {"name": name, "arguments": arguments}
    return CallMessage.decode(
        call_message(handle.instance_id, method, params, CallId(call_id), 60.0)
    )


def break_connection(instance: AsyncEnvHandle) -> None:
    """Break the connection to the sandbox, as the runtime would when it runs out of threads."""
    door = instance._door
    assert door is not None
    assert door._connection is not None
    door._connection._on_broken(None)


async def test_calls_bypass_the_host(direct: AsyncEnvHandle) -> None:
    """While the host is stopped, direct calls are answered."""
    pid = actor_pid(host_of(direct.handle))
    stop(pid)
    try:
        assert (await direct.call_tool("count", {}, 30.0)).data == 1
    finally:
        kill(pid, 18)
    assert (await direct.call_tool("count", {}, 30.0)).data == 2


async def test_calls_become_direct_by_themselves(told: Told) -> None:
    """An instance that is called again and again is soon called directly."""
    instance = AsyncEnvHandle(told())
    numbers = []
    while instance._door is None or not instance._door.is_open:
        numbers.append((await instance.call_tool("count", {}, 30.0)).data)
    numbers.append((await instance.call_tool("count", {}, 30.0)).data)
    assert numbers == list(range(1, len(numbers) + 1))
    assert (await instance.info()).calls == len(numbers)
    await instance.close()


async def test_a_call_survives_a_broken_connection(
    direct: AsyncEnvHandle, witness: Witness
) -> None:
    """Invariant 1: it runs once, through the host; later calls are direct again."""
    async with asyncio.TaskGroup() as group:
        held = [
            group.create_task(direct.call_tool(tool, {"key": tool}, 60.0))
            for tool in ("hold", "ahold")
        ]
        for tool in ("hold", "ahold"):
            await asyncio.to_thread(witness.wait_for, f"began {tool}")
        break_connection(direct)
        for tool in ("hold", "ahold"):
            await direct.write_file(tool, b"")
    assert [task.result().data for task in held] == ["held hold", "held ahold"]
    assert sorted(witness.heard()) == ["began ahold", "began hold", "ended ahold", "ended hold"]
    assert await direct.connect_directly()
    assert (await direct.call_tool("count", {}, 30.0)).data == 1


async def test_a_call_survives_the_death_of_its_host(
    direct: AsyncEnvHandle, witness: Witness
) -> None:
    """Invariant 1: the new host has the call's outcome, and introduces the caller again."""
    async with asyncio.TaskGroup() as group:
        held = group.create_task(direct.call_tool("hold", {"key": "k"}, 60.0))
        await asyncio.to_thread(witness.wait_for, "began k")
        kill(actor_pid(host_of(direct.handle)))
        await direct.write_file("k", b"")
    assert held.result().data == "held k"
    assert witness.heard() == ["began k", "ended k"]
    assert await direct.connect_directly()
    assert (await direct.call_tool("count", {}, 30.0)).data == 1
    assert (await direct.info()).generation == 1


async def test_a_flood_of_calls_survives_the_death_of_its_host(
    direct: AsyncEnvHandle, witness: Witness
) -> None:
    """Invariant 1: of 300 calls, before, during and after it, each runs exactly once."""
    async with asyncio.TaskGroup() as group:
        calls = [
            group.create_task(direct.call_tool("note", {"line": str(n)}, 60.0)) for n in range(200)
        ]
        await asyncio.to_thread(kill, actor_pid(host_of(direct.handle)))
        calls += [
            group.create_task(direct.call_tool("note", {"line": str(n)}, 60.0))
            for n in range(200, 300)
        ]
    assert len({task.result().data for task in calls}) == 1
    expected = sorted(f"note {n}" for n in range(300))
    await asyncio.to_thread(eventually, lambda: sorted(witness.heard()) == expected)
    assert (await direct.read_file("notes.txt")).count(b"\n") == 300


async def test_a_cancelled_call_is_cancelled(direct: AsyncEnvHandle, witness: Witness) -> None:
    """Invariant 11: the tool is cancelled, even if the call has moved to the host meanwhile."""
    for key in ("direct", "moved"):
        task = asyncio.create_task(direct.call_tool("hold", {"key": key}, 60.0))
        await asyncio.to_thread(witness.wait_for, f"began {key}")
        if key == "moved":
            break_connection(direct)
            await direct.call_tool("count", {}, 30.0)  # the call has moved by then
        task.cancel()
        await asyncio.to_thread(witness.wait_for, f"interrupted {key}")
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_call_ends_at_its_deadline(
    told: Told, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 9: the runtime stops it; the error differs if the runtime does not answer."""
    monkeypatch.setattr(local_door, "CALL_GRACE_S", 0.1)
    before = cluster.sandboxes()
    instance = AsyncEnvHandle(told())
    (pid,) = cluster.appeared(before)
    assert await instance.connect_directly()
    with pytest.raises(ToolTimeout):
        await instance.call_tool("block", {}, 0.2)
    stop(pid)
    with pytest.raises(CallOutcomeUnknown):
        await instance.call_tool("count", {}, 0.1)
    await instance.close()


async def test_a_lost_sandbox_is_lost_with_its_cause(told: Told, cluster: Cluster) -> None:
    """Invariant 2: running calls and later ones, with the words of the host."""
    before = cluster.sandboxes()
    instance = AsyncEnvHandle(told())
    (pid,) = cluster.appeared(before)
    assert await instance.connect_directly()
    running = asyncio.create_task(instance.call_tool("block", {}, 60.0))
    await instance.call_tool("count", {}, 30.0)
    kill(pid)
    for awaited in (running, instance.call_tool("count", {}, 30.0)):
        with pytest.raises(SandboxLost, match="SIGKILL"):
            await awaited
    await instance.close()


async def test_a_released_instance_is_released(direct: AsyncEnvHandle) -> None:
    running = asyncio.create_task(direct.call_tool("block", {}, 60.0))
    await direct.call_tool("count", {}, 30.0)
    await direct.release()
    for awaited in (running, direct.call_tool("count", {}, 30.0)):
        with pytest.raises(InstanceReleased):
            await awaited


async def test_a_call_id_runs_once_whichever_way_it_comes(direct: AsyncEnvHandle) -> None:
    """Invariant 1: a repetition through the host gets the outcome of the direct call."""
    door = direct._door
    assert door is not None
    first = await door.request(call(direct.handle, "tools/call", "count", "mine"))
    again = await direct.handle.call_tool.remote("count", call_id="mine")
    assert (b'"1"' in first, again.data) == (True, 1)


async def test_a_key_opens_only_its_instance(told: Told) -> None:
    """Invariant 15: neither a key of another owner's instance nor a used one."""
    mine, other = told(owner="ada"), told(owner="eve")
    asked = host_of(mine).introduce.remote(mine.instance_id, ray_api.session_scope(), "owner")
    introduction = ray.get(asked)
    with pytest.raises(ConnectionRefusedError):
        await present(introduction, DoorClaim(other.instance_id, introduction.key))
    with pytest.raises(ConnectionRefusedError):  # it was presented
        await present(introduction, DoorClaim(mine.instance_id, introduction.key))
    with pytest.raises(ConnectionRefusedError):
        await present(introduction, DoorClaim(mine.instance_id, "0" * 64))


async def test_an_agents_connection_calls_tools_only(told: Told) -> None:
    """Invariant 8: rewards, functions and files are refused, whatever its greeting says."""
    handle = told()
    door = LocalDoor(handle, DoorRole.AGENT)
    assert await door.open()
    assert b'"1"' in await door.request(call(handle, "tools/call", "count", "a"))
    for method in ("aenv/reward", "aenv/function", "aenv/exec", "aenv/read_file", "aenv/hello"):
        with pytest.raises(Forbidden, match=method):
            await door.request(call(handle, method, "double", f"a-{method}", role="owner"))
    door.close()


def test_a_call_outlives_its_caller(
    told: Told, witness: Witness, driver: Callable[[str], Driver]
) -> None:
    """The instance is not idle while it runs, and another process gets its outcome."""
    caller = driver(
        f"""
import asyncio
from aenv_ray.client.async_handle import AsyncEnvHandle

async def main():
    instance = AsyncEnvHandle(aenv_ray.create({str(PROBE)!r}, actor="shared", lifetime="detached",
                              idle_timeout=2.0, environment_variables={witness.variables!r}))
    assert await instance.connect_directly()
    say(instance.instance_id)
    await instance.call_tool("hold", {{"key": "k"}}, 600.0, "mine")

asyncio.run(main())
"""
    )
    held = aenv_ray.get(caller.said())
    witness.wait_for("began k")
    caller.kill()
    other = told(idle_timeout=2.0)
    eventually(lambda: ray.get(other.info.remote()).status is InstanceStatus.TERMINATED)
    assert ray.get(held.info.remote()).status is InstanceStatus.RUNNING
    ray.get(held.write_file.remote("k", b""))
    again = ray.get(held.call_tool.remote("hold", {"key": "k"}, 60.0, call_id="mine"))
    assert again.data == "held k"
    assert witness.heard() == ["began k", "ended k"]
    eventually(lambda: ray.get(held.info.remote()).status is InstanceStatus.TERMINATED)


async def test_another_node_is_reached_through_its_host(told: Told) -> None:
    """The host introduces no caller on another node."""
    handle = told()
    asked = host_of(handle).introduce.remote(handle.instance_id, "another/node", "owner")
    assert ray.get(asked, timeout=GONE_S) is None
