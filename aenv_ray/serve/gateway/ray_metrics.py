"""The gateway's metrics in Ray's own exporter, which knows all replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aenv_ray.actors.ray_shell import ray_metrics
from aenv_ray.serve.gateway.metrics import COUNTERS, GAUGES, HISTOGRAMS

_BOUNDARIES = [0.002, 0.01, 0.05, 0.25, 1.0, 10.0, 60.0]


class RayTwin:
    """See `Twin`."""

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}
        for name, (text, labels) in COUNTERS.items():
            self._metrics[name] = ray_metrics.Counter(name, description=text, tag_keys=labels)
        for name, (text, labels) in GAUGES.items():
            self._metrics[name] = ray_metrics.Gauge(name, description=text, tag_keys=labels)
        for name, (text, labels) in HISTOGRAMS.items():
            self._metrics[name] = ray_metrics.Histogram(
                name, description=text, boundaries=_BOUNDARIES, tag_keys=labels
            )

    def count(self, name: str, number: int, labels: Mapping[str, str]) -> None:  # noqa: D102
        self._metrics[name].inc(float(number), tags=dict(labels))

    def observe(self, name: str, seconds: float, labels: Mapping[str, str]) -> None:  # noqa: D102
        self._metrics[name].observe(seconds, tags=dict(labels))

    def set(self, name: str, value: float, labels: Mapping[str, str]) -> None:  # noqa: D102
        self._metrics[name].set(value, tags=dict(labels))
