"""The built-in environment mini-terminal, as the sampler plays it."""

from __future__ import annotations

import pytest

from aenv_ray.sampling import environment_tasks, sample
from tests.ray.cluster import Cluster


@pytest.mark.parametrize(("policy", "reward"), [("reference", 1.0), ("null", 0.0)])
def test_every_reference_earns_the_reward_and_nothing_does_not(
    cluster: Cluster, policy: str, reward: float
) -> None:
    """Also those of tasks that ask for running processes, which end before other rewards."""
    del cluster
    sampling = sample("mini-terminal", policy, environment_tasks("mini-terminal"), concurrency=8)
    sampling.run()
    ends = {one.task_id: (one.reward, one.error, one.reward_detail) for one in sampling.episodes}
    assert {name: end for name, end in ends.items() if end[0] != reward} == {}
    assert len(ends) >= 48
