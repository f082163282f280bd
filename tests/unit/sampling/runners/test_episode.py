"""Tasks and rewards of episodes: what is malformed is named, and no reward is made up."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.errors import ConfigError, FunctionFailed
from aenv_ray.sampling import Task, load_tasks
from aenv_ray.sampling.sampler import sample
from aenv_ray.trajectories.schema import reward_number


def task_file(directory: Path, *lines: str) -> Path:
    path = directory / "tasks.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_a_file_has_one_task_on_each_line(tmp_path: Path) -> None:
    full = {
        "id": "b",
        "instruction": "do it",
        "setup": {"function": "prepare", "arguments": {"n": 1}},
        "reward": {"name": "score"},
        "reference": [{"tool": "echo", "arguments": {}}],
        "difficulty": "hard",
    }
    path = task_file(tmp_path, '{"id": "a"}', "", json.dumps(full), "  ")
    first, second = load_tasks(path)
    assert load_tasks(str(path)) == [first, second]
    assert first.setup is None
    assert first.reward is not None, "without a word, the default reward judges"
    assert first.reward.name is None
    assert second.setup is not None
    assert second.setup.function == "prepare"
    assert second.model_extra == {"difficulty": "hard"}


def test_a_task_may_have_no_reward(tmp_path: Path) -> None:
    (task,) = load_tasks(task_file(tmp_path, '{"id": "a", "reward": null}'))
    assert task.reward is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json}", "Expecting property name"),
        ("{}", "id: Field required"),
        ('{"id": 3}', "id: "),
        ("[]", "line 3"),
        ('{"id": "a", "setup": {"func": "x"}}', "setup.func: Extra inputs"),
        ('{"id": "a", "reference": [{"arguments": {}}]}', "reference.0.tool: Field required"),
    ],
)
def test_a_malformed_task_is_reported_with_its_line(tmp_path: Path, line: str, words: str) -> None:
    path = task_file(tmp_path, '{"id": "a"}', "", line)
    with pytest.raises(ConfigError) as caught:
        load_tasks(path)
    assert f"{path}, line 3: " in caught.value.message
    assert words in caught.value.message


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, words in (("nothing", "there is no task file"), ("binary", "cannot be read")):
        with pytest.raises(ConfigError, match=words):
            load_tasks(tmp_path / name)


def test_objects_are_tasks_too() -> None:
    task = Task(id="a")
    assert load_tasks([task, {"id": "b"}]) == [task, Task(id="b")]
    with pytest.raises(ConfigError, match="task 1: id: Field required"):
        load_tasks([task, {"name": "b"}])


@pytest.mark.parametrize(
    ("detail", "number"),
    [
        (0.5, 0.5),
        (1, 1.0),
        (True, 1.0),
        (False, 0.0),
        ({"score": 0.25}, 0.25),
        ({"reward": 2}, 2.0),
        ({"total_reward": -1.0}, -1.0),
        ({"total_reward": 3, "reward": 2, "score": 1}, 1.0),
    ],
)
def test_a_reward_is_a_number_or_contains_one(detail: Any, number: float) -> None:
    found = reward_number(detail)
    assert (found, type(found)) == (number, float)


@pytest.mark.parametrize(
    "detail",
    [
        None,
        "1.0",
        "NaN",
        [],
        [1.0],
        {},
        {"points": 1},
        {"score": None},
        {"score": "1"},
        {"score": {"score": 1}},
        math.nan,
        math.inf,
        {"score": math.nan},
    ],
)
def test_a_result_without_a_number_is_not_a_reward(detail: Any) -> None:
    """Invariant 2: better no reward than a made-up one; a zero least of all."""
    with pytest.raises(FunctionFailed, match="no finite number") as caught:
        reward_number(detail)
    assert caught.value.hint


def test_a_huge_reward_detail_is_truncated_in_the_error() -> None:
    with pytest.raises(FunctionFailed) as caught:
        reward_number("x" * 10_000)
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("concurrency", [0, -1])
def test_a_sampling_needs_at_least_one_instance(concurrency: int) -> None:
    with pytest.raises(ConfigError, match="concurrency"):
        sample("mini-terminal", lambda env, task: None, [], concurrency=concurrency)


def test_nothing_runs_before_a_sampling_is_iterated() -> None:
    sampling = sample("no-such-environment", lambda env, task: None, [{"id": "a"}])
    assert (sampling.total, sampling.episodes) == (1, [])
    assert sampling.summary().rollouts == 0
