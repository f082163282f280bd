"""The schema of episodes: what a record holds, and that older records are read."""

from __future__ import annotations

from datetime import UTC, datetime

from aenv_ray.trajectories.schema import Episode, EpisodeStatus, Task, recordable_task


def test_a_task_is_recorded_with_values_that_json_lacks_as_text() -> None:
    when = datetime(2024, 1, 1, tzinfo=UTC)
    task = Task.model_validate({"id": "a", "when": when, "gold": object(), "raw": b"\xff"})
    recorded = recordable_task(task)
    assert recorded.id == "a"
    episode = Episode(
        index=0, task_id="a", status=EpisodeStatus.COMPLETED, reward=1.0, task=recorded
    )
    written = episode.model_dump_json()
    read = Episode.model_validate_json(written)
    assert read.model_dump_json() == written
    assert read.task is not None
    assert read.task.model_extra is not None
    assert read.task.model_extra["when"] == "2024-01-01T00:00:00Z"
    assert read.task.model_extra["raw"] == "b'\\xff'"


def test_an_ordinary_task_is_recorded_as_it_is() -> None:
    task = Task(id="a", instruction="write hello")
    assert recordable_task(task) is task


def test_a_record_of_an_earlier_version_is_read() -> None:
    old = '{"index": 3, "task_id": "a", "status": "completed", "reward": 1.0, "steps": []}'
    episode = Episode.model_validate_json(old)
    assert (episode.index, episode.group, episode.phases, episode.task) == (3, None, {}, None)
