"""`aenv quickstart` on a Ray that runs: an honest summary, and nothing left on it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import aenv_ray
from aenv_ray.models import InstanceStatus
from aenv_ray.sampling import Episode
from tests.e2e.quickstarts import interrupted, quickstart, root
from tests.ray.cluster import Cluster
from tests.ray.faults import eventually_empty, without

__all__ = ["root"]  # a fixture

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.timeout(300)]

KEYS = {
    "rollouts", "succeeded", "infra_failed", "reward_mean", "tool_calls", "calls_per_s",
    "create_p50_ms", "call_p50_ms", "wall_s", "instances_left",
}  # fmt: skip


@pytest.fixture
def joined(cluster: Cluster) -> Iterator[dict[str, str]]:
    """Return what makes a quickstart join the Ray of these tests, where it may leave nothing.

    Starting a Ray takes longer than all that it does on one.
    """
    before = cluster.sandboxes(), cluster.traces()
    yield {"RAY_ADDRESS": cluster.address, "RAY_AUTH_MODE": os.environ["RAY_AUTH_MODE"]}
    eventually_empty(lambda: without(cluster.sandboxes(), before[0]))
    eventually_empty(lambda: without(cluster.traces(), before[1]))


@pytest.mark.parametrize(("policy", "mean"), [("reference", 1.0), ("wrong", 0.0)])
def test_a_policy_in_json(root: Path, joined: dict[str, str], policy: str, mean: float) -> None:
    """Valid JSON alone on stdout with the promised keys, exit code 0, and a line an episode."""
    done = quickstart(
        root, "--policy", policy, "--rollouts", "8", "--concurrency", "4", "--json",
        "--out", "episodes.jsonl", **joined,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert set(summary) >= KEYS
    assert (summary["rollouts"], summary["infra_failed"], summary["instances_left"]) == (8, 0, 0)
    assert (summary["reward_mean"], summary["succeeded"]) == (mean, 8 * mean)
    assert summary["tool_calls"] >= 8
    for name in ("calls_per_s", "create_p50_ms", "call_p50_ms", "wall_s"):
        assert summary[name] > 0
    lines = (root / "episodes.jsonl").read_text().splitlines()
    episodes = [Episode.model_validate_json(line) for line in lines]
    assert sorted(e.index for e in episodes) == list(range(8))
    assert [e.reward for e in episodes] == [mean] * 8
    assert sum(len(e.steps) for e in episodes) == summary["tool_calls"]


def test_instances_of_others_are_not_counted_as_leaked(root: Path, joined: dict[str, str]) -> None:
    """A shared cluster runs other people's instances; they do not make a quickstart fail."""
    import ray

    other = aenv_ray.create("mini-terminal", actor="shared")
    try:
        options = ("--rollouts", "2", "--concurrency", "2", "--json")
        done = quickstart(root, *options, **joined)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["instances_left"] == 0
        assert ray.get(other.info.remote()).status is InstanceStatus.RUNNING
    finally:
        ray.get(other.release.remote())


def test_the_random_policy_repeats_itself(root: Path, joined: dict[str, str]) -> None:
    """With one seed a task meets the same fate each time."""
    options = ("--policy", "random", "--rollouts", "76", "--concurrency", "8")
    done = quickstart(root, *options, **joined)
    assert done.returncode == 0, done.stderr
    assert "on the running Ray" in done.stderr
    rewards: dict[str, list[float]] = {}
    for line in (root / "quickstart.jsonl").read_text().splitlines():
        episode = Episode.model_validate_json(line)
        rewards.setdefault(episode.task_id, []).append(episode.reward or 0.0)
    twice = [found for found in rewards.values() if len(found) == 2]
    assert len(twice) >= 10
    assert all(first == second for first, second in twice)
    assert {0.0, 1.0} <= {first for first, _ in twice}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
def test_a_full_disk_loses_no_summary(root: Path, joined: dict[str, str]) -> None:
    """Exit code 3 names the file; the rollouts run to their end and are summed up."""
    options = ("--rollouts", "4", "--concurrency", "2", "--json", "--out", "/dev/full")
    done = quickstart(root, *options, **joined)
    assert done.returncode == 3, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["rollouts"], summary["reward_mean"], summary["instances_left"]) == (4, 1.0, 0)
    assert "error: /dev/full cannot be written: No space left on device" in done.stderr
    assert "report it" not in done.stderr


def test_ctrl_c_leaves_nothing_on_a_ray_that_continues(root: Path, joined: dict[str, str]) -> None:
    """Invariant 3: also with --json, where nothing draws a bar."""
    interrupted(root, "--json", **joined)
