"""A run whose driver is killed again and again: no episode is lost, and none is recorded twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray.sampling import Episode, EpisodeStatus, Task
from tests.ray.cluster import Cluster
from tests.ray.faults import PROBE, Driver, eventually, eventually_empty
from tests.ray.sampling.policies import probe_tasks

KILLS = 20
EPISODES = KILLS * 10

PROGRAM = """
from tests.ray.faults import PROBE
from tests.ray.sampling.policies import probe_tasks

async def act(env, task):
    await env.exec("sleep 0.2")  # slower than the test, which sees each episode

aenv_ray.sample(PROBE, act, probe_tasks({episodes}), concurrency=2, out={out!r}, resume=True).run()
"""


@pytest.mark.timeout(300)
def test_a_run_whose_driver_is_killed_twenty_times_has_every_episode_once(
    cluster: Cluster, driver: Callable[[str], Driver], tmp_path: Path
) -> None:
    """Each driver is killed with SIGKILL while it writes; the last one runs what is missing."""
    out = tmp_path / "episodes.jsonl"
    program = PROGRAM.format(episodes=EPISODES, out=str(out))

    def finished() -> int:
        return out.read_bytes().count(b"\n") if out.exists() else 0

    for _ in range(KILLS):
        before = finished()
        running = driver(program)
        eventually(lambda before=before: finished() > before, what=finished)
        running.kill()
    assert KILLS <= finished() < EPISODES

    async def act(env: Any, task: Task) -> None:
        await env.call_tool("count")

    rest = aenv_ray.sample(PROBE, act, probe_tasks(EPISODES), out=out, resume=True)
    assert rest.kept >= KILLS
    summary = rest.run()
    assert summary.rollouts == EPISODES
    episodes = [Episode.model_validate_json(line) for line in out.read_text().splitlines()]
    assert sorted(episode.index for episode in episodes) == list(range(EPISODES))
    assert {episode.status for episode in episodes} == {EpisodeStatus.COMPLETED}
    eventually_empty(cluster.sandboxes)
