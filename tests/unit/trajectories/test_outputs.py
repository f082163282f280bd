"""An output that vanishes, fills up or is written by another run: nothing is lost silently."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aenv_ray.errors import ConfigError
from aenv_ray.trajectories import arrow, files, output_lock, shards
from aenv_ray.trajectories.attachments import attachment_of
from aenv_ray.trajectories.reading import finished_episodes, read
from aenv_ray.trajectories.schema import Episode
from aenv_ray.trajectories.shards import (
    EpisodeOutput,
    ShardWriter,
    check_output,
    continue_output,
    open_output,
    state_of,
)
from tests.unit.trajectories.episodes import episode, step

NAMES = ["run.jsonl", "run", "run.parquet"]
PNG = b"\x89PNG"


def _with_image(index: int) -> Episode:
    one = attachment_of(PNG, "image/png")
    found = episode(index, steps=(step(attachments=(one,)),))
    found.contents[one.digest] = PNG
    return found


def _failure(output: EpisodeOutput) -> ConfigError | None:
    """Return the present failure, which a type checker takes to be the one before."""
    return output.failure


# --- vanished ------------------------------------------------------------------------------------


def _removed(out: Path) -> None:
    shutil.rmtree(out) if out.is_dir() else out.unlink()


def _moved(out: Path) -> None:
    out.rename(out.with_name("moved"))


def _replaced(out: Path) -> None:
    _moved(out)
    output = open_output(out)  # by another run
    output.write(episode(7))
    output.close()


@pytest.fixture
def always_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_LOOK_EVERY_S", 0.0)


@pytest.mark.parametrize("vanish", [_removed, _moved, _replaced])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [episode, _with_image])
def test_an_output_that_vanishes_in_mid_run_is_noticed(
    name: str,
    vanish: Callable[[Path], None],
    make: Callable[[int], Episode],
    always_looks: None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Invariant 12: a file without a name takes whatever is written, and loses it."""
    out = tmp_path / name
    output = open_output(out)
    for index in range(2):
        output.write(make(index))
    assert _failure(output) is None
    vanish(out)
    after = sorted(tmp_path.rglob("*.*"))
    caplog.clear()
    for index in range(2, 4):
        output.write(make(index))
    assert output.is_gone
    assert output.failure is not None
    assert "was removed, moved or replaced" in output.failure.message
    assert "2 episodes that were in it are missing" in output.failure.message
    assert [one.index for one in output.unwritten] == [2, 3]
    output.close()
    assert caplog.messages == [f"{output.failure.message}; the run continues"]
    assert sorted(tmp_path.rglob("*.*")) == after  # nothing is made anew


@pytest.mark.parametrize("name", ["run", "run.parquet"])
def test_an_attachment_does_not_make_the_directory_of_its_output_anew(
    name: str, tmp_path: Path
) -> None:
    """A run would end with a new directory that has no records, as if all were well."""
    output = open_output(tmp_path / name)
    output.write(episode(0))
    _removed(tmp_path / name)
    output.write(_with_image(1))
    assert output.is_gone
    output.close()
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", NAMES)
def test_an_output_that_vanishes_after_its_last_episode_is_noticed(
    name: str, tmp_path: Path
) -> None:
    output = open_output(tmp_path / name)
    output.write(episode(0))
    _removed(tmp_path / name)
    output.close()
    assert output.failure is not None
    assert "1 episodes that were in it are missing" in output.failure.message


