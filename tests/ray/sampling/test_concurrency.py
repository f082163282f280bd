"""Samplings that find out how many episodes at once pay."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aenv_ray
from aenv_ray.sampling import Sampling, Task
from tests.ray.cluster import Cluster
from tests.ray.faults import PROBE, eventually_empty
from tests.ray.sampling.policies import probe_tasks


async def _think(env: Any, task: Task) -> None:
    """Act after a while, as one whose model answers slowly."""
    del task
    await asyncio.sleep(0.3)
    await env.call_tool("count")


class _Narrow:
    """A model that answers four conversations at once, and the others after them."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(4)

    async def __call__(self, env: Any, task: Task) -> None:
        async with self._places:
            await _think(env, task)


def _limits(sampling: Sampling) -> list[int]:
    """Play all episodes; return the numbers of episodes at once that were allowed."""
    found = [sampling.concurrency]
    indices = []
    for episode in sampling:
        indices.append(episode.index)
        if sampling.concurrency != found[-1]:
            found.append(sampling.concurrency)
    assert sorted(indices) == list(range(sampling.total or 0))
    assert sampling.summary().reward_mean == 0.5
    return found


@pytest.mark.parametrize("runners", ["driver", "nodes"])
def test_concurrency_rises_while_throughput_grows(cluster: Cluster, runners: str) -> None:
    sampling = aenv_ray.sample(
        PROBE, _think, probe_tasks(200), concurrency=(2, 16), runners=runners
    )
    found = _limits(sampling)
    assert found[:2] == [2, 4]
    assert max(found) <= 16
    eventually_empty(cluster.sandboxes)


@pytest.mark.parametrize("runners", ["driver", "nodes"])
def test_no_more_episodes_are_played_at_once_than_the_policy_can_use(
    cluster: Cluster, runners: str
) -> None:
    """It has no use for 64 sandboxes."""
    sampling = aenv_ray.sample(
        PROBE, _Narrow, probe_tasks(120), concurrency=(2, 64), runners=runners
    )
    found = _limits(sampling)
    assert max(found) <= 16
    assert len(found) > 2
    eventually_empty(cluster.sandboxes)
