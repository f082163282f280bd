"""Figures of episodes, tasks and tools. Void episodes are counted, and excluded from means."""

from __future__ import annotations

import heapq
import math
import statistics
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Final

from pydantic import BaseModel, ConfigDict

from aenv_ray.trajectories.schema import Episode, EpisodeStatus, Step

SUCCESS_REWARD = 1.0
"""A completed episode with at least this reward counts as a success."""
_COUNTED: Final = (EpisodeStatus.COMPLETED, EpisodeStatus.DIED_INSIDE)
"""How an episode ends that counts, also if its task has no reward."""


def is_success(episode: Episode) -> bool:
    """Return whether the episode completed with at least `SUCCESS_REWARD`."""
    is_completed = episode.status is EpisodeStatus.COMPLETED
    return is_completed and (episode.reward or 0.0) >= SUCCESS_REWARD


def is_refused(episode: Episode) -> bool:
    """Return whether the task could not be played here."""
    return episode.status is EpisodeStatus.REFUSED


def is_void(episode: Episode) -> bool:
    """Return whether nothing can be learned from an episode that was played.

    An episode whose task has no reward is not void if it ended as one that counts.
    """
    is_unscored = episode.task is not None and episode.task.reward is None
    if is_refused(episode) or (is_unscored and episode.status in _COUNTED):
        return False
    return episode.reward is None


class PassAtK(BaseModel):
    """The probability that at least one of `k` samples of a task succeeds."""

    model_config = ConfigDict(frozen=True)

    k: int
    estimate: float
    """Mean over the tasks of the unbiased estimate 1 - C(n - c, k) / C(n, k), for c successes in n
    samples (https://arxiv.org/abs/2107.03374). Void samples are left out of n."""
    tasks: int
    """Tasks with at least `k` samples that are not void; the others are left out."""


def pass_at_k(episodes: Iterable[Episode]) -> tuple[PassAtK, ...]:
    """Return the estimates for k = 1, 2, 4, … and the most samples that a task has.

    Empty if the episodes are not samples of a group (``samples_per_task``).
    """
    groups: dict[tuple[str, str], list[bool]] = {}
    for episode in episodes:
        if episode.group is not None and episode.reward is not None:
            key = episode.group, episode.task_id  # joined runs number their groups alike
            groups.setdefault(key, []).append(is_success(episode))
    return _pass_at_k(Counter((len(samples), sum(samples)) for samples in groups.values()))


def _pass_at_k(counts: Counter[tuple[int, int]]) -> tuple[PassAtK, ...]:
    """Return the estimates for numbers of tasks by their samples and successes."""
    most = max((n for n, _ in counts), default=0)
    if most < 2:
        return ()
    powers = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    found = []
    for k in (*powers, most):
        enough = {(n, c): tasks for (n, c), tasks in counts.items() if n >= k}
        tasks = sum(enough.values())
        missed = math.fsum(
            times * math.comb(n - c, k) / math.comb(n, k) for (n, c), times in enough.items()
        )
        found.append(PassAtK(k=k, estimate=1.0 - missed / tasks, tasks=tasks))
    return tuple(found)


_Z: Final = statistics.NormalDist().inv_cdf(0.975)


def confidence_interval(episodes: Iterable[Episode]) -> tuple[float, float] | None:
    """Return a 95 % confidence interval of the mean reward over further tasks like these.

    The rewards of a task's episodes are correlated, so the variance is that of clusters: of tasks.
    Where all rewards are 0 or 1, it is Wilson's interval for as many independent episodes as have
    this variance, and as many as there are tasks if all rewards are equal. Otherwise it is the
    mean, plus and minus 1.96 standard errors. Void episodes are left out.

    Returns:
        None if fewer than two tasks have rewards.
    """
    tasks: dict[str, list[float]] = {}
    for episode in episodes:
        if episode.reward is not None:
            tasks.setdefault(episode.task_id, []).append(episode.reward)
    if len(tasks) < 2:
        return None
    rewards = [reward for one in tasks.values() for reward in one]
    count, mean = len(rewards), statistics.fmean(rewards)
    sums = [sum(reward - mean for reward in one) for one in tasks.values()]
    variance = len(tasks) / (len(tasks) - 1) * math.fsum(one * one for one in sums) / count**2
    if all(reward in {0.0, 1.0} for reward in rewards):
        independent = mean * (1.0 - mean) / variance if variance > 0.0 else float(len(tasks))
        return _wilson(mean, min(independent, float(count)))
    margin = _Z * math.sqrt(variance)
    return mean - margin, mean + margin


