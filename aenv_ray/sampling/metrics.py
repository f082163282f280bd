"""Metrics of samplings in Ray's Prometheus exporter, from the process that calls `sample`."""

from __future__ import annotations

from typing import Final

from aenv_ray.trajectories.schema import Episode

_BUCKETS_S: Final = [0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 600.0]
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
        self._calls = Counter("aenv_sampling_calls", "Tool calls of finished episodes", _LABELS)
        self._reward_mean = Gauge(
            "aenv_sampling_reward_mean", "Mean reward of the run so far", _LABELS
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

    def add(self, episode: Episode) -> None:
        """Count a finished episode and its calls."""
        labels = self._labels
        self._episodes.inc(1.0, labels | {"status": episode.status.value})
        self._episode_s.observe(episode.duration_s, labels)
        if episode.create_s is not None:
            self._create_s.observe(episode.create_s, labels)
        if episode.steps:
            self._calls.inc(float(len(episode.steps)), labels)
        for step in episode.steps:
            self._call_s.observe(step.duration_s, labels)
        if episode.reward is not None:
            self._rewarded += 1
            self._reward_sum += episode.reward
            self._reward_mean.set(self._reward_sum / self._rewarded, labels)
