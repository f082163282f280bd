"""Whatever an agent writes, its episode can be recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import from_json, to_json

from aenv_ray.trajectories.files import EpisodeFile
from aenv_ray.trajectories.reading import read
from aenv_ray.trajectories.schema import Episode, EpisodeStatus, Step, Task, recordable_task
from aenv_ray.trajectories.storable import storable

LONE = "a\ud800b"
DEEP: Any = "x"
for _ in range(50_000):
    DEEP = {"k": DEEP}
LESS_DEEP: Any = "x"
for _ in range(220):  # is written, and not read again
    LESS_DEEP = {"k": LESS_DEEP}


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (
            {"text": LONE, LONE: [LONE, 1, None]},
            {"text": "a\ufffdb", "a\ufffdb": ["a\ufffdb", 1, None]},
        ),
        ({"text": "ü\U0001f600"}, {"text": "ü\U0001f600"}),
        (DEEP, {"": "[nested too deeply to be recorded]"}),
        (LESS_DEEP, {"": "[nested too deeply to be recorded]"}),
        ({"many": [[n] for n in range(500)]}, {"many": [[n] for n in range(500)]}),
        ({"n": {1j: b"\xff"}}, {"n": {"1j": "b'\\xff'"}}),
    ],
    ids=["lone surrogates", "text", "deep", "less deep", "wide", "not JSON"],
)
def test_an_episode_is_recorded_whatever_its_agent_wrote(
    value: dict[str, Any], stored: dict[str, Any]
) -> None:
    """Otherwise one agent would end the run of all."""
    step = Step(tool=LONE, arguments=value, text=LONE, is_error=False, duration_s=0.0)
    episode = Episode(
        index=0,
        task_id="t",
        status=EpisodeStatus.COMPLETED,
        reward=1.0,
        reward_detail=value,
        steps=(step,),
        messages=(value,),
        output=value,
        error=LONE,
    )
    read = Episode.model_validate(json.loads(episode.model_dump_json()))
    assert Episode.model_validate_json(episode.model_dump_json()) == read
    assert read.steps[0].arguments == read.output == read.reward_detail == stored
    assert read.messages == (stored,)
    assert (read.steps[0].text, read.steps[0].tool, read.error) == ("a\ufffdb",) * 3


@pytest.mark.parametrize(
    "task",
    [
        {"id": LONE, "instruction": LONE, "more": [LONE]},
        {"id": "a", "more": LESS_DEEP},
        {"id": "a", "reward": {"arguments": LESS_DEEP}, "setup": {"arguments": {"a": DEEP}}},
        {"id": "a", "reference": [{"tool": "t", "arguments": {"text": LONE}}]},
        {"id": "a", "images": [{"bytes": b"\xff\xd8", "path": object()}]},
    ],
    ids=["lone surrogates", "deep", "deep arguments", "reference", "images"],
)
def test_an_episode_is_recorded_whatever_its_task_holds(
    task: dict[str, Any], tmp_path: Path
) -> None:
    """Otherwise one task would end the run of all, and the run could not be resumed."""
    given = Task.model_validate(task)
    episode = Episode(
        index=0,
        task_id=given.id,
        status=EpisodeStatus.COMPLETED,
        reward=1.0,
        group=f"{LONE}/0",
        policy=LONE,
        task=recordable_task(given),
    )
    file = EpisodeFile(tmp_path / "run.jsonl")
    file.write(episode)
    file.close()
    assert file.failure is None
    (found,) = read(tmp_path / "run.jsonl")
    assert found == episode
    assert found.task_id == given.id, "a resumed run finds its task"


def test_a_record_that_json_cannot_represent_is_a_failure_of_the_output(tmp_path: Path) -> None:
    file = EpisodeFile(tmp_path / "run.jsonl")
    file.write(
        Episode(index=7, task_id="t", status=EpisodeStatus.COMPLETED, reward=None, instance_id=LONE)
    )
    file.close()
    assert file.failure is not None
    assert "episode 7 of task 't' cannot be written" in file.failure.message
    assert (tmp_path / "run.jsonl").read_bytes() == b""


def test_keys_that_are_no_texts_become_what_json_makes_of_them() -> None:
    deep = [[1] for _ in range(160)]
    value = {(0, 0): deep, 1: deep, None: deep, frozenset({2}): object()}
    cleaned = storable(value)
    assert list(cleaned)[:3] == list(from_json(to_json({(0, 0): 0, 1: 0, None: 0})))
    assert from_json(to_json(cleaned)) == cleaned