def _wilson(share: float, count: float) -> tuple[float, float]:
    centre = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    spread = math.sqrt(share * (1 - share) / count + (_Z / (2 * count)) ** 2)
    margin = _Z * spread / (1 + _Z**2 / count)
    return max(0.0, centre - margin), min(1.0, centre + margin)


class WorstTask(BaseModel):
    """A task with a low mean reward."""

    model_config = ConfigDict(frozen=True)

    task_id: str
    reward_mean: float
    samples: int
    """Episodes with a reward."""


class Summary(BaseModel):
    """The summary of a sampling; a time is None if it was never measured."""

    model_config = ConfigDict(frozen=True)

    rollouts: int
    succeeded: int
    died_inside: int
    infra_failed: int
    policy_failed: int
    timed_out: int
    reward_failed: int
    refused: int
    """Tasks that need something that is not available here; they are not played."""
    reward_mean: float | None
    """Mean over episodes with a reward: completed ones, and those that failed
    by what their agent did."""
    tool_calls: int
    calls_per_s: float
    create_p50_ms: float | None
    create_p99_ms: float | None
    call_p50_ms: float | None
    call_p99_ms: float | None
    wall_s: float
    pass_at_k: tuple[PassAtK, ...] = ()
    """pass@k of samplings with several samples of each task."""
    causes: dict[str, int] = {}
    """Numbers of episodes by the code of their error, the most frequent first."""
    phases_mean_ms: dict[str, float] = {}
    """Mean time in each phase of an episode over those that had it, the slowest first."""
    worst_tasks: tuple[WorstTask, ...] = ()
    """Up to `WORST_TASKS` tasks without success, the lowest mean reward first."""


def summarize(episodes: Iterable[Episode], wall_s: float, *, kept: int = 0) -> Summary:
    """Return the summary of episodes.

    Args:
        episodes: All episodes.
        wall_s: Duration of the run, without the first `kept` episodes.
        kept: Number of episodes of an earlier run.
    """
    running = RunningSummary()
    for number, episode in enumerate(episodes):
        running.add(episode, is_new=number >= kept)
    return running.summary(wall_s)


WORST_TASKS: Final = 5
_MOST_CAUSES: Final = 100


