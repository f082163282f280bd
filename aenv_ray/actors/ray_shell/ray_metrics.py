"""Metrics that Ray's own Prometheus endpoint exports."""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge, Histogram

__all__ = ["Counter", "Gauge", "Histogram"]
