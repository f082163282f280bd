"""Policies that replay what their tasks hold, and tasks."""

from __future__ import annotations

from typing import Any

import pytest

from aenv_ray.project import project as projects
from aenv_ray.sampling import Task, load_tasks
from tests.ray.cluster import Cluster

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
