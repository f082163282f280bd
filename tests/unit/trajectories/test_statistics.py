"""What a set of episodes amounts to: void ones are counted and enter no mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aenv_ray
from aenv_ray.sampling import Episode, EpisodeStatus, Step, summarize
from aenv_ray.trajectories.shards import open_output
from aenv_ray.trajectories.statistics import (
    Quantiles,
    RunningSummary,
    confidence_interval,
    pass_at_k,
)

COUNTED = {EpisodeStatus.COMPLETED, EpisodeStatus.DIED_INSIDE}
VOID = [status for status in EpisodeStatus if status not in COUNTED]


def episode(reward: float | None, status: str = "completed", **fields: Any) -> Episode:
    return Episode(index=0, task_id="t", status=EpisodeStatus(status), reward=reward, **fields)


def step(duration_s: float) -> Step:
    return Step(tool="t", arguments={}, text="", is_error=False, duration_s=duration_s)


@pytest.mark.parametrize("void", VOID)
def test_a_void_episode_enters_no_mean(void: EpisodeStatus) -> None:
    """Invariant 2: an infrastructure failure never becomes a reward."""
    alone = summarize([episode(1.0), episode(0.5)], 1.0)
    with_void = summarize([episode(1.0), episode(None, void), episode(0.5)], 1.0)
    assert with_void.reward_mean == alone.reward_mean == 0.75
    assert with_void.succeeded == alone.succeeded == 1
    assert (alone.rollouts, with_void.rollouts) == (2, 3)
    assert getattr(with_void, void.value) == 1


def test_a_death_from_inside_counts_and_is_no_success() -> None:
    """Invariant 14: an agent gains nothing by ending its sandbox."""
    summary = summarize([episode(1.0), episode(1.0, "died_inside"), episode(0.0, "died_inside")], 1)
    assert summary.reward_mean == pytest.approx(2 / 3)
    assert (summary.died_inside, summary.succeeded, summary.infra_failed) == (2, 1, 0)


@given(
    rewards=st.lists(st.floats(-10, 10), min_size=1, max_size=10),
    void=st.lists(st.sampled_from(VOID), max_size=10),
)
def test_the_mean_is_that_of_the_completed_ones_whatever_failed(
    rewards: list[float], void: list[EpisodeStatus]
) -> None:
    """Invariant 2."""
    episodes = [episode(reward) for reward in rewards] + [episode(None, v) for v in void]
    summary = summarize(episodes, 1.0)
    assert summary.reward_mean == pytest.approx(sum(rewards) / len(rewards))
    assert summary.succeeded == sum(reward >= 1.0 for reward in rewards)
    failed = sum(getattr(summary, status.value) for status in VOID)
    assert summary.rollouts == len(rewards) + failed
    assert failed == len(void)


@pytest.mark.parametrize("episodes", [[], [episode(None, "infra_failed")], [episode(None)]])
def test_without_a_reward_there_is_no_mean(episodes: list[Episode]) -> None:
    """Invariant 2: nothing measured is None, not 0."""
    summary = summarize(episodes, 1.0)
    assert summary.reward_mean is None
    assert summary.succeeded == 0


def test_without_a_measurement_there_is_no_time() -> None:
    summary = summarize([episode(None, "infra_failed")], 0.0)
    times = (summary.create_p50_ms, summary.create_p99_ms, summary.call_p50_ms, summary.call_p99_ms)
    assert times == (None,) * 4
    assert summary.calls_per_s == 0.0


def test_times_are_nearest_rank_quantiles_in_milliseconds() -> None:
    steps = tuple(step(n / 1000) for n in range(100, 0, -1))
    summary = summarize([episode(1.0, steps=steps, create_s=0.004)], 50.0)
    assert (summary.call_p50_ms, summary.call_p99_ms) == (51.0, 100.0)
    assert (summary.create_p50_ms, summary.create_p99_ms) == (4.0, 4.0)
    assert (summary.tool_calls, summary.calls_per_s) == (100, 2.0)


def test_episodes_may_come_from_a_generator() -> None:
    assert summarize((episode(1.0) for _ in range(3)), 1.0).rollouts == 3


def sampled(rewards: dict[str, list[float | None]]) -> list[Episode]:
    return [
        Episode(
            index=0,
            task_id=task,
            status=EpisodeStatus.COMPLETED,
            reward=reward,
            group=task,
            sample=n,
        )
        for task, samples in rewards.items()
        for n, reward in enumerate(samples)
    ]


def test_pass_at_k_is_the_unbiased_estimate_over_tasks() -> None:
    found = pass_at_k(sampled({"a": [1.0, 0.0, 0.0, 0.0], "b": [0.0] * 4, "c": [1.0] * 4}))
    assert [(one.k, one.tasks) for one in found] == [(1, 3), (2, 3), (4, 3)]
    expected = [(0.25 + 0 + 1) / 3, (0.5 + 0 + 1) / 3, 2 / 3]
    assert [one.estimate for one in found] == pytest.approx(expected)


def test_pass_at_k_leaves_void_samples_out() -> None:
    found = pass_at_k(sampled({"a": [1.0, None, 0.0], "b": [0.0, 0.0, 1.0]}))
    assert [(one.k, one.tasks) for one in found] == [(1, 2), (2, 2), (3, 1)]
    assert [one.estimate for one in found] == pytest.approx([(1 / 2 + 1 / 3) / 2, 5 / 6, 1.0])


def test_groups_of_joined_runs_are_told_apart_by_their_task() -> None:
    """Each run numbers the groups of its tasks, in its own order."""
    apart = sampled({"a": [1.0, 1.0], "b": [0.0, 0.0]})
    joined = [one.model_copy(update={"group": "0"}) for one in apart]
    assert pass_at_k(joined) == summarize(joined, 1.0).pass_at_k == pass_at_k(apart)


def test_one_sample_of_each_task_has_no_pass_at_k() -> None:
    assert pass_at_k(sampled({"a": [1.0], "b": [0.0]})) == ()
    assert summarize(sampled({"a": [1.0], "b": [0.0]}), 1.0).pass_at_k == ()


def test_interval_of_single_samples_is_wilsons() -> None:
    # R: prop.test(7, 10, correct = FALSE); the variance has the correction n / (n - 1).
    rewards: dict[str, list[float | None]] = {str(n): [float(n < 7)] for n in range(10)}
    low, high = confidence_interval(sampled(rewards)) or (0.0, 0.0)
    assert low == pytest.approx(0.3968, abs=0.02)
    assert high == pytest.approx(0.8922, abs=0.02)


def test_interval_counts_tasks_where_samples_of_a_task_agree() -> None:
    few = {str(n): [float(n % 2)] for n in range(20)}
    many = {task: rewards * 50 for task, rewards in few.items()}
    one = confidence_interval(sampled(dict(few)))
    other = confidence_interval(sampled(dict(many)))
    assert one == pytest.approx(other)
    assert one is not None
    assert one[1] - one[0] > 0.3


def test_interval_of_equal_rewards_has_a_width() -> None:
    low, high = confidence_interval(sampled({str(n): [1.0] for n in range(10)})) or (0.0, 0.0)
    assert (low, high) == pytest.approx((0.722, 1.0), abs=0.001)


def test_interval_of_other_rewards_is_of_standard_errors() -> None:
    found = confidence_interval(sampled({"a": [-5.0], "b": [15.0], "c": [None]}))
    assert found == pytest.approx((5 - 19.6, 5 + 19.6), abs=0.01)
    assert confidence_interval(sampled({"a": [1.0, 0.0]})) is None


def test_quantiles_of_many_values_are_within_a_percent_in_bounded_memory() -> None:
    quantiles = Quantiles()
    for n in range(40_000):
        quantiles.add((n * 7919 % 40_000 + 1) / 1000)
    for share in (0.01, 0.5, 0.99):
        assert quantiles.ms(share) == pytest.approx(share * 40_000, rel=0.011)
    assert quantiles.count == 40_000
    assert len(quantiles._exact) + len(quantiles._buckets) < 1_500


def test_a_summary_that_knows_the_samples_holds_no_finished_task() -> None:
    episodes = sampled({f"t{n}": [float(n % 3 == 0), 0.25 * (n % 2), None] for n in range(30)})
    running = RunningSummary(samples=3)
    for one in episodes:
        running.add(one)
    assert running._open == {}
    assert running.summary(1.0) == summarize(episodes, 1.0)
    assert running.summary(1.0).pass_at_k == pass_at_k(episodes)


def test_a_summary_names_the_worst_tasks_the_causes_and_the_slowest_phases() -> None:
    failed = episode(None, "infra_failed", error="sandbox_lost: gone")
    slow = episode(1.0, phases={"policy": 0.5, "setup": 2.0})
    tasks: dict[str, list[float | None]] = {f"t{n}": [n / 10] for n in range(11)}
    summary = summarize([failed, failed, slow, *sampled(tasks)], 1.0)
    assert summary.causes == {"sandbox_lost": 2}
    assert list(summary.phases_mean_ms.items()) == [("setup", 2000.0), ("policy", 500.0)]
    assert [one.task_id for one in summary.worst_tasks] == ["t0", "t1", "t2", "t3", "t4"]


def test_a_task_that_is_repeated_is_one_of_the_worst_once_and_only_without_success() -> None:
    rewards = {"a": [0.0, 1.0, 0.0], "b": [0.0, 0.2]}
    for groups in (False, True):  # episodes alone, or several groups of one task
        episodes = [
            episode(reward, group=str(n) if groups else None).model_copy(update={"task_id": task})
            for task, earned in rewards.items()
            for n, reward in enumerate(earned, len(task) + 10 * len(earned))
        ]
        (worst,) = summarize(episodes, 1.0).worst_tasks
        assert (worst.task_id, worst.reward_mean, worst.samples) == ("b", 0.1, 2)


@pytest.mark.parametrize(
    ("tasks", "worst"), [(["a", "b"], ["a", "b"]), (["a", "b", "a", "b"], ["a", "b"])]
)
def test_a_sampling_counts_repeated_tasks_as_one(
    tasks: list[str], worst: list[str], tmp_path: Path
) -> None:
    """As `aenv sample --rollouts` repeats them."""
    out = tmp_path / "run.jsonl"
    output = open_output(out)
    for index, task in enumerate(tasks):
        output.write(Episode(index=index, task_id=task, status="completed", reward=0.0))
    output.close()
    given = [{"id": task} for task in tasks]
    summary = aenv_ray.sample("mini-terminal", "null", given, out=out, resume=True).summary()
    assert sorted(one.task_id for one in summary.worst_tasks) == worst