class Causes:
    """Numbers of episodes by the code of their error, for a bounded number of codes."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, episode: Episode) -> str | None:
        """Count an episode; return its code, None if it has none or there are too many codes."""
        cause = None if episode.error is None else episode.error.partition(":")[0]
        if cause is None or (cause not in self._counts and len(self._counts) >= _MOST_CAUSES):
            return None
        self._counts[cause] += 1
        return cause

    def most_common(self) -> list[tuple[str, int]]:
        """Return the codes and their numbers of episodes, the most frequent first."""
        return self._counts.most_common()


class RunningSummary:
    """A summary that is kept up to date; it holds no episodes.

    Args:
        samples: Episodes of each task, after which its figures are dropped. None: unknown, or
            several tasks have the same id, so its size grows with the number of tasks.
    """

    def __init__(self, samples: int | None = None) -> None:
        self._samples = samples
        self._statuses: Counter[EpisodeStatus] = Counter()
        self._succeeded = self._rewarded = self._new_calls = 0
        self._reward_sum = 0.0
        self._calls, self._creates = Quantiles(), Quantiles()
        self._causes = Causes()
        self._phases: dict[str, tuple[int, float]] = {}
        self._open: dict[tuple[str | None, str], _TaskFigures] = {}
        """Tasks some of whose samples may be missing."""
        self._closed: Counter[tuple[int, int]] = Counter()
        """Numbers of finished groups by their samples with a reward and their successes."""
        self._worst: list[tuple[float, str, int]] = []
        """A heap of negated means, so that the best of the worst tasks is the first."""

    @property
    def rollouts(self) -> int:
        """Number of episodes."""
        return self._statuses.total()

    def add(self, episode: Episode, *, is_new: bool = True) -> None:
        """Count an episode.

        Args:
            episode: A finished one.
            is_new: Whether it is of this run, and not of an earlier one that this run continues.
        """
        self._statuses[episode.status] += 1
        self._succeeded += is_success(episode)
        if is_new:
            self._new_calls += len(episode.steps)
        for step in episode.steps:
            self._calls.add(step.duration_s)
        if episode.create_s is not None:
            self._creates.add(episode.create_s)
        self._causes.add(episode)
        for phase, seconds in episode.phases.items():
            count, total = self._phases.get(phase, (0, 0.0))
            self._phases[phase] = count + 1, total + seconds
        if episode.reward is not None:
            self._rewarded += 1
            self._reward_sum += episode.reward
        self._note_task(episode)

    def _note_task(self, episode: Episode) -> None:
        key = episode.group, episode.task_id  # joined runs number their groups alike
        figures = self._open.get(key)
        if figures is None:
            figures = self._open[key] = _TaskFigures(episode.task_id, episode.group is not None)
        figures.add(episode)
        if figures.finished == self._samples:
            del self._open[key]
            self._closed.update(figures.for_pass_at_k())
            _keep_worst(self._worst, figures)

    def summary(self, wall_s: float) -> Summary:
        """Return the summary so far.

        Args:
            wall_s: Duration of the run.
        """
        groups, worst = self._closed.copy(), list(self._worst)
        tasks: dict[str, _TaskFigures] = {}  # a task may be played in several groups
        for figures in self._open.values():
            groups.update(figures.for_pass_at_k())
            tasks.setdefault(figures.task_id, _TaskFigures(figures.task_id, False)).join(figures)
        for figures in tasks.values():
            _keep_worst(worst, figures)
        count = self._statuses
        phases = {name: 1000 * total / times for name, (times, total) in self._phases.items()}
        return Summary(
            rollouts=self.rollouts,
            succeeded=self._succeeded,
            died_inside=count[EpisodeStatus.DIED_INSIDE],
            infra_failed=count[EpisodeStatus.INFRA_FAILED],
            policy_failed=count[EpisodeStatus.POLICY_FAILED],
            timed_out=count[EpisodeStatus.TIMED_OUT],
            reward_failed=count[EpisodeStatus.REWARD_FAILED],
            refused=count[EpisodeStatus.REFUSED],
            reward_mean=self._reward_sum / self._rewarded if self._rewarded else None,
            tool_calls=self._calls.count,
            calls_per_s=self._new_calls / wall_s if wall_s > 0 else 0.0,
            create_p50_ms=self._creates.ms(0.5),
            create_p99_ms=self._creates.ms(0.99),
            call_p50_ms=self._calls.ms(0.5),
            call_p99_ms=self._calls.ms(0.99),
            wall_s=wall_s,
            pass_at_k=_pass_at_k(groups),
            causes=dict(self._causes.most_common()),
            phases_mean_ms=dict(sorted(phases.items(), key=lambda one: -one[1])),
            worst_tasks=tuple(
                WorstTask(task_id=task_id, reward_mean=-negated, samples=samples)
                for negated, task_id, samples in sorted(worst, reverse=True)
            ),
        )


class _TaskFigures:
    """What the episodes of one task have earned so far."""

    def __init__(self, task_id: str, is_group: bool) -> None:
        self.task_id = task_id
        self.finished = 0
        self.rewarded = 0
        self.succeeded = 0
        self.reward_sum = 0.0
        self._is_group = is_group

    def add(self, episode: Episode) -> None:
        self.finished += 1
        if episode.reward is not None:
            self.rewarded += 1
            self.reward_sum += episode.reward
            self.succeeded += is_success(episode)

    def join(self, other: _TaskFigures) -> None:
        self.rewarded += other.rewarded
        self.succeeded += other.succeeded
        self.reward_sum += other.reward_sum

    def for_pass_at_k(self) -> dict[tuple[int, int], int]:
        if not self._is_group or not self.rewarded:
            return {}
        return {(self.rewarded, self.succeeded): 1}


def _keep_worst(worst: list[tuple[float, str, int]], figures: _TaskFigures) -> None:
    if not figures.rewarded or figures.succeeded:
        return
    one = (-figures.reward_sum / figures.rewarded, figures.task_id, figures.rewarded)
    if len(worst) < WORST_TASKS:
        heapq.heappush(worst, one)
    else:
        heapq.heappushpop(worst, one)


class Quantiles:
    """Quantiles of durations in bounded memory: exact of up to `EXACT` values, then within 1 %."""

    EXACT: Final = 10_000
    _GROWTH: Final = 1.02
    """Ratio of the bounds of a bucket; its middle is at most 1 % away from them."""
    _LEAST_S: Final = 1e-6

    def __init__(self) -> None:
        self.count = 0
        self._exact = array("d")
        self._buckets: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.count += 1
        if self.count <= self.EXACT:
            self._exact.append(seconds)
            return
        if self._exact:
            self._buckets.update(map(self._bucket, self._exact))
            self._exact = array("d")
        self._buckets[self._bucket(seconds)] += 1

    def _bucket(self, seconds: float) -> int:
        return math.floor(math.log(max(seconds, self._LEAST_S), self._GROWTH))

    def ms(self, share: float) -> float | None:
        """Return the nearest-rank quantile in milliseconds; None of no values."""
        if not self._buckets:
            return quantile_ms(self._exact, share)
        rank = min(self.count - 1, int(share * self.count))
        for bucket in sorted(self._buckets):
            rank -= self._buckets[bucket]
            if rank < 0:
                break
        middle_s: float = self._GROWTH ** (bucket + 0.5)
        return 1000 * middle_s


def quantile_ms(seconds: Collection[float], share: float) -> float | None:
    """Return the nearest-rank quantile in milliseconds; None of no values."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class GroupStatistics(BaseModel):
    """Figures of the episodes that share a value, such as a task."""

    model_config = ConfigDict(frozen=True)

    key: str
    episodes: int
    succeeded: int
    void: int
    """Episodes that were played, and have no reward."""
    reward_mean: float | None
    steps_mean: float
    duration_p50_ms: float | None


