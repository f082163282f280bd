"""How figures are measured: alternating blocks, medians, one ratio per block."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

Send = Callable[[], Any]
"""Sends one call and returns its ObjectRef."""


def p50_s(send: Send, count: int) -> float:
    """Return the median seconds of `count` calls, one after another."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        ray.get(send())
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def per_s(send: Send, count: int) -> float:
    """Return calls per second when all are sent before the first is awaited."""
    started = time.perf_counter()
    ray.get([send() for _ in range(count)])
    return count / (time.perf_counter() - started)


def paired(
    figure: Callable[[Send, int], float], ours: Send, floor: Send, count: int, blocks: int
) -> tuple[float, float, float]:
    """Measure ours and the floor in turn; return the medians of ours, the floor and the ratio.

    Both measurements of a block run within a second, so a drifting machine shifts both.
    """
    pairs = []
    for index in range(blocks):
        order = (ours, floor) if index % 2 else (floor, ours)
        values = {id(send): figure(send, count) for send in order}
        pairs.append((values[id(ours)], values[id(floor)]))
    return (
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(a / b for a, b in pairs),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank quantile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
