"""Warm pools: the time to acquire a ready instance, singly and in a burst."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import ray

import aenv_ray
from aenv_ray.config import settings

ECHO = Path(__file__).parent / "echo_environment"
BURST = 100
TAKEN = 10
"""Acquired one after another from a pool of twice the size, so that none misses."""


def pools(figures: dict[str, float], quick: bool) -> None:
    """Measure pools of processes, and of containers if a daemon answers."""
    figures["process_warm_acquire_p50_ms"] = 1e3 * _acquire_s(ECHO, 3 if quick else 9)
    figures["process_pool_burst_100_s"] = _burst_s(ECHO, 3 if quick else 7)
    if not _has_docker():
        return
    with tempfile.TemporaryDirectory() as directory:
        project = _in_container(Path(directory))
        figures["warm_acquire_p50_ms"] = 1e3 * _acquire_s(project, 3 if quick else 9)
        figures["pool_burst_100_s"] = _burst_s(project, 1 if quick else 3)


def _has_docker() -> bool:
    if shutil.which("docker") is None:
        return False
    asked = subprocess.run(["docker", "version"], capture_output=True, check=False, timeout=60)
    return asked.returncode == 0


def _in_container(directory: Path) -> Path:
    """Return the project configured for containers."""
    from tests.contract.docker.docker_node import base_image  # built without a registry

    project = directory / "echo"
    shutil.copytree(ECHO, project, ignore=shutil.ignore_patterns("__pycache__"))
    config = json.loads((project / "config.json").read_text(encoding="utf-8"))
    image = settings().docker_image or base_image()
    config.setdefault("deployConfig", {}).update(engine="docker", container={"image": image})
    (project / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return project


def _acquire_s(project: Path, rounds: int) -> float:
    """Return the median seconds from `create` to the first result, one after another."""
    times = []
    for _ in range(rounds):
        aenv_ray.warm(project, 2 * TAKEN, wait=True)
        group = []
        for _ in range(TAKEN):
            started = time.perf_counter()
            env = aenv_ray.create(project, actor="shared")
            ray.get(env.call_tool.remote("echo", {"text": "hi"}))
            times.append(time.perf_counter() - started)
            group.append(env)
        _check_warm(group)
        aenv_ray.release_many(group)
    aenv_ray.warm(project, 0)
    return statistics.median(times)


def _burst_s(project: Path, rounds: int) -> float:
    """Return the median seconds of one `create_many` that empties a pool."""
    times = []
    for _ in range(rounds):
        aenv_ray.warm(project, BURST, wait=True)
        started = time.perf_counter()
        group = aenv_ray.create_many(project, BURST)
        times.append(time.perf_counter() - started)
        ray.get([env.call_tool.remote("echo", {"text": "hi"}) for env in group])  # all answer
        _check_warm(group)
        aenv_ray.release_many(group)
    aenv_ray.warm(project, 0)
    return statistics.median(times)


def _check_warm(group: list[aenv_ray.EnvHandle]) -> None:
    infos = ray.get([env.info.remote() for env in group])
    missed = [info.id for info in infos if not info.start_mode.startswith("warm, ")]
    assert not missed, f"{len(missed)} of {len(group)} came from no pool"
