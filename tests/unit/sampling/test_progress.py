"""Where a run stands: what the live view and the lines elsewhere show."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aenv_ray.sampling import Episode, EpisodeStatus, Step, Usage
from aenv_ray.sampling.progress import RATE_WINDOW_S, Progress, histogram


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def episode(reward: float | None = 1.0, status: str = "completed", **fields: Any) -> Episode:
    return Episode(index=0, task_id="t", status=EpisodeStatus(status), reward=reward, **fields)


def step(duration_s: float) -> Step:
    return Step(tool="t", arguments={}, text="", is_error=False, duration_s=duration_s)


def test_figures_are_none_before_the_first_episode() -> None:
    view = Progress(10, now=Clock()).view()
    assert (view.finished, view.episodes_per_s, view.rewards, view.causes) == (0, 0.0, (), ())
    assert view.reward_mean is view.eta_s is view.create_p50_ms is view.call_p50_ms is None


def test_rates_cover_the_last_seconds_only() -> None:
    clock = Clock()
    progress = Progress(1000, now=clock)
    for _ in range(60):
        clock.now_s += 1
        progress.add(episode(steps=(step(0.1), step(0.1))))
    assert progress.view().episodes_per_s == pytest.approx(1.0, rel=0.05)
    assert progress.view().calls_per_s == pytest.approx(2.0, rel=0.05)
    assert progress.view().eta_s == pytest.approx(940, rel=0.05)
    clock.now_s += RATE_WINDOW_S + 1
    stalled = progress.view()
    assert (stalled.episodes_per_s, stalled.eta_s) == (0.0, None)
    assert stalled.finished == 60


def test_void_episodes_are_counted_by_cause_and_left_out_of_means() -> None:
    """Invariant 2: an infrastructure failure never becomes a reward."""
    progress = Progress(None, now=Clock())
    for one in (
        episode(0.5),
        episode(None, "infra_failed", error="node_lost: it is gone"),
        episode(None, "infra_failed", error="node_lost: so is another"),
        episode(0.0, "died_inside", error="sandbox_died_inside: killed"),
    ):
        progress.add(one)
    view = progress.view()
    assert view.reward_mean == 0.25
    assert view.causes == (("node_lost", 2), ("sandbox_died_inside", 1))
    assert view.by_status[EpisodeStatus.INFRA_FAILED] == 2


def test_episodes_of_an_earlier_run_count_but_do_not_speed_up_this_one() -> None:
    view = Progress(3, [episode(), episode()], now=Clock()).view()
    assert (view.finished, view.reward_mean, view.episodes_per_s) == (2, 1.0, 0.0)


HUGE = [*map(float, range(9)), 1.7974368165136843e308, -1.95e307]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=200))
@example(HUGE)
@example([n * 5e-324 for n in range(11)])
def test_every_reward_is_in_one_bar(rewards: list[float]) -> None:
    progress = Progress(None, now=Clock())
    for reward in rewards:
        progress.add(episode(reward))
    bars = progress.view().rewards
    assert sum(bar.count for bar in bars) == len(rewards)
    assert len(bars) <= 10
    assert all(bar.low <= bar.high for bar in bars)


def test_tokens_of_an_earlier_run_are_included() -> None:
    used = Usage(requests=1, prompt_tokens=100, completion_tokens=10)
    progress = Progress(4, [episode(usage=used)], lambda: 3, Clock())
    progress.add(episode(None, "policy_failed", usage=used))
    progress.add(episode())
    view = progress.view()
    assert (view.prompt_tokens, view.completion_tokens, view.playing) == (200, 20, 3)


def test_causes_are_bounded() -> None:
    """A policy may raise exceptions of ever new types."""
    progress = Progress(None, now=Clock())
    for number in range(300):
        progress.add(episode(None, "policy_failed", error=f"Error{number}: x"))
    assert len(progress.view().causes) == 100


def test_few_different_rewards_have_a_bar_each() -> None:
    assert [(bar.low, bar.high, bar.count) for bar in histogram(Counter({1.0: 3, 0.0: 2}))] == [
        (0.0, 0.0, 2),
        (1.0, 1.0, 3),
    ]
