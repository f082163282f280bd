"""The environment reasoning-gym with its package, which is installed once for all tests."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import ray

import aenv_ray
from aenv_ray.errors import FunctionFailed
from aenv_ray.sampling import EpisodeStatus, Task, environment_tasks, sample
from aenv_ray.testing.environment_check import check_environment
from tests.conftest import require
from tests.ray.cluster import Cluster

NAME = "reasoning-gym"
SETS = "isomorphic_strings,n_queens,countdown,prime_factorization"
VARIABLES = {"REASONING_GYM_DATASETS": SETS, "REASONING_GYM_COUNT": "2", "REASONING_GYM_SEED": "3"}
CODE = (
    "__import__('os')._exit(0)",
    "exec('import data_sets; data_sets.DataSet.score = lambda *_: 1.0')",
    "().__class__.__base__.__subclasses__()",
    "1.0",
    "9" * 50_000,
)


def compiler_lack() -> str:
    """Return why a package without wheels cannot be built here; "" if it can."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    header = Path(sysconfig.get_path("include"), "Python.h")
    is_there = shutil.which(compiler) is not None and header.is_file()
    return "" if is_there else f"{compiler} and {header} build a package without wheels"


@pytest.fixture(scope="module")
def tasks(cluster: Cluster) -> list[Task]:
    del cluster
    require("compiler", not compiler_lack(), compiler_lack())
    return environment_tasks(NAME, VARIABLES)


class Attacks:
    """Submits code, regardless of the question."""

    async def __call__(self, env: Any, task: Task) -> None:
        await env.call_tool("submit_answer", {"answer": CODE[int(task.id.rpartition("/")[2])]})


@pytest.mark.timeout(400)  # the first test waits until the package is installed
def test_solutions_earn_the_reward_and_nothing_and_code_do_not(tasks: list[Task]) -> None:
    """D19: the verifiers score the package's solutions; an answer with code is only wrong."""
    assert len(tasks) == 8
    assert tasks[0].id == "isomorphic_strings-3-0"
    assert sample(NAME, "reference", tasks, concurrency=2).run().reward_mean == 1.0
    assert sample(NAME, "null", tasks, concurrency=2).run().reward_mean == 0.0
    attacked = [
        task.model_copy(update={"id": f"{task.id}/{number}"})
        for task in tasks[::2]
        for number in range(len(CODE))
    ]
    sampling = sample(NAME, Attacks(), attacked, concurrency=2)
    sampling.run()
    assert len(sampling.episodes) == len(attacked)
    for episode in sampling.episodes:
        assert episode.status is EpisodeStatus.COMPLETED
        # What the package gives for any wrong answer to countdown.
        assert episode.reward <= (0.05 if "countdown" in episode.task_id else 0.0)
    assert {"reset"} < {episode.start_mode for episode in sampling.episodes}


def test_tasks_of_a_file_are_generated_and_wrong_ones_are_void(tasks: list[Task]) -> None:
    del tasks
    rows = [
        {"id": "good", "dataset": "chain_sum", "seed": 5},
        {"id": "typo", "dataset": "chainsum"},
        {"id": "config", "dataset": "chain_sum", "config": {"min_terms": -1}},
    ]

    async def act(env: Any, task: Task) -> str:
        question = await env.call_tool("get_question", {})
        await env.call_tool("submit_answer", {"answer": "no number"})
        return str(question.data)

    sampling = sample(NAME, act, rows, concurrency=1, runners="driver")
    ended = {episode.task_id: episode for episode in sampling}
    assert ended["good"].status is EpisodeStatus.COMPLETED
    assert "+" in ended["good"].output or "-" in ended["good"].output
    for name, reason in (("typo", "did you mean chain_sum"), ("config", "min_terms")):
        assert (ended[name].status, ended[name].reward) == (EpisodeStatus.REWARD_FAILED, None)
        assert reason in (ended[name].error or "")


def test_the_environment_has_no_problems_and_names_unknown_data_sets(tasks: list[Task]) -> None:
    del tasks
    assert check_environment(Path(aenv_ray.__file__).parent / "envs" / "reasoning_gym") == []
    env = aenv_ray.create(NAME, actor="shared")
    try:
        made = ray.get(env.call_function.remote("generate_tasks", {"dataset": "maze", "count": 1}))
        assert [task["id"] for task in made] == ["maze-42-0"]
        with pytest.raises(FunctionFailed, match="unknown data set 'mazes'; did you mean maze"):
            ray.get(env.call_function.remote("generate_tasks", {"dataset": "mazes"}))
    finally:
        ray.get(env.release.remote())
