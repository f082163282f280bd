"""`aenv quickstart`: rollouts from one command, an honest summary, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv_ray.sampling import Episode
from tests.contract.docker_node import base_image, docker
from tests.e2e.quickstarts import QUICKSTART, Running, environment_of, root
from tests.ray.cluster import Cluster
from tests.ray.faults import eventually_empty, processes_of, without

__all__ = ["root"]  # a fixture

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.timeout(300)]

KEYS = {
    "rollouts", "succeeded", "infra_failed", "reward_mean", "tool_calls", "calls_per_s",
    "create_p50_ms", "call_p50_ms", "wall_s", "instances_left",
}  # fmt: skip


def quickstart(root: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*QUICKSTART, *arguments],
        env=environment_of(root) | variables, cwd=root, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip


@pytest.mark.docker
def test_in_containers_it_says_so_and_counts_them(root: Path) -> None:
    """Invariant 3: with AENV_ENGINE=docker, what is left is asked of the daemon.

    So many rollouts keep a container ready for more; none follow, and it goes as well.
    """
    done = quickstart(
        root, "--rollouts", "10", "--concurrency", "4", "--out", "episodes.jsonl",
        AENV_ENGINE="docker", AENV_DOCKER_IMAGE=base_image(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "engine: docker" in done.stderr
    assert "reward mean              1.000\n" in done.stdout
    assert "instances left           0\n" in done.stdout
    form = '{{.Names}} {{.Label "aenv.directory"}}'
    rows = docker("ps", "--all", "--filter", "label=aenv.scope", "--format", form)
    assert [row for row in rows.splitlines() if str(root) in row] == []


@pytest.fixture
def joined(cluster: Cluster) -> Iterator[dict[str, str]]:
    """Return what makes a quickstart join the Ray of these tests, where it may leave nothing.

    Starting a Ray takes longer than all that it does on one.
    """
    before = cluster.sandboxes(), cluster.traces()
    yield {"RAY_ADDRESS": cluster.address, "RAY_AUTH_MODE": os.environ["RAY_AUTH_MODE"]}
    eventually_empty(lambda: without(cluster.sandboxes(), before[0]))
    eventually_empty(lambda: without(cluster.traces(), before[1]))


def test_alone_it_starts_a_ray_and_ends_it(root: Path) -> None:
    """People get a table on stdout, and where it runs on stderr; no process is left."""
    done = quickstart(root, "--rollouts", "8", "--concurrency", "4")
    assert done.returncode == 0, done.stderr
    assert "on a local Ray, started for this run" in done.stderr
    rows = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    assert {n: rows[n].strip() for n in ("rollouts", "reward mean", "instances left")} == {
        "rollouts": "8", "reward mean": "1.000", "instances left": "0",
    }  # fmt: skip
    assert len((root / "quickstart.jsonl").read_text().splitlines()) == 8
    eventually_empty(lambda: processes_of(root))


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


def test_the_random_policy_repeats_itself(root: Path, joined: dict[str, str]) -> None:
    """With one seed a task meets the same fate each time."""
    options = ("--policy", "random", "--rollouts", "85", "--concurrency", "8")
    done = quickstart(root, *options, **joined)
    assert done.returncode == 0, done.stderr
    assert "on the Ray that runs" in done.stderr
    rewards: dict[str, list[float]] = {}
    for line in (root / "quickstart.jsonl").read_text().splitlines():
        episode = Episode.model_validate_json(line)
        rewards.setdefault(episode.task_id, []).append(episode.reward or 0.0)
    twice = [found for found in rewards.values() if len(found) == 2]
    assert len(twice) >= 10
    assert all(first == second for first, second in twice)
    assert {0.0, 1.0} <= {first for first, _ in twice}


def test_an_unwritable_out_fails_before_anything_starts(root: Path) -> None:
    """Exit code 3, a message and a hint, no Ray."""
    done = quickstart(root, "--json", "--out", str(root / "no" / "such" / "dir" / "x.jsonl"))
    assert done.returncode == 3
    assert done.stdout == ""
    assert "cannot be written" in done.stderr
    assert "--out" in done.stderr
    assert not list(root.glob("session_*"))


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


@pytest.mark.parametrize(
    "option", [("--rollouts", "0"), ("--concurrency", "-1"), ("--policy", "x")]
)
def test_wrong_usage(root: Path, option: tuple[str, str]) -> None:
    """Exit code 2 names the option."""
    done = quickstart(root, *option)
    assert done.returncode == 2
    assert option[0] in done.stderr


def interrupted(root: Path, *options: str, **variables: str) -> None:
    """Send SIGINT to a quickstart in the middle of its rollouts."""
    out = root / "episodes.jsonl"
    options = ("--rollouts", "100000", "--concurrency", "8", "--out", str(out), *options)
    running = Running(root, *options, **variables)
    running.interrupt(lambda: out.exists() and out.read_text().count("\n") >= 20)


def test_ctrl_c_ends_it_quickly_and_leaves_nothing(root: Path) -> None:
    """SIGINT in the middle: exit code 130 within seconds, no result, no process."""
    interrupted(root)
    eventually_empty(lambda: processes_of(root))


def test_ctrl_c_leaves_nothing_on_the_ray_that_runs_on(root: Path, joined: dict[str, str]) -> None:
    """Invariant 3: also with --json, where nothing draws a bar."""
    interrupted(root, "--json", **joined)


def test_ctrl_c_during_the_first_creates_starts_no_other_ray(root: Path) -> None:
    """A terminal's SIGINT goes to the whole group while threads still create: 130, and nothing."""
    sessions: list[Path] = []

    def creates() -> list[Path]:
        sessions[:] = root.glob("ray/session_2*")
        # The first creates wait for the template, which is loaded once the launcher's socket is up.
        return list(root.glob("r/**/*.sock"))

    running = Running(root, "--rollouts", "1000", "--concurrency", "16")
    running.interrupt(creates, group=True)
    assert len(sessions) == 1
    assert list(root.glob("ray/session_2*")) == sessions, "another Ray was started"
    eventually_empty(lambda: processes_of(root))
