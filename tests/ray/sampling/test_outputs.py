"""Samplings whose output vanishes, is full, is in use, or is of another environment."""

from __future__ import annotations

import json
import logging
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray.errors import ConfigError
from aenv_ray.sampling import Task
from aenv_ray.trajectories import files, output_lock, read
from tests.ray.cluster import Cluster

SOURCE = """
from aenv_ray.runtime import register_tool


@register_tool
def look(at: str) -> str:
    return at * 30_000
"""
TASKS = [{"id": f"t{n}", "reward": None} for n in range(4)]


async def _look(env: Any, task: Task) -> None:
    await env.call_tool("look", {"at": task.id})


@pytest.mark.parametrize("name", ["run.jsonl", "run", "run.parquet"])
def test_a_run_whose_output_vanishes_ends_with_an_error(
    cluster: Cluster,
    project: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """Invariant 12: later episodes are there, and the number of those that are lost is said."""
    del cluster
    monkeypatch.setattr(files, "_LOOK_EVERY_S", 0.0)
    out = tmp_path / name
    sampling = aenv_ray.sample(project(SOURCE), _look, TASKS, concurrency=1, out=out)

    def run() -> None:
        for episode in sampling:
            if episode.index == 1:
                shutil.rmtree(out) if out.is_dir() else out.unlink()

    with pytest.raises(ConfigError, match="was removed, moved or replaced") as caught:
        run()
    assert caught.value is sampling.output_failure
    lost = int(caught.value.message.partition("written: ")[2].split()[0])
    found = [episode.index for episode in sampling.episodes]
    assert lost >= 2  # one more if it was being written when the output vanished
    assert found == list(range(lost, 4))
    assert sampling.summary().rollouts == 4
    assert not out.exists()


def test_a_run_has_all_episodes_when_the_disk_is_full(
    cluster: Cluster, project: Callable[..., Path], tmp_path: Path
) -> None:
    """With their attachments: those of the files, and those that are in no file."""
    del cluster
    out = tmp_path / "run.jsonl"
    sampling = aenv_ray.sample(project(SOURCE), _look, TASKS, concurrency=1, out=out)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def run() -> None:
        for episode in sampling:
            if episode.index == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (out.stat().st_size + 10, before[1]))

    try:
        with pytest.raises(ConfigError, match=r"run\.jsonl cannot be written: File too"):
            run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [episode.index for episode in sampling.episodes] == [0, 1, 2, 3]
    for episode in sampling.episodes:
        (found,) = episode.steps[0].attachments
        assert sampling.attachment(found) == episode.task_id.encode() * 30_000
    rest = aenv_ray.sample(project(SOURCE), _look, TASKS, out=out, resume=True)
    assert rest.kept < 4
    assert rest.run().rollouts == 4
    assert len(read(out)) == 4


@pytest.mark.parametrize("name", ["run.jsonl", "run"])
def test_a_second_run_does_not_write_to_the_output_of_the_first(
    cluster: Cluster,
    project: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """A session was lost and its run lives on, while the user resumes it in another one."""
    del cluster
    monkeypatch.setattr(output_lock, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(output_lock, "_ENDING_S", 0.0)

    def sampling(**options: Any) -> Any:
        return aenv_ray.sample(
            project(SOURCE), _look, TASKS, concurrency=1, out=tmp_path / name, **options
        )

    first, stale = sampling(), sampling()
    for episode in first:
        if episode.index == 1:
            for options in ({"resume": True}, {"overwrite": True}):
                with pytest.raises(ConfigError, match="by another sampling"):
                    sampling(**options).run()
    assert len(first.episodes) == 4
    with pytest.raises(ConfigError, match="has changed since it was read"):
        stale.run()
    again = sampling(resume=True)
    assert (again.kept, again.run().rollouts) == (4, 4)
    assert first.episodes == again.episodes


def test_a_resumed_run_says_that_its_environment_has_changed(
    cluster: Cluster,
    project: Callable[..., Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    del cluster
    out = tmp_path / "run.jsonl"
    aenv_ray.sample(project(SOURCE), _look, TASKS[:2], out=out).run()
    (digest,) = {json.loads(line)["environment_digest"] for line in out.read_text().splitlines()}

    def warnings() -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "aenv_ray"):
            aenv_ray.sample(environment, _look, TASKS[:2], out=out, resume=True).run()
        return [message for message in caplog.messages if "have changed since" in message]

    environment = project(SOURCE)
    assert warnings() == []
    environment = project(SOURCE.replace("30_000", "40_000"))
    (message,) = warnings()
    assert "2 of the episodes that are kept" in message
    assert digest in message
