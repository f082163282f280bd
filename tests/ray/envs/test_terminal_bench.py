"""terminal-bench by name, with tasks of both formats, in containers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray.errors import ConfigError
from aenv_ray.project.config import DeployChanges
from aenv_ray.sampling import Episode, EpisodeStatus, Task, load_tasks
from aenv_ray.sampling.policies.scripted import reference
from tests.contract.docker.docker_node import base_image
from tests.contract.docker.task_images import HARBOR_TEST, TEST_OUTPUTS, task_image
from tests.ray.cluster import Cluster
from tests.unit.sampling.tasks.directories.task_directories import (
    HARBOR,
    TERMINAL_BENCH,
    write_task,
)

pytestmark = pytest.mark.docker

ENVIRONMENT = "terminal-bench"
WAITING = "setsid sh -c 'while :; do kill -9 -1; done' >/dev/null 2>&1 </dev/null &"


async def act(env: Any, task: Any) -> str:
    """Do what the task's id says."""
    how = task.id.partition(":")[2]
    if how == "reference":
        return await reference(env, task)
    if how == "types":
        await env.call_tool("keystrokes", {"keys": "cd /app && echo 4 >sum\n", "until_idle": True})
        shown = "echo it is $LEVEL $OPENSSL_CONF $COLOUR $"
        typed = {"keys": [f"cat sum; {shown}", "?", "Enter"], "wait_s": 5, "until_idle": True}
        screen = (await env.call_tool("keystrokes", typed)).data["screen"]
        assert (await env.call_tool("capture_pane")).data["screen"] == screen
        return str(screen)
    if how == "kills":
        await env.call_tool("execute_command", {"command": f"echo 4 >sum; {WAITING}"})
    return str(how)


@pytest.fixture
def tasks(tmp_path: Path, cluster: Cluster) -> dict[str, Task]:
    """A task of each format, and one that needs several services."""
    del cluster
    recipe = f"FROM {task_image()}\nENV LEVEL=3 OPENSSL_CONF=/openssl.cnf\n"
    given = {"tests/test_outputs.py": TEST_OUTPUTS}
    offline = HARBOR["task.toml"] + "[environment]\nmemory_mb = 512\nallow_internet = false\n"
    offline += '[environment.env]\nCOLOUR = "blue"\n'
    harbor = {
        **given,
        "task.toml": offline,
        "environment/Dockerfile": recipe,
        "tests/test.sh": HARBOR_TEST.replace("pytest", "test $OPENSSL_CONF && pytest", 1),
    }
    write_task(tmp_path / "h", HARBOR, harbor)
    write_task(tmp_path / "t", TERMINAL_BENCH, {**given, "Dockerfile": recipe})
    services = {"environment/docker-compose.yaml": "services: {a: {image: x}, b: {image: y}}"}
    write_task(tmp_path / "several", HARBOR, {**harbor, **services})
    broken = {"environment/Dockerfile": f"FROM {task_image()}\nRUN echo no >&2; exit 3\n"}
    write_task(tmp_path / "broken", HARBOR, {**harbor, **broken})
    return {task.id: task for task in load_tasks(tmp_path)}


def test_tasks_of_both_formats_are_played_and_graded(tasks: dict[str, Task]) -> None:
    """Reference 1.0, doing nothing 0.0; what would kill the grader is ended before it runs."""
    played = ("h:reference", "t:reference", "t:null", "h:types", "h:kills", "several:no")
    chosen = [tasks[name[: name.index(":")]].model_copy(update={"id": name}) for name in played]
    chosen = [
        task.model_copy(update={"instance": task.instance.model_copy(update={"network": "none"})})
        for task in chosen
        if task.instance is not None
    ]
    changes = DeployChanges(image=base_image())
    run = aenv_ray.sample(ENVIRONMENT, act, chosen, concurrency=3, changes=changes)
    episodes: dict[str, Episode] = {episode.task_id: episode for episode in run}
    assert {name: one.reward for name, one in episodes.items()} == {
        "h:reference": 1.0, "t:reference": 1.0, "t:null": 0.0, "h:types": 1.0,
        "h:kills": 1.0, "several:no": None,
    }, {name: (one.error, one.reward_detail) for name, one in episodes.items()}  # fmt: skip
    assert episodes["several:no"].status is EpisodeStatus.REFUSED
    assert "several services (a, b)" in str(episodes["several:no"].error)
    assert run.summary().refused == 1
    assert "$?\n4\nit is 3 /openssl.cnf blue 0\n" in episodes["h:types"].output
    detail = episodes["t:reference"].reward_detail
    assert detail["tests"]["test_outputs.py::test_sum"] == "passed"
    null = episodes["t:null"].reward_detail
    assert null["tests"]["test_outputs.py::test_sum"] == "failed"


def test_an_image_that_cannot_be_built_fails_its_episode_alone(tasks: dict[str, Task]) -> None:
    (episode,) = aenv_ray.sample(ENVIRONMENT, "null", [tasks["broken"]], infra_retries=0)
    assert episode.status is EpisodeStatus.INFRA_FAILED
    assert "task 'broken': its image cannot be built" in str(episode.error)
    assert "no" in str(episode.error)


def test_without_tasks_the_error_says_how_to_give_them(cluster: Cluster) -> None:
    del cluster
    with pytest.raises(ConfigError, match="terminal-bench brings no tasks") as caught:
        aenv_ray.sample(ENVIRONMENT, "null")
    assert "--tasks" in str(caught.value.hint)
