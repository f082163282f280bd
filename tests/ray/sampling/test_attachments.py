"""Large observations: out of the records, and within reach during the run and after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray import trajectories
from aenv_ray.sampling import Task
from tests.ray.cluster import Cluster

SOURCE = """
from aenv_ray.runtime import register_tool


@register_tool
def look(at: str) -> str:
    return at * 30_000
"""


TOOLS = [{"type": "function", "function": {"name": "look"}}]


async def _look(env: Any, task: Task) -> None:
    env.record_tools(TOOLS)
    await env.call_tool("look", {"at": task.id})


@pytest.mark.parametrize("runners", ["driver", "nodes"])
def test_the_driver_can_read_attachments(tmp_path: Path, cluster: Cluster, runners: Any) -> None:
    """In the object store without an output; otherwise in files."""
    del cluster
    project = tmp_path / "large"
    (project / "src").mkdir(parents=True)
    (project / "src" / "large.py").write_text(SOURCE)
    (project / "config.json").write_text(
        json.dumps({"name": "large", "deployConfig": {"network": "none"}})
    )
    tasks = [{"id": name, "reward": None} for name in ("a", "b", "a")]
    for out in (None, tmp_path / "run1.jsonl"):
        sampling = aenv_ray.sample(project, _look, tasks, runners=runners, out=out)
        summary = sampling.run()
        assert summary.infra_failed == 0
        for episode in sampling.episodes:
            (step,) = episode.steps
            (found,) = step.attachments
            assert step.text.endswith("[truncated: 30000 characters]")
            assert sampling.attachment(found) == episode.task_id.encode() * 30_000
            assert episode.tools is not None
            assert json.loads(sampling.attachment(episode.tools)) == TOOLS
            assert not episode.contents
    assert len(list((tmp_path / "attachments").iterdir())) == 3
    read = trajectories.read(tmp_path / "run1.jsonl")
    assert read.attachment(read[1].steps[0].attachments[0]) == b"b" * 30_000
