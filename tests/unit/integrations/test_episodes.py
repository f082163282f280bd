"""Episodes of a trainer that end while it waits for them."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from aenv_ray.client.loop_thread import LoopThread
from aenv_ray.errors import InstanceReleased
from aenv_ray.integrations.episodes import LiveEpisode, SyncEpisode, _Version
from aenv_ray.sampling import Task
from aenv_ray.trajectories.schema import Episode


async def _never() -> Episode:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize("is_finishing", [True, False])
async def test_an_abandoned_episode_does_not_cancel_who_waits_for_it(is_finishing: bool) -> None:
    """The end of a pool is an error that a trainer can catch, not a cancellation of its own."""
    live = LiveEpisode("fake", Task(id="t"), cast("LoopThread", None), _Version())
    live.play(_never())
    waiting = asyncio.create_task(live._finish(None) if is_finishing else live.begun())
    await asyncio.sleep(0)
    await live.stop()
    with pytest.raises(InstanceReleased, match="abandoned"):
        await waiting


async def test_an_episode_of_a_closed_pool_is_released() -> None:
    loop = LoopThread("closed")
    live = LiveEpisode("fake", Task(id="t"), loop, _Version())
    await asyncio.to_thread(loop.close)
    with pytest.raises(InstanceReleased, match="closed"):
        await live.finish()
    with pytest.raises(InstanceReleased, match="closed"):
        SyncEpisode(live, loop).finish()
