"""What a replay repeats, what it leaves out, and which rewards it changes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aenv_ray.errors import CallCancelled, ConfigError, DeadlineExceeded, ToolTimeout
from aenv_ray.models import ToolResult
from aenv_ray.sampling import Episode, EpisodeStatus
from aenv_ray.sampling.episode_env import EpisodeEnv, EpisodeLog
from aenv_ray.sampling.replay import recorded, replay
from tests.unit.trajectories.episodes import episode, step

DIED, COMPLETED = EpisodeStatus.DIED_INSIDE, EpisodeStatus.COMPLETED
FAILED = EpisodeStatus.REWARD_FAILED


class Instance:
    """Notes the limits of calls. The tool ``hangs`` never answers, ``slow`` not in time."""

    def __init__(self) -> None:
        self.handle = self
        self.instance_id = "none-1"
        self.limits: list[float] = []

    async def call_tool(self, name: str, arguments: Any, timeout_s: float, _: str) -> ToolResult:
        self.limits.append(timeout_s)
        if name == "hangs":
            await asyncio.Event().wait()
        if name == "slow":
            raise DeadlineExceeded("no answer from the host")
        return ToolResult([{"type": "text", "text": "hello"}])


async def replayed(original: Episode) -> tuple[Instance, EpisodeLog]:
    instance, log = Instance(), EpisodeLog()
    task = replay([original], "todo@2").sampling._tasks.known
    assert task is not None
    assert await recorded(EpisodeEnv(instance, log), task[0]) == original.output  # type: ignore[arg-type]
    return instance, log


async def test_a_call_is_repeated_with_the_limit_that_it_had() -> None:
    """Otherwise the rest acts on another state, and another behaviour is scored."""
    old = [
        step(duration_s=0.5),
        step(duration_s=180.0),
        step(duration_s=5.0, error=ToolTimeout.code, is_error=True),
    ]
    instance, _ = await replayed(episode(0, steps=(step(duration_s=180.0, timeout_s=600.0), *old)))
    assert instance.limits == [600.0, 60.0, 540.0, 5.0]


async def test_a_call_that_was_cancelled_is_cancelled_again() -> None:
    cut = step(tool="hangs", duration_s=0.01, error=CallCancelled.code, timeout_s=60.0)
    instance, log = await replayed(episode(0, steps=(cut, step())))
    assert instance.limits == [60.0, 60.0]
    assert [one.error for one in log.steps] == [CallCancelled.code, None]


async def test_a_failure_of_the_infrastructure_ends_a_replay() -> None:
    """Invariant 2: also one that is a TimeoutError."""
    with pytest.raises(DeadlineExceeded):
        await replayed(episode(0, steps=(step(tool="slow"),)))


def test_episodes_that_calls_cannot_reproduce_are_left_out_and_counted() -> None:
    acted, late = episode(1, unrecorded_calls=1), episode(2, status=EpisodeStatus.TIMED_OUT)
    found = replay([episode(0), acted, late], "todo@2")
    assert [one.index for one in found.originals] == [0]
    assert found.left_out == (acted, late)
    why = "1 with commands or written files that are not steps, 1 timed_out"
    with pytest.raises(ConfigError, match=f"there are no episodes to replay: {why}"):
        replay([acted, late], "todo@2")


@pytest.mark.parametrize(
    ("before", "status", "after", "options", "expected"),
    [
        (DIED, DIED, 0.0, {}, -1.0),
        (DIED, DIED, 0.0, {"reward_on_death": 0.0}, 0.0),
        (DIED, DIED, 0.0, {"reward_on_failure": 0.0}, -1.0),
        (DIED, COMPLETED, 1.0, {}, 1.0),
        (FAILED, FAILED, 0.0, {}, -1.0),
        (FAILED, FAILED, 0.0, {"reward_on_failure": 0.0}, 0.0),
        (COMPLETED, DIED, 0.0, {}, 0.0),
        (COMPLETED, COMPLETED, 0.0, {}, 0.0),
    ],
)
def test_a_reward_that_no_reward_function_gave_is_kept(
    before: EpisodeStatus,
    status: EpisodeStatus,
    after: float,
    options: dict[str, Any],
    expected: float,
) -> None:
    found = replay([episode(7, -1.0, status=before)], "todo@2", **options)
    one = episode(0, after, status=status)
    found.sampling._held.append(one)
    assert found.rescored(one).reward == expected
    assert [(new.index, new.reward) for new in found.episodes()] == [(7, expected)]
