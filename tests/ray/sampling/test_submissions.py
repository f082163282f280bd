"""Tasks with a datasource, and rewards that run on an instance that the agent never reached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aenv_ray
from aenv_ray.sampling import EpisodeStatus
from tests.ray.cluster import Cluster

SOURCE = """
import os
from pathlib import Path

from aenv_ray.runtime import register_function, register_reward, register_tool

HERE = Path.cwd()
LOADED = os.environ.get("AENV_DATASOURCE", "")


@register_tool
def write(text: str) -> str:
    (HERE / "answer").write_text(text)
    return LOADED


@register_function
def hand_in(fail: bool = False) -> dict:
    if fail:
        raise OSError("nothing to hand in")
    return {"answer": (HERE / "answer").read_text(), "by": os.environ["AENV_INSTANCE_ID"]}


@register_reward
def graded(expected: str, submission: dict) -> dict:
    if submission["answer"] == "crash":
        os._exit(3)
    same = submission["by"] == os.environ["AENV_INSTANCE_ID"]
    clean = not (HERE / "answer").exists()
    right = submission["answer"] == expected == LOADED
    return {"score": float(right), "fresh": clean and not same}
"""


def test_a_reward_with_a_submission_runs_on_a_new_instance(
    tmp_path: Path, cluster: Cluster
) -> None:
    """D19. Each task has the datasource that it names, on both of its instances."""
    project = tmp_path / "graded"
    (project / "src").mkdir(parents=True)
    (project / "src" / "graded.py").write_text(SOURCE)
    (project / "config.json").write_text(
        json.dumps({"name": "graded", "deployConfig": {"network": "none"}})
    )

    async def act(env: Any, task: Any) -> str:
        return str((await env.call_tool("write", {"text": task.says})).data)

    def task(name: str, says: str, **more: Any) -> dict[str, Any]:
        return {
            "id": f"{name}-{says}",
            "says": says,
            "datasource": name,
            "submission": {"function": "hand_in", **more},
            "reward": {"arguments": {"expected": name}, "timeout_s": 30},
        }

    tasks = [
        task("red", "red"),
        task("blue", "blue"),
        task("red", "blue"),
        task("red", "crash"),
        task("blue", "none", arguments={"fail": True}),
    ]
    sampling = aenv_ray.sample(project, act, tasks, concurrency=3, samples_per_task=2)
    summary = sampling.run()
    assert summary.infra_failed == 0
    for episode in sampling.episodes:
        assert episode.output in (None, episode.task_id.partition("-")[0])
        match episode.task_id:
            case "red-crash":
                assert (episode.status, episode.reward) == (EpisodeStatus.DIED_INSIDE, 0.0)
            case "blue-none":
                assert (episode.status, episode.reward) == (EpisodeStatus.REWARD_FAILED, 0.0)
            case name:
                assert episode.reward == float(name in {"red-red", "blue-blue"})
                assert episode.reward_detail["fresh"]
    assert cluster.sandboxes() == []


SEEDED = """
from aenv_ray.runtime import current_call, register_function, register_reward, register_tool


@register_tool
def drawn() -> list[int | None]:
    return [current_call().seed]


@register_function
def hand_in() -> int | None:
    return current_call().seed


@register_reward
def graded(submission: int | None) -> float:
    seeds = {submission, current_call().seed}
    return float(seeds.pop() or 0.0) if len(seeds) == 1 else -1.0
"""


def test_an_environment_without_a_reset_gets_the_seed_of_each_task(
    tmp_path: Path, cluster: Cluster
) -> None:
    """In every call, and on the instance of the reward."""
    project = tmp_path / "seeded"
    (project / "src").mkdir(parents=True)
    (project / "src" / "seeded.py").write_text(SEEDED)
    (project / "config.json").write_text(json.dumps({"name": "seeded"}))

    async def act(env: Any, task: Any) -> Any:
        return (await env.call_tool("drawn")).data

    given = [None, 0, 7, 2**70]
    tasks = [
        {"id": f"t{n}", "seed": seed, "submission": {"function": "hand_in"}}
        for n, seed in enumerate(given)
    ]
    sampling = aenv_ray.sample(project, act, tasks, concurrency=2)
    sampling.run()
    episodes = sorted(sampling.episodes, key=lambda one: one.index)
    assert [(e.seed, e.output, e.reward) for e in episodes] == [
        (seed, [seed], float(seed or 0)) for seed in given
    ]
