"""What a sampling refuses before it starts anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import aenv_ray
from aenv_ray.errors import ConfigError

ENVIRONMENT = "mini-terminal@1.0.0"


async def act(env: Any, task: Any) -> None:
    raise AssertionError("not reached")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"id": "a"}\n{"id": \n', "line 2"),
        ('{"id": "a"}\n\n{"instruction": "b"}\n', "line 3: id"),
        ('{"id": "a", "setup": {"func": "x"}}\n', "line 1: setup.func"),
        ("[]\n", "line 1"),
    ],
)
def test_a_malformed_task_file_names_the_line(tmp_path: Path, text: str, says: str) -> None:
    """`ConfigError` before anything starts."""
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
        aenv_ray.sample(ENVIRONMENT, act, path)


def test_invalid_options_are_refused_immediately(tmp_path: Path) -> None:
    """Missing files, no concurrency and unknown options raise in `sample`, before anything runs."""
    with pytest.raises(ConfigError, match=r"no-file\.jsonl"):
        aenv_ray.sample(ENVIRONMENT, act, tmp_path / "no-file.jsonl")
    with pytest.raises(ConfigError, match="concurrency"):
        aenv_ray.sample(ENVIRONMENT, act, [], concurrency=0)
    with pytest.raises(ConfigError, match="reward_on_death"):
        aenv_ray.sample(ENVIRONMENT, act, [], reward_on_death=float("nan"))
    with pytest.raises(ConfigError, match="actor"):
        aenv_ray.sample(ENVIRONMENT, act, [], actor="lonely")
