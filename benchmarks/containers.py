"""The docker engine against `docker run` and a bare actor; needs a daemon and an image."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

import aenv_ray
from benchmarks.floor import bare_actor
from benchmarks.measure import p50_s, paired

ARGUMENTS = {"text": "hi"}
BUDGET = {
    "docker_create_ratio": "<= 2 x docker run --rm IMAGE python3 -c pass",
    "docker_call_p50_ratio": "<= 1.3 x a bare async actor call",
}


def refusal(image: str | None) -> str:
    """Return why containers cannot be measured here; empty if they can."""
    if not image:
        return "no image: name one with --image or AENV_DOCKER_IMAGE"
    if shutil.which("docker") is None:
        return "docker is not installed"
    for command in (["docker", "version"], ["docker", "image", "inspect", image]):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode:
            return done.stderr.strip()
    return ""


def containers(figures: dict[str, float], echo_project: Path, image: str, quick: bool) -> None:
    """Measure create to first result, and calls, of shared instances in containers."""

    def create() -> None:
        env = aenv_ray.create(echo_project, actor="shared", engine="docker")
        ray.get(env.call_tool.remote("echo", ARGUMENTS))
        made.append(env)

    def run() -> None:
        command = ["docker", "run", "--rm", image, "python3", "-c", "pass"]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)

    made: list[Any] = []
    create()  # the first create also prepares what all containers of the node share
    run()
    ours_s, floor_s, ratio = paired(_median_s, create, run, 3, 5 if quick else 11)
    figures |= {"docker_create_p50_ms": 1e3 * ours_s, "docker_run_p50_ms": 1e3 * floor_s}
    figures["docker_create_ratio"] = ratio
    env, actor = made[0], bare_actor()

    def call() -> Any:
        return env.call_tool.remote("echo", ARGUMENTS)

    def bare() -> Any:
        return actor.echo.remote(ARGUMENTS)

    ray.get([call() for _ in range(200)] + [bare() for _ in range(200)])
    _, _, ratio = paired(p50_s, call, bare, 200, 9 if quick else 15)
    figures["docker_call_p50_ratio"] = ratio
    aenv_ray.release_many(made)


def _median_s(act: Callable[[], Any], count: int) -> float:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        act()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
