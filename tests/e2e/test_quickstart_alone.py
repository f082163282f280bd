"""`aenv quickstart` alone: rollouts from one command, on a Ray that it starts and ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.docker.docker_node import base_image, docker
from tests.e2e.quickstarts import Running, interrupted, quickstart, root
from tests.ray.faults import eventually_empty, processes_of

__all__ = ["root"]  # a fixture

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.timeout(300)]


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


def test_without_a_cluster_it_starts_and_ends_a_ray(root: Path) -> None:
    """People get a table on stdout, and where it runs on stderr; no process is left."""
    done = quickstart(root, "--rollouts", "8", "--concurrency", "4")
    assert done.returncode == 0, done.stderr
    assert "on a local Ray, started for this run" in done.stderr
    assert "Token authentication" not in done.stderr
    rows = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    assert {n: rows[n].strip() for n in ("rollouts", "reward mean", "instances left")} == {
        "rollouts": "8", "reward mean": "1.000", "instances left": "0",
    }  # fmt: skip
    assert len((root / "quickstart.jsonl").read_text().splitlines()) == 8
    eventually_empty(lambda: processes_of(root))


def test_an_unwritable_out_fails_before_anything_starts(root: Path) -> None:
    """Exit code 3, a message and a hint, no Ray."""
    done = quickstart(root, "--json", "--out", str(root / "no" / "such" / "dir" / "x.jsonl"))
    assert done.returncode == 3
    assert done.stdout == ""
    assert "cannot be written" in done.stderr
    assert "--out" in done.stderr
    assert not list(root.glob("session_*"))


@pytest.mark.parametrize(
    "option", [("--rollouts", "0"), ("--concurrency", "-1"), ("--policy", "x")]
)
def test_wrong_usage(root: Path, option: tuple[str, str]) -> None:
    """Exit code 2 names the option."""
    done = quickstart(root, *option)
    assert done.returncode == 2
    assert option[0] in done.stderr


def test_ctrl_c_ends_it_quickly_and_leaves_nothing(root: Path) -> None:
    """SIGINT in the middle: exit code 130 within seconds, no result, no process."""
    interrupted(root)
    eventually_empty(lambda: processes_of(root))


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
