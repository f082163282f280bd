"""SIGKILL of what a run of runners needs, while they play: the record is that of a quiet run."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray.actors.controller.placement import SHARED_PREFIX
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.sampling import Episode, EpisodeStatus, Task
from aenv_ray.sampling.sampler import RUNNERS_FROM
from tests.ray.cluster import Cluster
from tests.ray.faults import (
    PROBE,
    actor_pid,
    eventually,
    eventually_empty,
    kill,
    launcher_pids,
    processes_of,
)

CALLS = 3
"""Tool calls of an episode. Its reward is 1 only in the sandbox that ran each exactly once."""
BETWEEN = 40
"""Episodes that finish between two kills."""


def _hosts(cluster: Cluster) -> list[int]:
    del cluster
    names = [name for name in ray_api.actor_names() if name.startswith(SHARED_PREFIX)]
    return [actor_pid(ray_api.find_actor(name)) for name in names]


def _launchers(cluster: Cluster) -> list[int]:
    return launcher_pids(cluster.node_dir)


def _controllers(cluster: Cluster) -> list[int]:
    del cluster
    return [actor_pid(ray_api.find_actor(ray_api.CONTROLLER_NAME))]


def _runners(cluster: Cluster) -> list[int]:
    found = processes_of(cluster.root)
    return [pid for pid, command in found.items() if command.startswith("ray::RunnerShell")]


_PARTS: dict[str, Callable[[Cluster], list[int]]] = {
    "host": _hosts,
    "launcher": _launchers,
    "controller": _controllers,
    "sandboxes": Cluster.sandboxes,
    "runner": _runners,
}


@pytest.mark.timeout(300)
def test_a_run_survives_the_death_of_each_component_and_of_all_at_once(
    cluster: Cluster, tmp_path: Path
) -> None:
    """No episode is lost, recorded twice or scored in a sandbox that did not play it."""
    kills = [(name,) for name in _PARTS] + [tuple(_PARTS)]
    count = BETWEEN * (len(kills) + 2)
    assert count >= RUNNERS_FROM

    async def act(env: Any, task: Task) -> int:
        del task
        for _ in range(CALLS):
            await env.call_tool("count")
            await asyncio.sleep(0.05)
        return os.getpid()

    reward = {"name": "counted", "arguments": {"expected": CALLS}}
    tasks = [{"id": f"t{n}", "reward": reward} for n in range(count)]
    out = tmp_path / "episodes.jsonl"
    sampling = aenv_ray.sample(PROBE, act, tasks, concurrency=8, out=out)
    streamed: list[Episode] = []
    for episode in sampling:
        streamed.append(episode)
        if kills and len(streamed) % BETWEEN == 0:
            found: dict[str, list[int]] = {}
            for name in kills.pop(0):
                found[name] = eventually(lambda look=_PARTS[name]: look(cluster))
            for pid in (pid for pids in found.values() for pid in pids):
                with contextlib.suppress(ProcessLookupError):  # a sandbox that was released
                    kill(pid)
    assert not kills
    assert sorted(episode.index for episode in streamed) == list(range(count))
    written = [Episode.model_validate_json(line) for line in out.read_text().splitlines()]
    assert sorted(episode.index for episode in written) == list(range(count))
    ends = {(episode.status, episode.reward, len(episode.steps)) for episode in streamed}
    assert ends == {(EpisodeStatus.COMPLETED, 1.0, CALLS)}
    assert max(episode.attempts for episode in streamed) > 1  # the kills hit episodes
    assert os.getpid() not in {episode.output for episode in streamed}
    summary = sampling.summary()
    assert (summary.rollouts, summary.infra_failed, summary.reward_mean) == (count, 0, 1.0)
    eventually_empty(cluster.sandboxes)
    eventually_empty(lambda: _runners(cluster))
