"""Policies that replay what their tasks hold, and tasks."""

from __future__ import annotations

import os
from typing import Any

import pytest

import aenv_ray
from aenv_ray.project import project as projects
from aenv_ray.sampling import EpisodeStatus, Task, load_tasks
from tests.emulators.model_endpoint import tool_call
from tests.ray.cluster import Cluster
from tests.ray.faults import PROBE

MINI = "mini-terminal@1.0.0"


@pytest.fixture
def mini_tasks(cluster: Cluster) -> list[Task]:
    del cluster
    return load_tasks(projects.resolve(MINI).path / "tasks.jsonl")[:8]


def replay(script: str) -> Any:
    """Return an async policy that replays a task's script."""

    async def act(env: Any, task: Task) -> str:
        for step in getattr(task, script):
            await env.call_tool(step.tool, step.arguments)
        return script

    return act


def replay_sync(script: str) -> Any:
    """Return a sync policy that replays a task's script."""

    def act(env: Any, task: Task) -> str:
        for step in getattr(task, script):
            env.call_tool(step.tool, step.arguments)
        return script

    return act


def probe_tasks(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Return tasks of the probe project."""
    return [{"id": f"t{n}", **fields} for n in range(count)]


class WordModel:
    """Calls the tool `echo`, then answers; or does what it should not, if the task says so."""

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Any:
        assert {"echo"} <= {tool["function"]["name"] for tool in tools}
        if messages[-1]["role"] == "tool":
            return f"it said {messages[-1]['content']}"
        if messages[-1]["content"] == "exit":
            os._exit(1)
        if messages[-1]["content"] == "nonsense":
            return 7
        if messages[-1]["content"] == "raise":
            raise ValueError("no such word")
        return {"role": "assistant", "tool_calls": [tool_call("echo", {"text": "hi"})]}

    def __call__(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Any:
        return self.chat(messages, tools)


def check_model_plays(policy: Any, **options: Any) -> None:
    """Check a `WordModel` on Ray as a policy.

    Its answers are scored; what it raises is its own failure, and its death an endpoint's.
    """
    words = ("talk", "nonsense", "raise", "exit")
    tasks = [{"id": word, "instruction": word, "reward": None} for word in words]
    sampling = aenv_ray.sample(PROBE, policy, tasks, concurrency=1, infra_retries=0, **options)
    ended = {e.task_id: (e.status, e.error or "", e.output) for e in sampling}
    talked, nonsense, raised, exited = (ended[word] for word in words)
    assert talked[0] is EpisodeStatus.COMPLETED, talked
    assert talked[2] == {"stop": "answered", "turns": 2, "text": "it said hi"}
    assert raised[0] is EpisodeStatus.POLICY_FAILED, raised
    assert "no such word" in raised[1]
    for failed in (nonsense, exited):
        assert failed[0] is EpisodeStatus.INFRA_FAILED, failed
        assert failed[1].startswith("endpoint_unavailable")
