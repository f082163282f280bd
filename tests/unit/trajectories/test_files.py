"""Episodes are on the disk as they finish; a full disk ends the writing and not the run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aenv_ray.errors import ConfigError
from aenv_ray.trajectories.files import EpisodeFile
from aenv_ray.trajectories.reading import finished_episodes
from aenv_ray.trajectories.schema import Episode, EpisodeStatus, Task


def episode(index: int) -> Episode:
    return Episode(index=index, task_id="t", status=EpisodeStatus.COMPLETED, reward=1.0)


def test_a_finished_episode_can_be_read_before_the_file_is_closed(tmp_path: Path) -> None:
    file = EpisodeFile(tmp_path / "out.jsonl")
    file.write(episode(0))
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [Episode.model_validate_json(line) for line in lines] == [episode(0)]
    file.close()
    file.close()
    assert file.failure is None


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
def test_a_full_disk_is_said_once_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Invariant 12: what is lost is said, with the file's name."""
    file = EpisodeFile(Path("/dev/full"))
    for index in range(3):
        file.write(episode(index))
    file.close()
    file.close()
    assert isinstance(file.failure, ConfigError)
    assert file.failure.message.startswith("/dev/full cannot be written: No space left on device")
    assert "summary()" in str(file.failure.hint)
    assert [record.message for record in caplog.records] == [
        f"{file.failure.message}; the run continues"
    ]


def test_a_file_that_cannot_be_opened_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        EpisodeFile(tmp_path)


# --- going on with an interrupted run ------------------------------------------------------------

TASKS = [Task(id="t")] * 5


def test_what_an_interrupted_run_had_finished_is_kept(tmp_path: Path) -> None:
    """A line that was cut in the middle runs again, and so does what the infrastructure failed."""
    out = tmp_path / "out.jsonl"
    failed = episode(1).model_copy(update={"status": EpisodeStatus.INFRA_FAILED, "reward": None})
    whole = "".join(f"{one.model_dump_json()}\n" for one in (episode(3), failed, episode(0)))
    out.write_text(whole + episode(4).model_dump_json()[:30])
    kept = finished_episodes(out, TASKS)
    assert [one.index for one in kept] == [3, 0]
    file = EpisodeFile(out, kept)
    file.write(episode(1))
    file.close()
    assert [one.index for one in finished_episodes(out, TASKS)] == [3, 0, 1]
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_a_run_that_wrote_nothing_has_finished_nothing(tmp_path: Path) -> None:
    assert finished_episodes(tmp_path / "none.jsonl", TASKS) == []
    (tmp_path / "empty.jsonl").touch()
    assert finished_episodes(tmp_path / "empty.jsonl", TASKS) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no episode", "line 1: not an episode"),
        (episode(5).model_dump_json(), "episode 5 is of task 't'"),
        (episode(0).model_copy(update={"task_id": "other"}).model_dump_json(), "of task 'other'"),
    ],
)
def test_the_file_of_something_else_is_refused(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=message):
        finished_episodes(tmp_path / "out.jsonl", TASKS)
    assert (tmp_path / "out.jsonl").read_text() == f"{line}\n"
