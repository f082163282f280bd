"""Episodes are on the disk as they finish; a full disk ends the writing and not the run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import aenv_ray
from aenv_ray.errors import ConfigError
from aenv_ray.trajectories import arrow
from aenv_ray.trajectories.attachments import AttachmentFiles, attachment_of
from aenv_ray.trajectories.files import EpisodeFile
from aenv_ray.trajectories.reading import finished_episodes, read
from aenv_ray.trajectories.schema import Episode, EpisodeStatus, Task
from aenv_ray.trajectories.shards import check_output, continue_output, open_output


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


# --- what a new run replaces ---------------------------------------------------------------------


def _written(out: Path) -> dict[str, bytes]:
    return {str(one.relative_to(out)): one.read_bytes() for one in out.rglob("*") if one.is_file()}


@pytest.mark.parametrize("name", ["run.jsonl", "run", "run.parquet"])
def test_a_run_replaces_an_earlier_one_only_if_told(name: str, tmp_path: Path) -> None:
    out = tmp_path / name
    check_output(out, overwrite=False)
    output = open_output(out)
    output.write(episode(0))
    output.close()
    before = _written(tmp_path)
    with pytest.raises(ConfigError, match=f"{name} already has episodes"):
        aenv_ray.sample("mini-terminal", "null", TASKS, out=out)
    with pytest.raises(ConfigError, match="exclude each other"):
        aenv_ray.sample("mini-terminal", "null", TASKS, out=out, resume=True, overwrite=True)
    aenv_ray.sample("mini-terminal", "null", TASKS, out=out, resume=True)
    aenv_ray.sample("mini-terminal", "null", TASKS, out=out, overwrite=True)
    assert _written(tmp_path) == before  # nothing runs before it is iterated
    open_output(out).close()
    assert len(read(out)) == 0


@pytest.mark.parametrize("name", ["run.jsonl", "run/driver-00000.jsonl"])
@pytest.mark.parametrize("length", [1, 5, 10, 20, 80])
def test_a_run_that_was_killed_in_its_first_line_is_resumed_and_replaced(
    length: int, name: str, tmp_path: Path
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(episode(0).model_dump_json()[:length])
    out = tmp_path / name.split("/", maxsplit=1)[0]
    check_output(out, overwrite=True)
    assert finished_episodes(out, TASKS) == []
    output = open_output(out)
    output.write(episode(0))
    output.close()
    assert list(read(out)) == [episode(0)]


def test_no_lines_are_written_into_a_parquet_file(tmp_path: Path) -> None:
    """Nothing could read it afterwards."""
    out = tmp_path / "run.parquet"
    arrow.write_parquet([episode(0)], out)
    with pytest.raises(ConfigError, match="Parquet output is a directory"):
        check_output(out, overwrite=True)
    for opened in (open_output, continue_output):
        with pytest.raises(ConfigError, match="Parquet output is a directory"):
            opened(out)
    assert list(read(out)) == [episode(0)]


@pytest.mark.parametrize("content", ["a letter", '{"index": 0}', "\n", "\xff", "{\xff\n", "[1]"])
def test_a_file_of_something_else_is_never_replaced(content: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.touch()
    check_output(out, overwrite=False)
    out.write_bytes(content.encode("latin-1"))
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"out\.jsonl would be replaced, but is not a file"):
            aenv_ray.sample("mini-terminal", "null", TASKS, out=out, overwrite=overwrite)
    with pytest.raises(ConfigError, match=r"out\.jsonl would be replaced"):
        open_output(out)
    assert out.read_bytes() == content.encode("latin-1")


@pytest.mark.parametrize(
    "name", ["train-00000-of-00001.parquet", "part-00001.jsonl", "manifest.json"]
)
def test_a_directory_with_files_that_are_named_like_shards_is_left_as_it_is(
    name: str, tmp_path: Path
) -> None:
    """Data sets of Hugging Face and Spark have such names, and web applications a manifest."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    output = open_output(tmp_path)
    output.write(episode(0))
    output.close()
    if name.endswith(".parquet"):
        parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / name)
    else:
        (tmp_path / name).write_text('{"name": "a"}\n')
    before = _written(tmp_path)
    with pytest.raises(ConfigError, match=f"{name} would be replaced, but is not a file of"):
        aenv_ray.sample("mini-terminal", "null", TASKS, out=tmp_path, overwrite=True)
    with pytest.raises(ConfigError, match=f"{name} would be replaced, but is not a file of"):
        open_output(tmp_path)
    assert _written(tmp_path) == before


def test_a_shard_of_both_formats_is_replaced_whole(tmp_path: Path) -> None:
    """Its writer was killed between writing the one and deleting the other."""
    pytest.importorskip("pyarrow")
    out = tmp_path / "run.parquet"
    output = open_output(out)
    output.write(episode(0))
    output.close()
    (out / "driver-00000.jsonl").write_text(f"{episode(0).model_dump_json()}\n")
    open_output(out).close()
    assert len(read(out)) == 0


@pytest.mark.parametrize("has_shards", [False, True])
def test_attachments_of_other_records_in_a_directory_are_kept(
    has_shards: bool, tmp_path: Path
) -> None:
    data = b"image"
    one = attachment_of(data, "image/png")
    AttachmentFiles(tmp_path, is_directory=True).write({one.digest: data})
    (tmp_path / "run1.jsonl").write_text(f"{episode(0).model_dump_json()}\n")
    if has_shards:
        (tmp_path / "driver-00000.jsonl").write_text(f"{episode(1).model_dump_json()}\n")
    open_output(tmp_path).close()
    assert read(tmp_path / "run1.jsonl").attachment(one) == data
