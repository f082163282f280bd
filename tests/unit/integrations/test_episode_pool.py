"""Tests of `EpisodePool` without Ray."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from aenv_ray.client.loop_thread import LoopThread
from aenv_ray.integrations.episodes import EpisodePool
from aenv_ray.trajectories.schema import Task


class _Core:
    """Begins episodes immediately, and notes those that are abandoned."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.abandoned: list[str] = []

    async def begin(self, task: Task, count: int) -> list[str]:
        asyncio.get_running_loop().call_later(0.05, self.begun.set)
        return [f"{task.id} {n}" for n in range(count)]

    async def abandon(self, episodes: list[str]) -> None:
        self.abandoned += episodes


def test_episodes_that_a_cancelled_begin_does_not_return_are_abandoned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core, loop = _Core(), LoopThread("aenv-test")
    monkeypatch.setattr(EpisodePool, "_connected", lambda _: (core, loop))
    pool = EpisodePool("mini-terminal")

    async def main() -> None:
        beginning: asyncio.Task[Any] = asyncio.create_task(pool.begin_group({"id": "t"}, 2))
        while not core.begun.is_set():
            await asyncio.sleep(0)  # it connects in a thread
            core.begun.wait(0.2)  # this loop does not hear of the result
        beginning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await beginning

    asyncio.run(main())
    loop.wait(asyncio.sleep(0))
    loop.close()
    assert core.abandoned == ["t 0", "t 1"]
