"""The built-in environment swebench: five repositories that are made here, and attackers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray import trajectories
from aenv_ray.project.project import builtins
from aenv_ray.sampling import Episode, EpisodeStatus, Task, load_tasks
from aenv_ray.sampling.tasks.repositories import SPECIFIED
from tests.contract.docker.docker_node import docker
from tests.ray.cluster import Cluster
from tests.ray.envs.swe_repositories import (
    FLASK,
    INTERVALS,
    LEDGER,
    QUEUE,
    R2E_PLUGIN,
    REPOSITORIES,
    SLUG,
    main_image,
    r2e_row,
    task_images,
)

pytestmark = pytest.mark.docker

TRAPS = r"""
for name in python python3 pytest git bash; do
  printf '#!/bin/sh\necho "PASSED"; exit 0\n' > /usr/local/bin/$name; chmod +x /usr/local/bin/$name
done
echo 'import os; os._exit(0)' > /usr/local/lib/python3.11/dist-packages/trap.pth
echo 'import os; os._exit(0)' > /usr/local/lib/python3.11/dist-packages/sitecustomize.py
(while sleep 0.2; do touch /tmp/waits; pkill -f official; done) >/dev/null 2>&1 &
kill -9 -1
"""
"""Replaces what a grader would use, waits for it, and kills what it can reach."""


@pytest.fixture(scope="module")
def project(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment, in an image that is made here."""
    del cluster
    target = tmp_path_factory.mktemp("envs") / "swebench"
    shutil.copytree(builtins()["swebench"], target, ignore=shutil.ignore_patterns("__pycache__"))
    config = json.loads((target / "config.json").read_text())
    config["deployConfig"]["container"]["image"] = main_image()
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return task_images()


def told(episode: Episode) -> object:
    """Return what a failed assertion shows."""
    return episode.task_id, episode.error, episode.reward_detail, episode.steps


def played(project: Path, policy: str, tasks: list[Task]) -> dict[str, Episode]:
    sampling = aenv_ray.sample(project, policy, tasks, concurrency=2)
    sampling.run()
    return {episode.task_id: episode for episode in sampling.episodes}


def test_references_resolve_their_tasks(project: Path, rows: dict[str, dict[str, Any]]) -> None:
    """The agent acts in the image of its task; its patch is graded in another instance of it."""
    tasks = load_tasks([rows[FLASK.name], rows[QUEUE.name]])
    for name, episode in played(project, "reference", tasks).items():
        assert (episode.status, episode.reward) == (EpisodeStatus.COMPLETED, 1.0), told(episode)
        repository = next(one for one in REPOSITORIES if one.name == name)
        assert episode.reward_detail["report"]["tests_status"]["FAIL_TO_PASS"] == {
            "success": repository.fail_to_pass,
            "failure": [],
        }


def test_what_an_agent_leaves_in_its_container_decides_nothing(
    project: Path, rows: dict[str, dict[str, Any]]
) -> None:
    """D19: the tests reach a container that the agent never used."""
    (task,) = load_tasks([rows[INTERVALS.name]])
    calls = [{"tool": "shell", "arguments": {"command": TRAPS}}, {"tool": "submit"}]
    trapped = Task.model_validate({**task.model_dump(), "reference": calls})
    (episode,) = played(project, "reference", [trapped]).values()
    assert (episode.status, episode.reward) == (EpisodeStatus.COMPLETED, 0.0), told(episode)
    assert len(episode.steps) == 2


def test_a_row_of_r2e_gym_is_played_to_its_verdict(project: Path) -> None:
    """The commit of the row is the reference; the files of an image that are in no commit stay.

    D19: an agent neither finds the hidden tests nor replaces what runs them.
    """
    (task,) = load_tasks([r2e_row()])
    look = "ls -a . / r2e_tests /r2e_tests; cat run_tests.sh; git status --short"
    attack = [
        {"tool": "shell", "arguments": {"command": look}},
        {"tool": "shell", "arguments": {"command": R2E_PLUGIN + TRAPS}},
    ]
    attacker = task.model_copy(update={"id": "attacker"})
    tasks = [task, Task.model_validate({**attacker.model_dump(), "reference": attack})]
    episodes = played(project, "reference", tasks)
    assert episodes[task.id].reward == 1.0, told(episodes[task.id])
    assert played(project, "null", [task])[task.id].reward == 0.0
    attacked = episodes["attacker"]
    assert (attacked.status, attacked.reward) == (EpisodeStatus.COMPLETED, 0.0), told(attacked)
    seen = str(attacked.steps[0])
    assert "install.sh" in seen
    assert "test_1.py" not in seen
    assert "-m pytest" not in seen