def grouped(episodes: Iterable[Episode], key: Callable[[Episode], str]) -> list[GroupStatistics]:
    """Return figures of the episodes by `key`, the lowest mean reward first."""
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(key(episode), []).append(episode)
    found = [_statistics(name, members) for name, members in groups.items()]
    return sorted(found, key=lambda one: (one.reward_mean is None, one.reward_mean or 0.0, one.key))


def _statistics(key: str, episodes: list[Episode]) -> GroupStatistics:
    rewards = [one.reward for one in episodes if one.reward is not None]
    return GroupStatistics(
        key=key,
        episodes=len(episodes),
        succeeded=sum(is_success(one) for one in episodes),
        void=sum(one.reward is None and not is_refused(one) for one in episodes),
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        steps_mean=sum(len(one.steps) for one in episodes) / len(episodes),
        duration_p50_ms=quantile_ms([one.duration_s for one in episodes], 0.5),
    )


class ToolStatistics(BaseModel):
    """Figures of the calls of one tool."""

    model_config = ConfigDict(frozen=True)

    tool: str
    calls: int
    errors: int
    p50_ms: float | None
    p99_ms: float | None


def by_tool(episodes: Iterable[Episode]) -> list[ToolStatistics]:
    """Return figures of all calls by tool, the most used first."""
    steps: dict[str, list[Step]] = {}
    for episode in episodes:
        for step in episode.steps:
            steps.setdefault(step.tool, []).append(step)
    found = [
        ToolStatistics(
            tool=tool,
            calls=len(calls),
            errors=sum(step.is_error for step in calls),
            p50_ms=quantile_ms([step.duration_s for step in calls], 0.5),
            p99_ms=quantile_ms([step.duration_s for step in calls], 0.99),
        )
        for tool, calls in steps.items()
    ]
    return sorted(found, key=lambda one: (-one.calls, one.tool))