def test_finished_shards_that_vanish_are_counted(always_looks: None, tmp_path: Path) -> None:
    """Whether the writer has a shard open, opens one, or has ended."""
    for more, count in ((0, 4), (1, 4), (2, 5)):
        out = tmp_path / f"run{more}"
        writer = ShardWriter(out, "a", episodes_per_shard=2, is_retried=True)
        for index in range(4 + more // 2):
            writer.write(episode(index))
        _removed(out)
        if more:
            writer.write(episode(9))
        writer.close()
        assert writer.failure is not None
        assert f": {count} episodes that were in it are missing" in writer.failure.message
        assert writer.is_gone
    writer = ShardWriter(tmp_path / "other", "a", episodes_per_shard=1)
    for index in range(3):
        writer.write(episode(index))
    (tmp_path / "other" / "a-00001.jsonl").unlink()
    writer.close()
    assert writer.failure is not None
    assert ": 1 episodes" in writer.failure.message
    assert not writer.is_gone


def test_another_working_directory_is_no_loss(
    always_looks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy in the driver may change it."""
    for name in NAMES:
        monkeypatch.chdir(tmp_path)
        output = open_output(Path(name))
        output.write(episode(0))
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / "elsewhere")
        output.write(_with_image(1))
        output.close()
        assert output.failure is None
        assert len(read(tmp_path / name)) == 2
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o002, 0o664)])
@pytest.mark.parametrize("name", NAMES)
def test_records_are_as_private_as_the_umask_says(
    name: str, umask: int, mode: int, tmp_path: Path
) -> None:
    """Prompts and answers are in them; and a group of users may share them."""
    before = os.umask(umask)
    try:
        output = open_output(tmp_path / name)
        output.write(episode(0))
        output.close()
        arrow.write_parquet([episode(0)], tmp_path / "filtered.parquet")
    finally:
        os.umask(before)
    records = tmp_path / name if name == "run.jsonl" else next((tmp_path / name).glob("driver-*"))
    assert records.stat().st_mode & 0o777 == mode
    assert (tmp_path / "filtered.parquet").stat().st_mode & 0o777 == mode


def test_a_converted_shard_keeps_its_mode(tmp_path: Path) -> None:
    """It may be that of an earlier run, whose user had another umask."""
    output = open_output(tmp_path / "run.parquet")
    output.write(episode(0))
    next((tmp_path / "run.parquet").glob("*.jsonl")).chmod(0o640)
    output.close()
    (shard,) = (tmp_path / "run.parquet").glob("driver-*.parquet")
    assert shard.stat().st_mode & 0o777 == 0o640


# --- two runs ------------------------------------------------------------------------------------


@pytest.fixture
def is_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_lock, "_PATIENCE_S", 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_has_its_output_for_itself(name: str, is_impatient: None, tmp_path: Path) -> None:
    """Invariant 12: also after it has replaced the file of the run that it continues."""
    out = tmp_path / name
    first = open_output(out)
    first.write(episode(0))
    for kept in ((), finished_episodes(out, None)):
        with pytest.raises(ConfigError, match="is being written by another sampling"):
            open_output(out, kept)
    first.write(episode(1))
    first.close()
    again = open_output(out, finished_episodes(out, None))
    with pytest.raises(ConfigError, match="is being written by another sampling"):
        open_output(out, finished_episodes(out, None))
    again.write(episode(2))
    again.close()
    assert [one.index for one in read(out)] == [0, 1, 2]
    assert not list(tmp_path.rglob("*lock*"))


def test_a_run_and_a_trainer_do_not_write_to_one_file(is_impatient: None, tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    trained, _ = continue_output(out)
    trained.write(episode(0))
    with pytest.raises(ConfigError, match="is being written by another sampling"):
        open_output(out)
    trained.close()
    sampled = open_output(out, finished_episodes(out, None))
    with pytest.raises(ConfigError, match="is being written by another sampling"):
        continue_output(out)
    sampled.close()
    assert [one.index for one in read(out)] == [0]


@pytest.mark.parametrize("name", NAMES)
def test_what_another_run_wrote_meanwhile_is_not_replaced(name: str, tmp_path: Path) -> None:
    """It may end between the reading of its episodes and the opening of its output."""
    out = tmp_path / name
    check_output(out, overwrite=False)
    new, both = state_of(out), [episode(0), episode(1)]
    running = open_output(out)
    running.write(both[0])
    state, kept = state_of(out), finished_episodes(out, None)
    running.write(both[1])
    running.close()
    for expected, found in ((new, ()), (state, kept)):
        with pytest.raises(ConfigError, match="has changed since it was read"):
            open_output(out, found, expected)
    assert list(read(out)) == both
    open_output(out, finished_episodes(out, None), state_of(out)).close()
    assert list(read(out)) == both


HOLDER = """
import multiprocessing, os, signal, sys
from pathlib import Path
from aenv_ray.trajectories.shards import open_output
from tests.unit.trajectories.episodes import episode

def child():
    print(os.getpid(), flush=True)
    signal.pause()

output = open_output(Path(sys.argv[1]))
output.write(episode(0))
forked = multiprocessing.get_context("fork").Process(target=child)
forked.start()
forked.join()
"""


@pytest.mark.parametrize("name", NAMES)
def test_the_lock_ends_with_the_process_and_not_with_its_children(
    name: str, tmp_path: Path
) -> None:
    """A pool of processes that the policy forked may outlive a killed driver."""
    out = tmp_path / name
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(out)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        forked = int(holder.stdout.readline())
        try:
            holder.kill()  # and its output is opened at once
            output = open_output(out, finished_episodes(out, None))
        finally:
            os.kill(forked, signal.SIGKILL)
    output.write(episode(1))
    output.close()
    assert [one.index for one in read(out)] == [0, 1]


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run is not refused."""

    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    for name in NAMES:
        output = open_output(tmp_path / name)
        output.write(episode(0))
        output.close()
        assert output.failure is None
        assert f"{tmp_path / name} cannot be locked: Function not implemented" in caplog.text
        assert len(read(tmp_path / name)) == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_error_says_who_has_the_output(name: str, is_impatient: None, tmp_path: Path) -> None:
    """Waiting for the end of another process does not help if it is this one."""
    out = tmp_path / name
    output = open_output(out)
    with pytest.raises(ConfigError, match=r"by another sampling or pool of this process") as caught:
        open_output(out)
    assert "copy it and resume the copy" in (caught.value.hint or "")
    output.close()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(out)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        forked = int(holder.stdout.readline())
        try:
            with pytest.raises(ConfigError, match="by another process, sampling or pool"):
                open_output(out)
        finally:
            holder.kill()
            os.kill(forked, signal.SIGKILL)


@pytest.mark.parametrize("name", ["run", "run.parquet"])
def test_the_lock_ends_however_the_output_is_closed(
    name: str, is_impatient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each later run of this process would be refused."""

    def fails(_: Path) -> None:
        raise OSError(5, "Input/output error")

    out = tmp_path / name
    output = open_output(out)
    with monkeypatch.context() as patched:
        patched.setattr(shards, "write_manifest", fails)
        with pytest.raises(OSError, match="Input/output error"):
            output.close()
    output_lock.OutputLock.acquire(out).close()
    assert not list(tmp_path.rglob("*lock*"))


@pytest.mark.parametrize("name", ["run", "run.parquet"])
def test_a_shard_that_cannot_be_listed_is_a_failure_of_the_output(
    name: str, tmp_path: Path
) -> None:
    output = open_output(tmp_path / name)
    (tmp_path / name / "other-00000.jsonl").mkdir()
    output.close()
    assert output.failure is not None
    assert "other-00000.jsonl cannot be read: Is a directory" in output.failure.message
    assert not list(tmp_path.rglob("*lock*"))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("name", "reason"),
    [("notes.txt/run.jsonl", "Not a directory"), ("x" * 300 + ".jsonl", "File name too long")],
)
def test_a_path_that_cannot_be_an_output_is_an_error_of_the_configuration(
    name: str, reason: str, overwrite: bool, tmp_path: Path
) -> None:
    """Whichever call is the first to notice."""
    (tmp_path / "notes.txt").write_text("")

    def begin() -> None:
        out = tmp_path / name
        state_of(out)
        check_output(out, overwrite=overwrite)
        open_output(out)

    with pytest.raises(ConfigError, match=f"cannot be .*: {reason}"):
        begin()
    for opened in (open_output, continue_output):
        with pytest.raises(ConfigError, match=f"cannot be .*: {reason}"):
            opened(tmp_path / name)


# --- a full disk ---------------------------------------------------------------------------------


def _records(out: Path) -> list[Path]:
    return [out] if out.is_file() else sorted(out.glob("*.jsonl"))


@pytest.mark.parametrize("is_at_end", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_disk_that_was_full_for_a_moment_loses_nothing(
    name: str,
    is_at_end: bool,
    full_disk: Callable[[int | None], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Invariant 12: what could not be written is held, and written later, in order."""
    monkeypatch.setattr(files, "_RETRY_EVERY_S", 3600.0 if is_at_end else 0.0)
    out = tmp_path / name
    output = open_output(out)
    output.write(_with_image(0))
    (records,) = _records(out)
    size = records.stat().st_size
    full_disk(size + 100)
    for index in (1, 2):
        output.write(_with_image(index))
    assert output.failure is not None
    assert [one.index for one in output.unwritten] == [1, 2]
    assert records.stat().st_size == size, "no part of a line is left"
    (message,) = caplog.messages
    assert message == f"{output.failure.message}; the run continues"
    assert f"{records} cannot be written: File too large; it has 1 episodes" in message
    full_disk(None)
    output.write(_with_image(3))
    assert (output.failure is None) is not is_at_end
    output.close()
    assert _failure(output) is None
    assert output.unwritten == []
    assert caplog.messages[1:] == [f"{records} can be written again; no episode is missing"]
    if not name.endswith(".parquet"):
        lines = [line for path in _records(out) for line in path.read_text().splitlines()]
        assert [Episode.model_validate_json(line).index for line in lines] == [0, 1, 2, 3]
    assert [one.index for one in read(out)] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", NAMES)
def test_a_long_backlog_is_written_in_parts(
    name: str,
    full_disk: Callable[[int | None], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The event loop of the episodes that are played waits for each part."""
    monkeypatch.setattr(files, "_RETRY_EVERY_S", 0.0)
    monkeypatch.setattr(files, "_RETRY_AT_ONCE", 3)
    output = open_output(tmp_path / name)
    full_disk(0)
    for index in range(9):
        output.write(_with_image(index))
    full_disk(None)
    held = []
    for index in range(9, 12):
        output.write(_with_image(index))
        held.append([one.index for one in output.unwritten])
        assert output.failure is not None
        assert not output.is_final
        assert all(one.contents for one in output.unwritten)
    assert held == [list(range(3, 10)), list(range(6, 11)), list(range(9, 12))]
    assert "can be written again" not in caplog.text
    output.write(_with_image(12))
    assert _failure(output) is not None
    output.close()
    assert _failure(output) is None
    assert [one.index for one in read(tmp_path / name)] == list(range(13))
    assert caplog.text.count("can be written again; no episode is missing") == 1


def test_a_shard_is_not_ended_while_its_episodes_are_held(
    full_disk: Callable[[int | None], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_RETRY_EVERY_S", 0.0)
    writer = ShardWriter(tmp_path, "a", episodes_per_shard=2, is_retried=True)
    full_disk(0)
    for index in range(4):
        writer.write(episode(index))
    assert [one.index for one in writer.unwritten] == [0, 1, 2, 3]
    full_disk(None)
    for index in range(4, 6):
        writer.write(episode(index))
    writer.close()
    assert (writer.failure, len(read(tmp_path))) == (None, 6)
    assert len(_records(tmp_path)) == 2


@pytest.mark.parametrize("name", NAMES)
def test_a_disk_that_stays_full_leaves_the_episodes_in_memory(
    name: str, full_disk: Callable[[int | None], None], tmp_path: Path
) -> None:
    """Each one with its attachments, for the sampling that has to return them."""
    out = tmp_path / name
    output = open_output(out)
    full_disk(10)
    for index in range(2):
        output.write(_with_image(index))
    output.close()
    full_disk(None)
    assert output.failure is not None
    assert not output.is_gone
    assert [one.index for one in output.unwritten] == [0, 1]
    assert all(one.contents for one in output.unwritten)


def test_a_trainer_holds_no_episodes_that_cannot_be_written(
    full_disk: Callable[[int | None], None], tmp_path: Path
) -> None:
    """It runs for days, and nothing reads them from its pool."""
    for name in ("run.jsonl", "run"):
        output, first = continue_output(tmp_path / name)
        full_disk(10)
        output.write(episode(first))
        full_disk(None)
        assert output.failure is not None
        assert output.unwritten == []
        output.close()
        assert len(read(tmp_path / name)) == 0
