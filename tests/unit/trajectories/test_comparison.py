"""Two runs are compared by outcome, reward and steps, and the first difference is named."""

from __future__ import annotations

from typing import Any

import pytest

from aenv_ray.trajectories.comparison import compare, compare_episodes
from aenv_ray.trajectories.schema import EpisodeStatus
from tests.unit.trajectories.episodes import episode, step


def test_times_and_ids_are_not_compared() -> None:
    one = episode(0, steps=(step(call_id="a", duration_s=1),), instance_id="a-1", duration_s=9)
    other = episode(0, steps=(step(call_id="b", duration_s=2),), instance_id="b-1")
    assert compare_episodes(one, other) is None


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((step("other"), step()), (0, "text", "hello", "other")),
        ((step(), step(arguments={"n": 1})), (1, "arguments", "{'text': 'hello'}", "{'n': 1}")),
        ((step(), step(error="ToolTimeout")), (1, "error", "None", "ToolTimeout")),
        ((step(),), (1, "missing", "echo", None)),
        ((step(), step(), step(tool="new")), (2, "extra", None, "new")),
    ],
)
def test_the_first_step_that_differs_is_named(steps: Any, expected: Any) -> None:
    found = compare_episodes(episode(0, steps=(step(), step())), episode(0, steps=steps))
    assert found is not None
    assert (found.step, found.field, found.before, found.after) == expected


def test_a_changed_outcome_is_a_difference() -> None:
    died = episode(0, 0.0, status=EpisodeStatus.DIED_INSIDE)
    found = compare_episodes(episode(0), died)
    assert found is not None
    assert (found.before_reward, found.after_reward, found.step) == (1.0, 0.0, None)


def test_episodes_are_matched_by_task_in_any_order() -> None:
    before = [episode(0, task_id="a"), episode(1, task_id="b"), episode(2, task_id="a")]
    after = [episode(0, task_id="b"), episode(1, task_id="a"), episode(2, task_id="c")]
    found = compare(before, after)
    assert (found.compared, found.equal, found.only_before, found.only_after) == (2, 2, 1, 1)


def test_by_index_a_missing_episode_does_not_shift_the_others() -> None:
    before = [episode(0, 0.0, task_id="a"), episode(1, 1.0, task_id="a")]
    found = compare(before, before[1:], by_index=True)
    assert (found.compared, found.equal, found.only_before) == (1, 1, 1)
