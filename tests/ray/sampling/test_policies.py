"""Policies on instances: the built-in ones, and classes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import ray

import aenv_ray
from aenv_ray.errors import ConfigError
from aenv_ray.sampling import EpisodeStatus, Task, Usage
from tests.emulators.model_endpoint import completion, refusal, serving, tool_call
from tests.ray.cluster import Cluster
from tests.ray.faults import PROBE
from tests.ray.sampling.policies import MINI, WordModel, check_model_plays, mini_tasks

__all__ = ["mini_tasks"]  # a fixture


class Solves:
    """Plays the reference with what it made in its constructor."""

    def __init__(self) -> None:
        self.script = "reference"

    async def __call__(self, env: Any, task: Task) -> None:
        for step in getattr(task, self.script):
            await env.call_tool(step.tool, step.arguments)


@pytest.mark.parametrize(
    ("policy", "mean"), [("reference", 1.0), ("null", 0.0), ("random:3", 0.0), (Solves, 1.0)]
)
def test_built_in_policies_and_classes_play(
    mini_tasks: list[Task], policy: Any, mean: float
) -> None:
    """The reference earns the reward; doing nothing, or something, does not."""
    sampling = aenv_ray.sample(MINI, policy, mini_tasks[:2], concurrency=2)
    summary = sampling.run()
    assert (summary.rollouts, summary.reward_mean) == (2, mean)
    name = policy if isinstance(policy, str) else f"{__name__}:Solves"
    assert [episode.policy for episode in sampling.episodes] == [name] * 2


def test_a_failing_endpoint_never_becomes_a_reward(
    mini_tasks: list[Task], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Invariants 2 and 10: a failing endpoint scores nothing, and no record has the key."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    task = mini_tasks[0]
    (solution,) = task.reference
    out = tmp_path / "episodes.jsonl"
    call = tool_call(solution.tool, solution.arguments)
    with serving(
        completion(None, call), completion("done"), refusal(400, "bad"), refusal(500, "sk-secret")
    ) as endpoint:
        policy = aenv_ray.sampling.OpenAIPolicy("m", base_url=endpoint.url, attempts=1)
        sampling = aenv_ray.sample(
            MINI, policy, [task] * 3, concurrency=1, infra_retries=0, out=out
        )
        sampling.run()
    solved, refused, failed = sampling.episodes
    assert (solved.status, solved.reward) == (EpisodeStatus.COMPLETED, 1.0)
    assert solved.policy == failed.policy == "openai:m"
    assert solved.usage == Usage(requests=2, prompt_tokens=20, completion_tokens=10)
    roles = [message["role"] for message in solved.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert (refused.status, refused.reward) == (EpisodeStatus.POLICY_FAILED, None)
    assert (failed.status, failed.reward) == (EpisodeStatus.INFRA_FAILED, None)
    assert "endpoint_unavailable" in (failed.error or "")
    assert "sk-secret" not in out.read_text()


@pytest.mark.parametrize("method", ["chat", None], ids=["a method", "the actor"])
def test_a_model_in_a_ray_actor_plays(cluster: Cluster, method: str | None) -> None:
    del cluster
    actor = ray.remote(WordModel).options(num_cpus=0).remote()
    check_model_plays(actor if method is None else getattr(actor, method))


def test_an_environment_may_list_its_tasks_with_a_function(
    cluster: Cluster, tmp_path: Path
) -> None:
    del cluster
    project = shutil.copytree(PROBE, tmp_path / "project")
    with pytest.raises(ConfigError, match="register_tasks"):
        aenv_ray.sample(project, "null")
    (source,) = (project / "src").glob("*.py")
    source.write_text(
        source.read_text()
        + """

from aenv_ray.runtime import register_tasks


@register_tasks
def brought():
    return [{"id": f"own-{n}", "reward": None} for n in range(3)]
"""
    )
    sampling = aenv_ray.sample(project, "null")
    sampling.run()
    assert {episode.task_id for episode in sampling.episodes} == {"own-0", "own-1", "own-2"}
