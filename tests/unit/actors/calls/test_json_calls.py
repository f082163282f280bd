"""Calls that a process forwards for others."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from aenv_ray.actors.calls import json_calls, local_door
from aenv_ray.actors.calls.call_batching import RESULT, call_name
from aenv_ray.actors.calls.handle import EnvHandle
from aenv_ray.actors.calls.introduction import DoorClaim, Introduction
from aenv_ray.actors.calls.json_calls import InstanceCalls, JsonCall
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.errors import ConfigError, DeadlineExceeded
from aenv_ray.ids import InstanceId
from aenv_ray.runtime.door.async_calls import Disconnect


class Host:
    """A host that answers all calls, and is on another node or has engines without doors."""

    def __init__(self, introduction: Introduction | None) -> None:
        self._introduction = introduction
        self.introduced = 0
        self.calls = 0
        self.exchange = SimpleNamespace(remote=self._exchange)
        self.introduce = SimpleNamespace(remote=self._introduce)

    async def _exchange(self, begin: list[Any], follow: list[str], cancel: list[str]) -> list[Any]:
        del follow, cancel
        self.calls += len(begin)
        return [[key, RESULT, b"{}"] for key, *_ in begin]

    async def _introduce(self, *_: Any) -> Introduction | None:
        self.introduced += 1
        return self._introduction


@pytest.mark.parametrize("where", ["another node", "an engine without doors"])
async def test_an_instance_that_cannot_be_called_directly_costs_one_try(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its calls go through the host, and are not delayed."""
    monkeypatch.setattr(ray_api, "session_scope", lambda: "here")
    monkeypatch.setattr(local_door, "RETRY_S", 0.0)

    async def present(*_: Any) -> Any:
        raise ConfigError("its engine has no doors")

    monkeypatch.setattr(local_door, "present", present)
    host = Host(None if where == "another node" else Introduction("path", "key", None))
    handle = EnvHandle(InstanceId("a-1"), "a@1.0.0", host, SimpleNamespace())

    async def find(_: str) -> EnvHandle:
        return handle

    calls = InstanceCalls(find, lambda _: None)
    for _ in range(50):
        call = JsonCall("a-1", "tools/list", {}, {})
        assert await calls.call(call, Disconnect()) == b"{}"
    assert (host.calls, host.introduced) == (50, 1)


async def test_a_cancellation_does_not_wait_for_a_host_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant 9."""
    asked: list[Any] = []

    def exchange(*arguments: Any) -> asyncio.Future[None]:
        asked.append(arguments)
        return asyncio.get_running_loop().create_future()

    host = SimpleNamespace(exchange=SimpleNamespace(remote=exchange))
    handle = EnvHandle(InstanceId("a-1"), "a@1.0.0", host, SimpleNamespace())

    async def find(instance_id: str) -> EnvHandle:
        assert instance_id == "a-1"
        return handle

    monkeypatch.setattr(json_calls, "_CANCEL_S", 0.01)
    async with asyncio.timeout(30):
        with pytest.raises(DeadlineExceeded, match=r"cancelling a call on a-1"):
            await InstanceCalls(find, lambda _: None).cancel("a-1", "named")
    assert asked == [([], [], [call_name("a-1", "named")])]


# --- direct calls --------------------------------------------------------------------------------


class Peer:
    """What a door connects to: the instance's host, which reads reports, and its sandbox."""

    def __init__(self) -> None:
        self.ours: list[socket.socket] = []
        self.host, self.door = self._connected(), self._connected()

    def _connected(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self.ours.append(ours)
        return theirs

    async def requested(self) -> dict[str, Any]:
        """Return the next request of the caller."""
        return dict(json.loads(await asyncio.get_running_loop().sock_recv(self.door, 65_536)))

    async def send(self, **message: Any) -> None:
        line = json.dumps({"jsonrpc": "2.0", **message}, separators=(",", ":")).encode() + b"\n"
        await asyncio.get_running_loop().sock_sendall(self.door, line)

    async def reports(self) -> list[list[Any]]:
        """Return what the caller reports until it disconnects."""
        data = b""
        while more := await asyncio.get_running_loop().sock_recv(self.host, 65_536):
            data += more
        return [json.loads(line) for line in data.splitlines()]


class Direct:
    """Calls to instances on this node, of which one may be connected to at a time."""

    def __init__(self) -> None:
        self.host = Host(Introduction("path", "key", None))
        self.peers: dict[str, Peer] = {}
        self.calls = InstanceCalls(self._find, lambda _: None)

    async def _find(self, instance_id: str) -> EnvHandle:
        return EnvHandle(InstanceId(instance_id), "a@1.0.0", self.host, SimpleNamespace())

    async def present(
        self, _: Introduction, claim: DoorClaim
    ) -> tuple[socket.socket, socket.socket]:
        made = self.peers[claim.instance_id] = Peer()
        host, door = made.ours
        return host, door

    async def by_host(self, instance_id: str, count: int = 1) -> None:
        for _ in range(count):
            await self.calls.call(JsonCall(instance_id, "tools/list", {}, {}), Disconnect())

    async def connected(self, instance_id: str) -> Peer:
        await self.by_host(instance_id, local_door.DIRECT_AFTER)
        async with asyncio.timeout(30):
            while self.calls._open_doors.get(instance_id) is None:  # noqa: ASYNC110
                await asyncio.sleep(0)
        return self.peers[instance_id]


@pytest.fixture
async def direct(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Direct]:
    monkeypatch.setattr(ray_api, "session_scope", lambda: "here")
    monkeypatch.setattr(json_calls, "MAX_DOORS", 1)
    made = Direct()
    monkeypatch.setattr(local_door, "present", made.present)
    yield made
    made.calls.close()
    for peer in made.peers.values():
        peer.host.close()
        peer.door.close()


async def test_an_evicted_door_closes_when_its_calls_have_ended(direct: Direct) -> None:
    """Invariant 12: the caller gets what the tool reports meanwhile, and the call is not moved."""
    peer = await direct.connected("a-1")
    call = JsonCall("a-1", "tools/call", {"name": "slow"}, {})
    news = direct.calls.follow(call, "", Disconnect())
    first = asyncio.ensure_future(anext(news))
    request = await peer.requested()
    await direct.connected("a-2")
    sent = direct.host.calls
    token = request["params"]["_meta"]["progressToken"]
    report = {"progressToken": token, "progress": 0.5, "message": "half"}
    await peer.send(method="notifications/progress", params=report)
    async with asyncio.timeout(30):
        assert await first == [(0.5, None, "half")]
        await peer.send(id=request["id"], result={"content": []})
        assert await anext(news) == b'{"content":[]}'
        await news.aclose()
        assert sum(calls for _, calls, _, _ in await peer.reports()) == 1
    assert direct.host.calls == sent


async def test_only_open_doors_count_towards_the_limit(direct: Direct) -> None:
    """An instance that is called once takes no connection from one that is called often."""
    await direct.connected("a-1")
    for number in range(2, 10):
        await direct.by_host(f"a-{number}")
    assert direct.calls._open_doors.get("a-1") is not None
    await direct.connected("a-10")
    assert direct.calls._open_doors.get("a-1") is None


async def test_a_door_that_breaks_makes_room(direct: Direct) -> None:
    """Sandboxes that ended are not counted, and a repeated connection is the same door's."""
    peer = await direct.connected("a-1")
    door = direct.calls._open_doors.get("a-1")
    peer.door.close()
    async with asyncio.timeout(30):
        while len(direct.calls._open_doors):  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert direct.calls._closed_doors.get("a-1") is door
