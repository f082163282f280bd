"""Episodes of `sample` against creates of `create_many`: setup, one call, reward and release."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import aenv_ray
from aenv_ray.sampling import Task

PROJECT: Final = Path(__file__).parent / "episode_environment"
RESET_PROJECT: Final = Path(__file__).parent / "reset_environment"
CONCURRENCIES: Final = (16, 2048)
BUDGET: Final = {
    "episodes_per_create": ">= 0.6 x the creates/s of one create_many; the least of the below",
    "episodes_flatness": f">= 0.8: the slowest of {CONCURRENCIES} concurrent x the fastest",
    "episodes_with_reset_ratio": ">= 4 x the episodes/s of the same environment without a reset",
    "driver_cpu_ms_per_episode": "<= 0.5 ms",
}
_CREATES: Final = 300


async def act(env: Any, task: Task) -> None:
    """Make one call."""
    del task
    await env.call_tool("echo", {"text": "hi"})


def act_sync(env: Any, task: Task) -> None:
    """Make one call, in a thread."""
    del task
    env.call_tool("echo", {"text": "hi"})


def episodes(figures: dict[str, float], quick: bool) -> None:
    """Measure sync and async policies with few and many concurrent episodes."""
    rounds, count = (2, 1000) if quick else (4, 3000)
    ratios: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    reset_ratios: list[float] = []
    for _ in range(rounds):
        creates = _creates_per_s()
        for concurrency in CONCURRENCIES:
            for name, policy in (("async", act), ("sync", act_sync)):
                key = f"{name}_{concurrency}"
                rate, cpu_ms = _sampled(policy, count, concurrency)
                rates.setdefault(key, []).append(rate)
                ratios.setdefault(key, []).append(rate / creates)
                figures["driver_cpu_ms_per_episode"] = cpu_ms
        without, _ = _sampled(act, count, CONCURRENCIES[0])
        with_reset, _ = _sampled(act, count, CONCURRENCIES[0], RESET_PROJECT)
        reset_ratios.append(with_reset / without)
    figures["episodes_with_reset_ratio"] = statistics.median(reset_ratios)
    for key, values in ratios.items():
        figures[f"episodes_per_create_{key}"] = statistics.median(values)
        figures[f"episodes_per_s_{key}"] = statistics.median(rates[key])
    medians = [statistics.median(values) for values in ratios.values()]
    figures["episodes_per_create"] = min(medians)
    figures["episodes_flatness"] = min(medians) / max(medians)


def _creates_per_s() -> float:
    started = time.perf_counter()
    group = aenv_ray.create_many(PROJECT, _CREATES)
    rate = _CREATES / (time.perf_counter() - started)
    aenv_ray.release_many(group)
    return rate


def _sampled(
    policy: Callable[..., Any], count: int, concurrency: int, project: Path = PROJECT
) -> tuple[float, float]:
    """Return episodes per second once runners play, and the driver's CPU for each in ms."""
    tasks = [{"id": f"t{n}", "setup": {"function": "prepare"}} for n in range(count)]
    sampling = aenv_ray.sample(project, policy, tasks, concurrency=concurrency, runners="nodes")
    finished = iter(sampling)
    next(finished)  # the runners have started
    started, cpu_s = time.perf_counter(), time.process_time()
    for _ in finished:
        pass
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
    assert sampling.summary().succeeded == count
    return (count - 1) / wall_s, 1e3 * cpu_s / (count - 1)
