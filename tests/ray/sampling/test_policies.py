"""Policies on instances: the built-in ones, and classes."""

from __future__ import annotations

from typing import Any

import pytest

import aenv_ray
from aenv_ray.sampling import Task
from tests.ray.sampling.policies import MINI, mini_tasks

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
    summary = aenv_ray.sample(MINI, policy, mini_tasks[:2], concurrency=2).run()
    assert (summary.rollouts, summary.reward_mean) == (2, mean)
