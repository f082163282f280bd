"""How many episodes a run plays at once: it follows the room, the nodes and the policy."""

from __future__ import annotations

import heapq
import random
from typing import Any

import pytest

from aenv_ray.errors import ConfigError
from aenv_ray.sampling import Episode, EpisodeStatus
from aenv_ray.sampling.runners.concurrency import (
    HOLD,
    WINDOW_S,
    ConcurrencyBounds,
    ConcurrencyLimit,
    concurrency_bounds,
)

_FINE = Episode(index=0, task_id="t", status=EpisodeStatus.COMPLETED, reward=1.0)
_NO_HOST = Episode(index=0, task_id="t", status=EpisodeStatus.INFRA_FAILED, reward=None)
_NOT_PLAYED = Episode(index=0, task_id="t", status=EpisodeStatus.REFUSED, reward=None)
_NO_MODEL = Episode(
    index=0,
    task_id="t",
    status=EpisodeStatus.POLICY_FAILED,
    reward=None,
    error="endpoint_unavailable: the model endpoint failed 8 times: HTTP 429",
)


class _FakeRun:
    """A run whose episodes take a while, of which a scarce thing ends only so many per second.

    Each turn lasts as long as the limit measures. Groups are played as a whole.
    """

    def __init__(
        self, limit: ConcurrencyLimit, *, most_per_s: float = 1e9, played_by: int = 1
    ) -> None:
        self.limit = limit
        self.most_per_s = most_per_s
        self.played_by = played_by
        self.episode_s = 1.0
        self.now = 0.0
        self.limits: list[int] = []

    def rate(self) -> float:
        played = max(self.limit.limit // self.played_by, 1) * self.played_by
        return min(played / self.episode_s, self.most_per_s)

    def turns(self, count: int, **given: Any) -> None:
        for _ in range(count):
            rate = self.rate()
            seconds = max(WINDOW_S, self.limit.limit / rate)
            self.now += seconds
            self.end(round(rate * seconds), **given)
            self.limits.append(self.limit.limit)

    def end(
        self, count: int, *, is_full: bool = True, queued: int = 0, refused: Episode | None = None
    ) -> None:
        episodes = [_FINE] * count
        if refused is not None:
            episodes[: count // 10 + 1] = [refused] * (count // 10 + 1)
        self.limit.note(episodes, self.now, is_full=is_full, queued=queued)


def _run(least: int, most: int, *, step: int = 1, **given: Any) -> _FakeRun:
    return _FakeRun(ConcurrencyLimit(ConcurrencyBounds(least, most), step), **given)


def test_concurrency_rises_to_its_maximum_while_resources_suffice() -> None:
    """By doubling; later it looks whether less would do, and returns."""
    run = _run(4, 100)
    run.turns(6)
    assert run.limits == [4, 8, 16, 32, 64, 100]
    run.turns(100)
    assert set(run.limits[6:]) == {100, 66}
    assert run.limits[6:].count(66) < 15


def test_concurrency_stays_where_more_episodes_only_take_longer() -> None:
    """Whatever is scarce: the processors of nodes, the policy, its endpoint."""
    run = _run(4, 1000, most_per_s=30.0)
    run.turns(100)
    assert max(run.limits) == 64
    settled = run.limits[20:]
    assert min(settled) >= 20
    assert max(settled) <= 48


def test_concurrency_follows_changes_of_capacity() -> None:
    run = _run(4, 1000, most_per_s=100.0)
    run.turns(40)
    assert 66 <= run.limit.limit <= 150
    run.most_per_s = 10.0
    run.turns(100)
    assert 6 <= run.limit.limit <= 16
    run.most_per_s = 300.0
    run.turns(100)
    assert 200 <= run.limit.limit <= 450


@pytest.mark.parametrize("refused", [_NO_HOST, _NO_MODEL])
def test_concurrency_falls_while_episodes_are_refused(refused: Episode) -> None:
    """Down to the least, and it does not climb again at once."""
    run = _run(4, 64)
    run.turns(20)
    assert run.limit.limit == 64
    run.turns(20, refused=refused)
    assert run.limit.limit == 4
    run.turns(HOLD)
    assert run.limit.limit == 4
    run.turns(10)
    assert run.limit.limit > 4


def test_refused_tasks_do_not_count_as_throughput() -> None:
    """They end at once, and say nothing about the limit."""
    run = _run(8, 64)
    run.limit.note([_NOT_PLAYED] * 8, 0.0, is_full=True, queued=0)
    run.limit.note([_NOT_PLAYED] * 42, WINDOW_S, is_full=True, queued=0)
    assert run.limit.limit == 8
    run.episode_s = 100.0
    run.turns(4)
    assert run.limits == [8, 16, 32, 64]


def test_single_failures_do_not_lower_concurrency() -> None:
    run = _run(4, 256)
    run.turns(5)
    assert run.limit.limit == 64
    run.now += WINDOW_S
    run.limit.note([_NO_HOST] * 6 + [_FINE] * 122, run.now, is_full=True, queued=0)
    assert run.limit.limit == 128


def test_concurrency_does_not_rise_while_episodes_wait_for_room() -> None:
    """Nor does it fall at once: an autoscaler adds nodes for those that wait."""
    run = _run(4, 64)
    run.turns(3)
    assert run.limit.limit == 16
    run.turns(10, queued=8)
    assert run.limits[3:] == [16] * 10
    run.turns(1, queued=9)
    assert run.limit.limit == 10
    run.turns(20)
    assert run.limit.limit > 16


def test_concurrency_stays_while_fewer_episodes_are_played_than_allowed() -> None:
    """Tasks come slowly, or are at their end: the rate says nothing about the limit."""
    run = _run(4, 64)
    run.turns(10, is_full=False)
    assert run.limit.limit == 4


def test_concurrency_changes_by_at_least_a_whole_group() -> None:
    run = _run(8, 64, step=8)
    run.turns(100)
    changes = {abs(a - b) for a, b in zip(run.limits, run.limits[1:], strict=False) if a != b}
    assert min(changes) >= 8


@pytest.mark.parametrize(
    ("bounds", "size", "first"), [((8, 256), 16, 16), ((4, 100), 8, 8), ((8, 12), 16, 12)]
)
def test_concurrency_starts_at_one_group_if_the_minimum_is_smaller(
    bounds: tuple[int, int], size: int, first: int
) -> None:
    """Below, one group is played too: a trial of less than two would never pay."""
    run = _run(*bounds, step=size, played_by=size)
    assert run.limit.limit == first
    run.turns(20)
    assert max(run.limits) == bounds[1]
    run.turns(50, refused=_NO_HOST)
    assert run.limit.limit == first
    run.turns(50)
    assert max(run.limits[-50:]) == bounds[1]


def test_a_fixed_concurrency_never_changes() -> None:
    run = _run(16, 16, most_per_s=1.0)
    run.turns(50, refused=_NO_HOST, queued=16)
    assert set(run.limits) == {16}


@pytest.mark.parametrize("seed", range(5))
def test_episodes_of_various_lengths_do_not_mislead_the_limit(seed: int) -> None:
    """Their rate varies by chance: of 40 places that a policy has, most are used most of the time.

    This plays the episodes one by one, each as long as chance has it.
    """
    chance, places = random.Random(seed), 40
    limit = ConcurrencyLimit(ConcurrencyBounds(4, 1000))
    now, ends, used_s, allowed_s = 0.0, list[float](), 0.0, 0.0
    for _ in range(20_000):
        while len(ends) < min(limit.limit, places):
            heapq.heappush(ends, now + chance.expovariate(1.0))
        end = heapq.heappop(ends)
        used_s += (end - now) * (len(ends) + 1)
        allowed_s += (end - now) * limit.limit
        now = end
        limit.note([_FINE], now, is_full=True, queued=0)
    assert used_s / now > 0.85 * places
    assert allowed_s / now < 2 * places


@pytest.mark.parametrize(
    ("given", "least", "most"),
    [(16, 16, 16), ((8, 256), 8, 256), ([2, 2], 2, 2), ("16", 16, 16), (" 8-256 ", 8, 256)],
)
def test_bounds_are_one_number_or_two(given: Any, least: int, most: int) -> None:
    assert concurrency_bounds(given) == ConcurrencyBounds(least, most)


@pytest.mark.parametrize(
    "given", [0, -1, (0, 4), (4, 2), (1, 2, 3), (), "x", "8-", "-8", "1.5", "8 - 9", 1.5, None]
)
def test_invalid_bounds_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="concurrency must be") as caught:
        concurrency_bounds(given)
    assert "8-256" in caught.value.hint
