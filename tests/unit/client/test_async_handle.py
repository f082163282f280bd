"""Creates of `AsyncEnvHandle`, which block in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aenv_ray.actors.fabric import fabric as fabric_module
from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.actors.fabric.fabric import Fabric
from aenv_ray.actors.fabric.shutdown_gate import ShutdownGate
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.client.async_handle import AsyncEnvHandle


class FakeFabric(Fabric):
    """A connection whose creates wait for room once, and then return an instance.

    Args:
        in_time: Whether a wait looks again before there is room.
    """

    def __init__(self, *, in_time: bool) -> None:
        self.gate = ShutdownGate()
        self._notice_after_s = 5.0
        self._in_time = in_time
        self.waits, self.has_ended = threading.Event(), threading.Event()
        self.room = threading.Event()
        self.created: list[str] = []
        self.released: list[str] = []
        self.error: BaseException | None = None

    def create(self, *_: Any) -> list[Any]:
        try:
            self.wait("room", "room")  # type: ignore[arg-type]
        except BaseException as exc:
            self.error = exc
            self.has_ended.set()
            raise
        self.created.append("x-1")
        release = SimpleNamespace(remote=lambda: "release")
        return [SimpleNamespace(instance_id="x-1", release=release)]

    def ray_wait(
        self, reference: str, _: str, __: float, look: Callable[[float], None], **___: Any
    ) -> None:
        if reference == "release":
            self.released.append("x-1")
            self.has_ended.set()
            return
        self.waits.set()
        assert self.room.wait(10.0)
        if self._in_time:
            look(0.5)


@pytest.mark.parametrize("in_time", [True, False])
async def test_a_create_that_is_cancelled_stops_waiting_or_releases_what_it_created(
    monkeypatch: pytest.MonkeyPatch, in_time: bool
) -> None:
    """While it waits, it has a place in the queue, and counts in quotas."""
    fabric = FakeFabric(in_time=in_time)
    monkeypatch.setattr(ray_api, "wait", fabric.ray_wait)
    source: Any = SimpleNamespace(digest="d")
    creating = asyncio.create_task(AsyncEnvHandle.create_of(fabric, source, CreateOptions()))
    await asyncio.to_thread(fabric.waits.wait)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    fabric.room.set()
    assert await asyncio.to_thread(fabric.has_ended.wait, 10.0)
    assert fabric.created == fabric.released
    assert isinstance(fabric.error, asyncio.CancelledError) is in_time
    assert fabric_module._stop.get() is None
