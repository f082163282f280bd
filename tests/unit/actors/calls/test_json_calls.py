"""Calls that a process forwards for others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from aenv_ray.actors.calls import json_calls
from aenv_ray.actors.calls.call_batching import call_name
from aenv_ray.actors.calls.handle import EnvHandle
from aenv_ray.actors.calls.json_calls import InstanceCalls
from aenv_ray.errors import DeadlineExceeded
from aenv_ray.ids import InstanceId


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
