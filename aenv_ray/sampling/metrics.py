"""Metrics of samplings in Ray's Prometheus exporter, from the process that calls `sample`."""

from __future__ import annotations

from typing import Final

from aenv_ray.trajectories.schema import Episode
from aenv_ray.trajectories.statistics import Causes

_BUCKETS_S: Final = [0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 600.0]
_REWARDS: Final = [
    0.001, 0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95, 0.999, 1.001, 10.0, 100.0,
]  # fmt: skip
"""Ray takes positive bounds only, and exports the middle of a bucket for the values in it: so a
bucket is around each tenth, and 0.0 and 1.0 have their own."""
_LABELS: Final = ("environment",)


class SamplingMetrics:
    """Exports the finished episodes of one run. Create it while connected to Ray.

    Args:
        environment: The label of every metric. Its version is dropped, and a project is named by
            the last part of its path, which bounds the number of labels.
    """

    def __init__(self, environment: str) -> None:
        from aenv_ray.actors.ray_shell.ray_metrics import Counter, Gauge, Histogram

        name = environment.rstrip("/").rpartition("/")[2].partition("@")[0]
        self._labels = {"environment": name}
        self._episodes = Counter(
            "aenv_sampling_episodes", "Finished episodes by status", (*_LABELS, "status")
        )
        self._failures = Counter(
            "aenv_sampling_failures",
            "Finished episodes with an error, by its code",
            (*_LABELS, "status", "cause"),
        )
        self._playing = Gauge("aenv_sampling_playing", "Episodes that are being played", _LABELS)
        self._waiting = Gauge(
            "aenv_sampling_waiting", "Episodes that wait for room in the cluster", _LABELS
        )
        self._left = Gauge("aenv_sampling_left", "Episodes of the run that are left", _LABELS)
        self._calls = Counter("aenv_sampling_calls", "Tool calls of finished episodes", _LABELS)
        self._tokens = Counter(
            "aenv_sampling_tokens", "Tokens of the policies' models", (*_LABELS, "kind")
        )
        self._reward_mean = Gauge(
            "aenv_sampling_reward_mean", "Mean reward of the run so far", _LABELS
        )
        self._reward = Histogram(
            "aenv_sampling_reward", "Rewards of finished episodes", _REWARDS, _LABELS
        )
        self._create_s, self._call_s, self._episode_s = (
            Histogram(f"aenv_sampling_{what}_seconds", text, _BUCKETS_S, _LABELS)
            for what, text in (
                ("create", "Time until the instance was ready"),
                ("call", "Duration of a tool call"),
                ("episode", "Duration of an episode"),
            )
        )
        self._rewarded, self._reward_sum = 0, 0.0
        self._causes = Causes()

    def note_playing(self, playing: int, waiting: int) -> None:
        """Set how many episodes are being played, and how many wait for room in the cluster."""
        self._playing.set(playing, self._labels)
        self._waiting.set(waiting, self._labels)

    def note_left(self, count: int) -> None:
        """Set how many episodes of the run have not finished."""
        self._left.set(count, self._labels)

    def add(self, episode: Episode) -> None:
        """Count a finished episode and its calls."""
        labels = self._labels
        status = labels | {"status": episode.status.value}
        self._episodes.inc(1.0, status)
        cause = self._causes.add(episode)
        if cause is not None:
            self._failures.inc(1.0, status | {"cause": cause})
        self._episode_s.observe(episode.duration_s, labels)
        if episode.create_s is not None:
            self._create_s.observe(episode.create_s, labels)
        if episode.steps:
            self._calls.inc(float(len(episode.steps)), labels)
        for step in episode.steps:
            self._call_s.observe(step.duration_s, labels)
        self._add_tokens(episode)
        if episode.reward is not None:
            self._rewarded += 1
            self._reward_sum += episode.reward
            self._reward_mean.set(self._reward_sum / self._rewarded, labels)
            self._reward.observe(episode.reward, labels)

    def _add_tokens(self, episode: Episode) -> None:
        usage = episode.usage
        if usage is None:
            return
        for kind, count in (("prompt", usage.prompt_tokens), ("answer", usage.completion_tokens)):
            if count > 0:
                self._tokens.inc(float(count), self._labels | {"kind": kind})
