"""Episodes of a trainer that end while it waits for them."""

from __future__ import annotations

import asyncio
import json
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aenv_ray import logs
from aenv_ray.actors.fabric.create_protocol import CreateListener
from aenv_ray.client.loop_thread import LoopThread
from aenv_ray.errors import CapacityExceeded, InstanceReleased
from aenv_ray.integrations import episodes
from aenv_ray.integrations.episodes import (
    EpisodeOutcome,
    EpisodePool,
    LiveEpisode,
    SyncEpisode,
    _Version,
)
from aenv_ray.sampling import Task
from aenv_ray.sampling.episode_env import EpisodeEnv, EpisodeLog
from aenv_ray.trajectories.schema import Episode, EpisodeStatus


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


async def test_what_a_trainer_tells_its_model_is_recorded() -> None:
    loop, log = LoopThread("pool"), EpisodeLog()
    instance: Any = SimpleNamespace(handle=SimpleNamespace(instance_id="fake-1"))
    live = LiveEpisode("fake", Task(id="t"), loop, _Version())

    async def begin() -> None:
        async def playing() -> Episode:
            await live.hand_to_trainer(EpisodeEnv(instance, log))
            return await _never()

        live.play(playing())
        await live.begun()

    await asyncio.to_thread(loop.wait, begin())
    await live.record_message({"role": "user"})
    await live.record_tools([{"type": "function"}])
    recorded = log.tools
    SyncEpisode(live, loop).record_tools([{"type": "custom"}])
    await live.abandon()
    await asyncio.to_thread(loop.close)
    assert log.messages == [{"role": "user"}]
    assert recorded is not None
    assert json.loads(log.contents[recorded.digest]) == [{"type": "function"}]
    assert log.tools is not None
    assert json.loads(log.contents[log.tools.digest]) == [{"type": "custom"}]


@pytest.mark.parametrize(
    ("status", "reward", "is_scored", "is_void"),
    [
        (EpisodeStatus.COMPLETED, None, False, False),
        (EpisodeStatus.DIED_INSIDE, None, False, False),
        (EpisodeStatus.INFRA_FAILED, None, False, True),
        (EpisodeStatus.DIED_INSIDE, 0.0, True, False),
        (EpisodeStatus.COMPLETED, None, True, True),
    ],
)
def test_an_agent_voids_no_episode_by_ending_its_sandbox(
    status: EpisodeStatus, reward: float | None, is_scored: bool, is_void: bool
) -> None:
    """Invariant 14: also if steps bring the rewards, and the task has none."""
    task = Task.model_validate({"id": "t", "reward": {} if is_scored else None})
    episode = Episode(index=0, task_id="t", task=task, status=status, reward=reward)
    assert EpisodeOutcome(episode).is_void is is_void


class _NoInstances:
    """A cluster without room, as `InstanceBatches`."""

    def __init__(self, *_: Any) -> None:
        """Nothing is connected."""

    def is_connected(self) -> bool:
        return True

    async def create(self, count: int, listener: CreateListener) -> None:
        for _ in range(count):
            listener.on_outcome(CapacityExceeded("full"))


async def test_the_logs_of_an_episode_name_its_owner(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(episodes, "InstanceBatches", _NoInstances)
    caplog.handler.setFormatter(logs.JsonLines("trainer"))
    nothing = cast("Any", None)
    pool = EpisodePool("fake", infra_retries=0, owner="team-a")
    core = await pool._opened(nothing, nothing, nothing)
    with caplog.at_level(logging.INFO, logger=logs.events.name):
        await core.begin(Task(id="t"), 1)
    await core.close()
    assert '"owner": "team-a"' in caplog.text
