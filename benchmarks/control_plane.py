"""``python -m benchmarks control-plane``: how fast the fabric creates instances that cost nothing.

Sandboxes are those of the fake engine, on several nodes of this machine. Instances are created in
groups until the given number is live, and all stay: each group is as fast as the first if no step
of a create looks at all instances.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Final

import ray

import aenv_ray
from aenv_ray.actors.calls.handle import EnvHandle
from benchmarks.fake_cluster import fake_cluster

PROJECT: Final = Path(__file__).parent / "episode_environment"
BUDGET: Final = {
    "control_plane_creates_per_s": ">= 2,000 on the fake engine",
    "control_plane_flatness": ">= 0.8: the last groups' creates/s over the first groups'",
}
_QUARTERS: Final = 4


def measure(instances: int, group: int) -> dict[str, float]:
    """Create `instances`, `group` at a time, and release them."""
    live: list[EnvHandle] = []
    rates: list[float] = []
    try:
        aenv_ray.release_many(aenv_ray.create_many(PROJECT, group))  # hosts and templates start
        while len(live) < instances:
            started = time.perf_counter()
            live += aenv_ray.create_many(PROJECT, group, ttl="1h")
            rates.append(group / (time.perf_counter() - started))
        ray.get(live[0].call_tool.remote("echo", {"text": "hi"}))
        ray.get(live[-1].call_tool.remote("echo", {"text": "hi"}))
    finally:
        aenv_ray.release_many(live)
    quarter = max(1, len(rates) // _QUARTERS)
    first, last = statistics.median(rates[:quarter]), statistics.median(rates[-quarter:])
    return {
        "control_plane_creates_per_s": statistics.median(rates),
        "control_plane_first_per_s": first,
        "control_plane_last_per_s": last,
        "control_plane_flatness": last / first,
    }


def main(arguments: list[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks control-plane")
    parser.add_argument("--instances", type=int, default=16_384, help="live at the end")
    parser.add_argument("--group", type=int, default=512, help="created at the same time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args(arguments)
    with fake_cluster(options.instances + options.group) as nodes:
        figures = measure(options.instances, options.group)
    print(f"{options.instances} instances in groups of {options.group} on {nodes} nodes")
    for name, value in figures.items():
        print(f"  {name:<32} {value:>10.2f}  {BUDGET.get(name, '')}".rstrip())
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
