"""Episodes are on the disk as they finish; a full disk ends the writing and not the run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aenv_ray.errors import ConfigError
from aenv_ray.sampling.episode import Episode, EpisodeStatus
from aenv_ray.sampling.episode_file import EpisodeFile


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
        f"{file.failure.message}; the run goes on"
    ]


def test_a_file_that_cannot_be_opened_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        EpisodeFile(tmp_path)