def test_an_agent_does_not_see_the_hidden_tests_that_an_image_contains(
    project: Path, rows: dict[str, dict[str, Any]]
) -> None:
    """As those of SWE-smith do (D19); and what it writes in their place is left out."""
    (task,) = load_tasks([rows[QUEUE.name]])
    look = "ls; git log --all --oneline | wc -l; git show HEAD:test_fifo.py; grep -r test_order ."
    attack = [
        {"tool": "shell", "arguments": {"command": look}},
        {"tool": "shell", "arguments": {"command": "echo 'def test_order(): pass' > test_fifo.py"}},
    ]
    attacker = Task.model_validate({**task.model_dump(), "reference": attack})
    episode = played(project, "reference", [attacker])[task.id]
    assert (episode.status, episode.reward) == (EpisodeStatus.COMPLETED, 0.0), told(episode)
    assert episode.reward_detail["left_out"] == ["test_fifo.py"]
    seen = episode.steps[0].text
    assert "fifo.py" in seen
    assert "def test_" not in seen


def test_predictions_get_the_verdicts_of_the_official_harness(
    project: Path,
    rows: dict[str, dict[str, Any]],
    tmp_path: Path,
    cluster: Cluster,
) -> None:
    """A gold patch resolves its instance; that of another repository does not apply."""
    given = {
        INTERVALS.name: rows[INTERVALS.name]["patch"],
        LEDGER.name: rows[LEDGER.name]["patch"],
        SLUG.name: rows[SLUG.name]["patch"],
        FLASK.name: rows[SLUG.name]["patch"],
    }
    path = tmp_path / "predictions.json"
    path.write_text(json.dumps([{"instance_id": n, "model_patch": p} for n, p in given.items()]))
    file, out = tmp_path / "rows.jsonl", tmp_path / "episodes.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows.values()))
    options = ["--tasks", str(file), "--predictions", str(path), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "aenv_ray.cli.main", "sample", str(project), *options, "-c", "2"],
        env={**os.environ, "RAY_ADDRESS": cluster.address}, text=True, capture_output=True,
        check=False, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    resolved = ", ".join(sorted([INTERVALS.name, LEDGER.name, SLUG.name]))
    assert f"resolved: 3: {resolved}\n" in done.stderr
    assert f"unresolved: 1: {FLASK.name}\n" in done.stderr
    assert "without verdict" not in done.stderr
    episodes = {one.task_id: one for one in trajectories.read(out)}
    rewards = {name: episode.reward for name, episode in episodes.items()}
    assert rewards == {INTERVALS.name: 1.0, LEDGER.name: 1.0, SLUG.name: 1.0, FLASK.name: 0.0}, [
        told(episode) for episode in episodes.values()
    ]
    assert "does not apply" in episodes[FLASK.name].reward_detail["reason"]


def test_what_the_official_package_does_not_know_is_no_reward(
    project: Path, rows: dict[str, dict[str, Any]]
) -> None:
    """Invariant 2: the data set is at fault, not the agent; it is said before the agent acts."""
    (task,) = load_tasks([{**rows[INTERVALS.name], "log_parser": "parse_log_of_mine"}])
    (episode,) = played(project, "reference", [task]).values()
    assert (episode.status, episode.reward) == (EpisodeStatus.REWARD_FAILED, None)
    assert "no log parser 'parse_log_of_mine'; it has parse_log_ant" in str(episode.error)
    assert episode.steps == ()


def test_rows_are_refused_for_the_repositories_that_the_official_specs_lack(project: Path) -> None:
    """The names in `repositories.py` are those of the release in the environment's image."""
    source = (project / "src" / "official.py").read_text()
    show = (
        "import json, sys\n"
        "official = {'__name__': 'official'}\n"
        f"exec({source!r}, official)\n"
        "official['load'](official['Path']('/opt/swebench/4'))\n"
        "print(json.dumps(list(official['of']('harness.constants').MAP_REPO_VERSION_TO_SPECS)))\n"
    )
    assert set(json.loads(docker("run", "--rm", main_image(), "python3", "-c", show))) == SPECIFIED
