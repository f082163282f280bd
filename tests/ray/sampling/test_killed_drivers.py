"""A run whose driver is killed again and again: no episode is lost, and none is recorded twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray.sampling import EpisodeStatus, Task
from aenv_ray.trajectories import read
from aenv_ray.trajectories.arrow import count_rows
from tests.ray.cluster import Cluster
from tests.ray.faults import PROBE, Driver, eventually, eventually_empty
from tests.ray.sampling.policies import probe_tasks

PROGRAM = """
from tests.ray.faults import PROBE
from tests.ray.sampling.policies import probe_tasks

async def act(env, task):
    await env.exec("sleep 0.2")  # slower than the test, which sees each episode

act.name = "probe"
aenv_ray.sample(
    PROBE, act, probe_tasks({episodes}),
    concurrency=2, out={out!r}, resume=True, runners={runners!r},
).run()
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "runners", "kills"),
    [
        ("episodes.jsonl", "driver", 20),
        ("episodes.jsonl", "nodes", 5),
        ("episodes", "driver", 3),
        ("episodes.parquet", "driver", 2),
    ],
)
def test_a_run_whose_driver_is_killed_repeatedly_has_every_episode_once(
    cluster: Cluster,
    driver: Callable[[str], Driver],
    tmp_path: Path,
    name: str,
    runners: str,
    kills: int,
) -> None:
    """Each driver is killed with SIGKILL while it writes; the last one runs what is missing."""
    out, count = tmp_path / name, kills * 10
    program = PROGRAM.format(episodes=count, out=str(out), runners=runners)

    def finished() -> int:
        if out.is_dir():
            converted = sum(count_rows(path) for path in out.glob("*.parquet"))
            return converted + sum(path.read_bytes().count(b"\n") for path in out.glob("*.jsonl"))
        return out.read_bytes().count(b"\n") if out.exists() else 0

    for _ in range(kills):
        before = finished()
        running = driver(program)
        eventually(lambda before=before: finished() > before, what=finished)
        running.kill()
    assert kills <= finished() < count

    async def act(env: Any, task: Task) -> None:
        await env.call_tool("count")

    act.name = "probe"  # type: ignore[attr-defined]
    rest = aenv_ray.sample(PROBE, act, probe_tasks(count), out=out, resume=True, runners=runners)
    assert rest.kept >= kills
    summary = rest.run()
    assert summary.rollouts == count
    assert finished() == count
    episodes = read(out)
    assert [episode.index for episode in episodes] == list(range(count))
    assert {episode.status for episode in episodes} == {EpisodeStatus.COMPLETED}
    eventually_empty(cluster.sandboxes)
