"""The benchmark of environments measures what can be played, whatever else a data set has."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.errors import ConfigError
from aenv_ray.sampling import Task
from benchmarks.environments import Together, playable
from tests.unit.sampling.tasks.directories.task_directories import HARBOR, write_task

GPU = {"task.toml": "[environment]\ngpus = 1\n"}


class Env:
    """Answers every call."""

    async def call_tool(self, name: str, arguments: Any, timeout_s: float) -> None:
        """Do nothing."""


async def test_an_episode_that_fails_does_not_hold_up_the_others() -> None:
    together = Together(2)
    task = Task.model_validate({"id": "a", "reference": [{"tool": "go"}]})
    waits = asyncio.create_task(together(Env(), task))
    with pytest.raises(ConfigError, match="no reference"):
        await together(Env(), Task(id="b"))
    assert not waits.done()
    await together.count_one()
    async with asyncio.timeout(60):
        await waits


def test_tasks_that_would_be_refused_are_not_measured(tmp_path: Path) -> None:
    write_task(tmp_path / "a", HARBOR, GPU)
    with pytest.raises(ConfigError, match="1 GPU"):
        playable("terminal-bench", str(tmp_path), 5)
    write_task(tmp_path / "b", HARBOR)
    write_task(tmp_path / "c", HARBOR)
    assert [task.id for task in playable("terminal-bench", str(tmp_path), 1)] == ["b"]
