"""Calls that a process forwards for others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from aenv_ray.actors.calls import json_calls, local_door
from aenv_ray.actors.calls.call_batching import RESULT, call_name
from aenv_ray.actors.calls.handle import EnvHandle
from aenv_ray.actors.calls.introduction import Introduction
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
