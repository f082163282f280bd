"""Recorded calls run again on new instances, and Ray Data reads the records."""

from __future__ import annotations

from pathlib import Path

import pytest

import aenv_ray
from aenv_ray import trajectories
from aenv_ray.errors import ConfigError
from aenv_ray.project.project import resolve
from aenv_ray.sampling import Episode, EpisodeStatus, Task
from aenv_ray.sampling.replay import replay
from tests.ray.sampling.policies import MINI, mini_tasks

__all__ = ["mini_tasks"]  # a fixture


def test_a_replay_repeats_the_calls_and_reports_the_step_that_differs(
    mini_tasks: list[Task], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    aenv_ray.sample(MINI, "reference", mini_tasks[:2], concurrency=2, out=out).run()
    first, second = trajectories.read(out)
    forged = first.steps[-1].model_copy(update={"text": "forged"})
    changed = first.model_copy(
        update={"index": 7, "reward": 0.0, "steps": (*first.steps[:-1], forged)}
    )
    void = second.model_copy(update={"index": 8, "status": EpisodeStatus.POLICY_FAILED})

    again = replay([changed, second, void], resolve(MINI).path, concurrency=2)
    again.sampling.run()

    found = again.comparison()
    assert (found.compared, found.equal, found.only_before) == (2, 1, 0)
    (difference,) = found.differences
    assert (difference.before_index, difference.before_reward, difference.after_reward) == (7, 0, 1)
    assert (difference.step, difference.field) == (len(first.steps) - 1, "text")
    assert {one.index: one.output for one in again.episodes()} == {7: "reference", 1: "reference"}


def test_an_episode_without_its_task_is_not_replayed() -> None:
    old = Episode(index=0, task_id="a", status=EpisodeStatus.COMPLETED, reward=1.0)
    with pytest.raises(ConfigError, match="episode 0 does not hold its task"):
        replay([old], MINI)
    with pytest.raises(ConfigError, match="there are no episodes to replay"):
        replay([])


# Ray Data's context warns about its own deprecated settings when it is copied (2.60).
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_ray_data_reads_the_records(mini_tasks: list[Task], tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    aenv_ray.sample(MINI, "null", mini_tasks[:2], concurrency=2, out=out).run()
    dataset = trajectories.read(out).to_ray()
    assert dataset.count() == 2
    assert set(dataset.schema().names) == set(Episode.model_fields)
