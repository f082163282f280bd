"""Data sets of tasks: small ones that are made here, or the real ones that are given.

``pytest tests/ray/envs/test_given_tasks.py --tasks code=HumanEval.jsonl.gz --tasks-limit 164``
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pytest

import aenv_ray
from aenv_ray.project.config import DeployChanges
from aenv_ray.sampling import EpisodeStatus, Task, tasks_of
from tests.contract.docker.docker_node import base_image
from tests.contract.docker.task_images import HARBOR_TEST, TEST_OUTPUTS, task_image
from tests.ray.cluster import Cluster
from tests.ray.envs.swe_repositories import LEDGER, main_image, task_images
from tests.ray.envs.test_attacks import ATTACKS, Attacker
from tests.ray.envs.test_code import PROBLEM
from tests.unit.sampling.tasks.directories.task_directories import HARBOR, write_task

IN_CONTAINERS: Final = {"swebench": main_image, "terminal-bench": base_image}
"""What makes the image of the environment's own code."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = metafunc.config.getoption("--tasks")
    limit_s = 7200 if given else 400
    metafunc.parametrize(
        "source",
        [
            pytest.param(
                one,
                marks=[
                    pytest.mark.timeout(limit_s),
                    *([pytest.mark.docker] if one.partition("=")[0] in IN_CONTAINERS else []),
                ],
            )
            for one in given or ["code", *IN_CONTAINERS]
        ],
    )


def made_for(name: str, directory: Path) -> Path:
    """Return a data set with one task for an environment."""
    rows = directory / "rows.jsonl"
    if name == "code":
        rows.write_text(json.dumps(PROBLEM))
    elif name == "swebench":
        rows.write_text(json.dumps(task_images()[LEDGER.name]))
    else:
        changes = {
            "environment/Dockerfile": f"FROM {task_image()}\n",
            "tests/test_outputs.py": TEST_OUTPUTS,
            "tests/test.sh": HARBOR_TEST,
        }
        write_task(directory / "sum", HARBOR, changes)
        return directory
    return rows


def test_references_earn_all_and_doing_nothing_or_attacking_earns_nothing(
    source: str, tmp_path: Path, cluster: Cluster, request: pytest.FixtureRequest
) -> None:
    del cluster
    name, _, path = source.partition("=")
    found = tasks_of(name, path or str(made_for(name, tmp_path)), {}, {})
    playable = (task for task in found if task.reference and not task.unsupported)
    tasks = list(islice(playable, request.config.getoption("--tasks-limit")))
    assert tasks, "none has a reference, and can be played here"
    options: dict[str, Any] = {"concurrency": 2}
    if make_image := IN_CONTAINERS.get(name):
        options["changes"] = DeployChanges(image=make_image())
    attacker = Attacker(name, ATTACKS["kills the grader"])
    for policy, reward in (("reference", 1.0), ("null", 0.0), (attacker, 0.0)):
        assert wrong(name, policy, tasks, reward, **options) == {}, policy


def wrong(
    name: str, policy: Any, tasks: list[Task], reward: float, **options: Any
) -> dict[str, Any]:
    """Return what is known of the episodes that do not end with a reward."""
    sampling = aenv_ray.sample(name, policy, tasks, runners="driver", **options)
    sampling.run()
    assert len(sampling.episodes) == len(tasks)
    return {
        one.task_id: (one.status, one.reward, one.error, one.reward_detail)
        for one in sampling.episodes
        if one.reward != reward or (policy == "reference" and one.status != EpisodeStatus.COMPLETED)
    }
