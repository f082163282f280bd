"""Statistics of a run while it continues: counts, rates, latencies and rewards so far."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from aenv_ray.trajectories.schema import Episode, EpisodeStatus
from aenv_ray.trajectories.statistics import Causes, quantile_ms

RATE_WINDOW_S: Final = 30
"""Rates cover this many seconds before now."""
_LATENCIES: Final = 2_000
"""Latencies cover this many latest calls and creates."""
_BARS: Final = 10


@dataclass(frozen=True)
class RewardBar:
    """One bar of the histogram of rewards: `count` rewards from `low` to `high`, both included."""

    low: float
    high: float
    count: int


@dataclass(frozen=True)
class ProgressView:
    """Where a run stands; a figure is None while there is nothing to compute it from."""

    total: int | None
    """Number of episodes of the run; None if its tasks have no known length."""
    finished: int
    """Finished episodes, those of an earlier run included."""
    by_status: dict[EpisodeStatus, int]
    playing: int
    """Episodes that are being played."""
    waiting: int
    """Episodes that wait for room in the cluster."""
    elapsed_s: float
    episodes_per_s: float
    """Over the last `RATE_WINDOW_S` seconds."""
    calls_per_s: float
    """Over the last `RATE_WINDOW_S` seconds; calls count when their episode has finished."""
    create_p50_ms: float | None
    call_p50_ms: float | None
    call_p99_ms: float | None
    prompt_tokens: int
    """Tokens that the models of policies read, as far as policies recorded them."""
    completion_tokens: int
    """Tokens that they wrote."""
    reward_mean: float | None
    rewards: tuple[RewardBar, ...]
    causes: tuple[tuple[str, int], ...]
    """Error codes and their numbers of episodes, the most frequent first."""
    eta_s: float | None
    """Seconds until the last episode at the present rate."""


@dataclass
class _Second:
    start: int
    episodes: int = 0
    calls: int = 0


class Progress:
    """Counts a run's episodes as they finish; its size does not grow with their number.

    One thread may add while others view.

    Args:
        total: Number of episodes of the run; None if unknown.
        kept: Episodes that an earlier run finished.
        playing: Returns how many episodes are being played.
        now: A monotonic clock, in seconds.
        waiting: Returns how many episodes wait for room in the cluster.
    """

    def __init__(
        self,
        total: int | None,
        kept: Sequence[Episode] = (),
        playing: Callable[[], int] = lambda: 0,
        now: Callable[[], float] = time.perf_counter,
        waiting: Callable[[], int] = lambda: 0,
    ) -> None:
        self._now = now
        self._total = total
        self._playing = playing
        self._waiting = waiting
        self._started = now()
        self._lock = threading.Lock()
        self._statuses: Counter[EpisodeStatus] = Counter()
        self._causes = Causes()
        self._rewards: Counter[float] = Counter()
        self._reward_sum = 0.0
        self._prompt_tokens = self._completion_tokens = 0
        self._seconds: deque[_Second] = deque()
        self._creates: deque[float] = deque(maxlen=_LATENCIES)
        self._calls: deque[float] = deque(maxlen=_LATENCIES)
        for episode in kept:
            self._count(episode)

    def add(self, episode: Episode) -> None:
        """Count a finished episode."""
        with self._lock:
            self._count(episode)
            second = self._this_second()
            second.episodes += 1
            second.calls += len(episode.steps)
            self._calls.extend(step.duration_s for step in episode.steps)
            if episode.create_s is not None:
                self._creates.append(episode.create_s)

    def _count(self, episode: Episode) -> None:
        self._statuses[episode.status] += 1
        self._causes.add(episode)
        if episode.usage is not None:
            self._prompt_tokens += episode.usage.prompt_tokens
            self._completion_tokens += episode.usage.completion_tokens
        if episode.reward is not None:
            self._reward_sum += episode.reward
            self._rewards[_rounded(episode.reward)] += 1

    def _this_second(self) -> _Second:
        start = int(self._now())
        if not self._seconds or self._seconds[-1].start != start:
            self._seconds.append(_Second(start))
        self._drop_old(start)
        return self._seconds[-1]

    def _drop_old(self, now: int) -> None:
        while self._seconds and self._seconds[0].start <= now - RATE_WINDOW_S:
            self._seconds.popleft()

    def view(self) -> ProgressView:
        """Return where the run stands now."""
        with self._lock:
            now = self._now()
            self._drop_old(int(now))
            elapsed_s = now - self._started
            window_s = max(min(elapsed_s, RATE_WINDOW_S), 1e-9)
            episodes_per_s = sum(second.episodes for second in self._seconds) / window_s
            finished, rewarded = self._statuses.total(), self._rewards.total()
            eta_s = None
            if self._total is not None and episodes_per_s > 0:
                eta_s = max(self._total - finished, 0) / episodes_per_s
            return ProgressView(
                total=self._total,
                finished=finished,
                by_status=dict(self._statuses),
                playing=self._playing(),
                waiting=self._waiting(),
                elapsed_s=elapsed_s,
                episodes_per_s=episodes_per_s,
                calls_per_s=sum(second.calls for second in self._seconds) / window_s,
                create_p50_ms=quantile_ms(self._creates, 0.5),
                call_p50_ms=quantile_ms(self._calls, 0.5),
                call_p99_ms=quantile_ms(self._calls, 0.99),
                prompt_tokens=self._prompt_tokens,
                completion_tokens=self._completion_tokens,
                reward_mean=self._reward_sum / rewarded if rewarded else None,
                rewards=histogram(self._rewards),
                causes=tuple(self._causes.most_common()),
                eta_s=eta_s,
            )


def _rounded(reward: float) -> float:
    """Round to two significant digits, which bounds the number of different rewards."""
    rounded = float(f"{reward:.1e}")
    return rounded if math.isfinite(rounded) else reward


def histogram(rewards: Counter[float], bars: int = _BARS) -> tuple[RewardBar, ...]:
    """Return the bars of a histogram: one for each reward, or `bars` of equal width if more."""
    if len(rewards) <= bars:
        return tuple(RewardBar(reward, reward, rewards[reward]) for reward in sorted(rewards))
    low, high = min(rewards), max(rewards)
    shares = [number / bars for number in range(bars + 1)]
    # A weighted mean cannot overflow, unlike multiples of the width. It is rounded for the least
    # numbers, hence the bounds and the order.
    edges = sorted(min(max(low * (1 - share) + high * share, low), high) for share in shares)
    counts = [0] * bars
    for reward, count in rewards.items():
        counts[max(min(bisect_right(edges, reward), bars), 1) - 1] += count
    spans = zip(pairwise(edges), counts, strict=True)
    return tuple(RewardBar(start, end, count) for (start, end), count in spans)
