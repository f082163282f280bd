"""Who writes a task, a benchmark or a record that others play wants files of their machine.

A task can bring files of the node that plays it: they are sent into its sandbox, or built into its
image, where its author's code reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.errors import ConfigError
from aenv_ray.sampling import Episode, EpisodeStatus, Task, environment_tasks, load_tasks
from aenv_ray.sampling.replay import replay
from aenv_ray.sampling.synthesis import DropReason, Synthesizer
from aenv_ray.sampling.tasks import feed
from aenv_ray.sampling.tasks.directories import TaskDirectories
from aenv_ray.sampling.tasks.directories.fields import FormatOptions
from tests.ray.cluster import Cluster
from tests.unit.sampling.tasks.directories.task_directories import (
    HARBOR,
    TERMINAL_BENCH,
    write_task,
)

BRINGS = r"brings .* of this machine"
HOSTILE: list[dict[str, Any]] = [
    {"setup": {"function": "f", "archives": {"x": ["PRIVATE"]}}},
    {"reward": {"archives": {"x": ["PRIVATE/key"]}}},
    {"submission": {"archives": {"x": ["PRIVATE"]}}},
    {"reference": [{"tool": "t", "archives": {"x": ["PRIVATE"]}}]},
    {"wrong": [{"tool": "t", "archives": {"x": ["PRIVATE"]}}]},
    {"instance": {"build": {"context": "PRIVATE"}}},
    {"instance": {"build": {"context": "ALLOWED", "dockerfile": "../private/key"}}},
]


SOURCE = """
from aenv_ray.runtime import register_tasks, register_tool


@register_tool
def act() -> int:
    return 1


@register_tasks
def tasks() -> list[dict]:
    return [{task!r}]
"""


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """Return a directory with a key, beside one that may be read."""
    (tmp_path / "allowed").mkdir()
    directory = tmp_path / "private"
    directory.mkdir()
    (directory / "key").write_text("secret")
    return directory


def task_of(fields: dict[str, Any], private: Path) -> dict[str, Any]:
    allowed = str(private.parent / "allowed")
    text = json.dumps({"id": "t", **fields}).replace("PRIVATE", str(private))
    return dict(json.loads(text.replace("ALLOWED", allowed)))


@pytest.mark.parametrize("fields", HOSTILE)
def test_a_task_in_a_file_of_an_environment_names_no_file_of_the_node(
    fields: dict[str, Any], private: Path, tmp_path: Path
) -> None:
    """Invariant 13: the file is its publisher's."""
    root = tmp_path / "published"
    (root / "src").mkdir(parents=True)
    (root / "config.json").write_text('{"name": "published"}')
    (root / "tasks.jsonl").write_text(json.dumps(task_of(fields, private)))
    with pytest.raises(ConfigError, match=BRINGS) as raised:
        environment_tasks(root)
    assert "--tasks" in str(raised.value.hint)


@pytest.mark.ray
def test_a_task_that_code_of_an_environment_returns_names_no_file_of_the_node(
    cluster: Cluster, private: Path, tmp_path: Path
) -> None:
    """Invariant 13: it comes from a sandbox."""
    del cluster
    root = tmp_path / "published"
    (root / "src").mkdir(parents=True)
    config = {"name": "published", "deployConfig": {"network": "none"}}
    (root / "config.json").write_text(json.dumps(config))
    task = task_of(HOSTILE[0], private)
    source = SOURCE.format(task=task)
    (root / "src" / "tools.py").write_text(source)
    with pytest.raises(ConfigError, match=BRINGS):
        environment_tasks(root)


@pytest.mark.parametrize("fields", HOSTILE)
def test_a_row_of_a_data_set_of_the_hub_names_no_file_of_the_node(
    fields: dict[str, Any], private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 13: anyone may publish one."""
    monkeypatch.setattr(feed, "from_hugging_face", lambda _: [task_of(fields, private)])
    with pytest.raises(ConfigError, match=BRINGS):
        load_tasks("hf:someone/tasks")
    assert load_tasks([task_of(fields, private)])[0].id == "t", "but one that the user wrote does"


def a_record(task: dict[str, Any], environment: str = "published@1.0.0") -> Episode:
    return Episode(
        index=0, task_id="t", status=EpisodeStatus.COMPLETED, reward=1.0,
        environment=environment, task=Task.model_validate(task),
    )  # fmt: skip


@pytest.mark.parametrize("fields", HOSTILE)
def test_a_record_of_others_is_replayed_with_no_file_that_was_not_allowed(
    fields: dict[str, Any], private: Path
) -> None:
    """Invariant 13: it also names the environment, whose code would read them."""
    record = a_record(task_of(fields, private))
    with pytest.raises(ConfigError, match=BRINGS) as raised:
        replay([record])
    assert "--files" in str(raised.value.hint)
    with pytest.raises(ConfigError, match=r"may bring: .*/allowed"):
        replay([record], files=[private.parent / "allowed"])


@pytest.mark.parametrize("environment", ["../private", "/tmp/theirs", "./theirs", "a@../../b"])
def test_a_record_names_no_project_of_this_machine(environment: str) -> None:
    """Invariant 13: what is played is what was published."""
    with pytest.raises(ConfigError, match="invalid"):
        replay([a_record({"id": "t"}, environment)])


def test_a_proposal_of_a_model_names_no_file_of_the_node(private: Path) -> None:
    """Invariant 13: its text becomes a task."""
    found = Synthesizer("published").check([task_of(fields, private) for fields in HOSTILE])
    assert found.counts() == {DropReason.INVALID: len(HOSTILE)}
    assert all("of this machine" in one.detail for one in found.dropped)


def _link(path: str) -> Callable[[Path, Path], None]:
    def plant(task: Path, private: Path) -> None:
        target = task / path
        if target.is_dir():
            for file in target.iterdir():
                file.rename(private / file.name)  # the format requires them
            target.rmdir()
        else:
            target.unlink()
        is_directory = path in ("tests", "environment", "solution")
        target.symlink_to(private if is_directory else private / "key")

    return plant


def _context(path: str) -> Callable[[Path, Path], None]:
    def plant(task: Path, private: Path) -> None:
        own = (task / path).parent.relative_to(private.parent)
        build = {"context": "../" * len(own.parts), "dockerfile": f"{own}/Dockerfile"}
        (task / path).write_text(json.dumps({"services": {"main": {"build": build}}}))

    return plant


@pytest.mark.parametrize(
    ("base", "plant"),
    [
        (HARBOR, _link("tests")),
        (HARBOR, _link("environment")),
        (HARBOR, _link("environment/Dockerfile")),
        (HARBOR, _link("solution")),
        (HARBOR, _context("environment/docker-compose.yaml")),
        (TERMINAL_BENCH, _link("tests")),
        (TERMINAL_BENCH, _link("run-tests.sh")),
        (TERMINAL_BENCH, _link("solution.sh")),
        (TERMINAL_BENCH, _context("docker-compose.yaml")),
    ],
)
def test_a_task_directory_leads_to_no_file_outside(
    base: dict[str, str], plant: Callable[[Path, Path], None], private: Path
) -> None:
    """Invariant 13: benchmarks are downloaded, with symbolic links and compose files."""
    root = private.parent / "tasks"
    task = write_task(root / "sum", base)
    plant(task, private)
    refused = TaskDirectories.below(root, FormatOptions())[0]
    with pytest.raises(AssertionError, match=r"of this machine|outside of the task's directory"):
        raise AssertionError(refused.unsupported)
    assert refused == Task(id="sum", reward=None, unsupported=refused.unsupported)
