"""Creates of `AsyncEnvHandle`."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from aenv_ray.actors.fabric import instance_batches
from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.actors.fabric.create_protocol import CreateProtocol
from aenv_ray.actors.fabric.shutdown_gate import ShutdownGate
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.client.async_handle import AsyncEnvHandle


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A connection to a cluster that does nothing."""
    monkeypatch.setattr(ray_api, "session_scope", lambda: "scope")
    monkeypatch.setattr(ray_api, "job_id", lambda: "job")
    return SimpleNamespace(controller=None, quotas=None, gate=ShutdownGate(), protocols={})


async def test_creates_that_wait_for_room_occupy_no_threads(
    monkeypatch: pytest.MonkeyPatch, fabric: Any
) -> None:
    """All of them announce what they need, and other work in threads goes on."""
    waiting, all_wait, room = [], asyncio.Event(), asyncio.Event()

    async def create(self: CreateProtocol, *_: Any, **__: Any) -> Any:
        waiting.append(self)
        if len(waiting) == 40:
            all_wait.set()
        await room.wait()
        host = SimpleNamespace(call=SimpleNamespace(remote=None))
        info, spec = SimpleNamespace(id="x-1"), SimpleNamespace(reference="x@1.0.0")
        return [SimpleNamespace(info=info, spec=spec, host=host, introduction=None)]

    async def specs(*_: Any) -> list[Any]:
        return [SimpleNamespace(places=1)]

    monkeypatch.setattr(CreateProtocol, "create", create)
    monkeypatch.setattr(instance_batches.InstanceBatches, "_specs", specs)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    source: Any = SimpleNamespace(digest="d")
    creates = [AsyncEnvHandle.create_of(fabric, source, CreateOptions()) for _ in range(40)]
    async with asyncio.TaskGroup() as group:
        made = [group.create_task(create) for create in creates]
        await asyncio.wait_for(all_wait.wait(), 30)
        assert await asyncio.to_thread(lambda: "done") == "done"
        room.set()
    assert {(one.result().instance_id, one.result().digest) for one in made} == {("x-1", "d")}
    assert len(set(map(id, waiting))) == 1, "the creates of one loop share what they know of hosts"


def test_what_closed_event_loops_knew_is_dropped(fabric: Any) -> None:
    async def main() -> CreateProtocol:
        return instance_batches._protocol_of_loop(fabric)

    first, second = asyncio.run(main()), asyncio.run(main())
    assert first is not second
    assert list(fabric.protocols.values()) == [second]
