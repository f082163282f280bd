"""Recorded episodes come back as they were written, from one file or from shards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aenv_ray.cli.main import app
from aenv_ray.errors import ConfigError
from aenv_ray.trajectories import ShardFormat, ShardWriter, arrow, read, write_manifest
from aenv_ray.trajectories.reading import Trajectories, finished_episodes
from aenv_ray.trajectories.report import report
from aenv_ray.trajectories.schema import EpisodeStatus
from aenv_ray.trajectories.shards import MANIFEST, Manifest, continue_output, open_output
from tests.unit.trajectories.episodes import episode, step

EPISODES = [
    episode(0),
    episode(1, 0.0, steps=(step("x", error="ToolTimeout", is_error=True), step("é\n\x1b[31m"))),
    episode(2, None, status=EpisodeStatus.POLICY_FAILED, steps=(), error="ValueError: no"),
    episode(3, messages=({"role": "user", "content": "hi"},), output={"deep": [1, None]}),
]


@pytest.mark.parametrize("name", ["run.jsonl", "run", "run.parquet"])
def test_a_run_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    output = open_output(tmp_path / name)
    for one in EPISODES:
        output.write(one)
    output.close()
    output.close()
    assert output.failure is None
    assert list(read(tmp_path / name)) == EPISODES
    assert (tmp_path / name).is_dir() == (name != "run.jsonl")


@pytest.mark.parametrize("form", list(ShardFormat))
def test_writers_share_a_directory_and_one_manifest_lists_their_shards(
    tmp_path: Path, form: ShardFormat
) -> None:
    writers = [ShardWriter(tmp_path, name, form=form, episodes_per_shard=2) for name in "ab"]
    for one in [*EPISODES, episode(4), episode(5)]:
        writers[one.index % 2].write(one)
    for writer in writers:
        writer.close()
    manifest = write_manifest(tmp_path)
    assert [shard.path for shard in manifest.shards] == [
        f"{name}-0000{number}.{form}" for name in "ab" for number in (0, 1)
    ]
    assert [shard.episodes for shard in manifest.shards] == [2, 1, 2, 1]
    assert Manifest.model_validate_json((tmp_path / MANIFEST).read_text()) == manifest
    assert [one.index for one in read(tmp_path)] == list(range(6))


def test_a_torn_last_line_is_skipped_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Invariant 12: what is lost is said."""
    path = tmp_path / "run.jsonl"
    path.write_text(f"{EPISODES[0].model_dump_json()}\n{EPISODES[1].model_dump_json()[:50]}")
    found = read(path)
    assert (list(found), found.torn) == ([EPISODES[0]], (path,))
    assert caplog.messages == [f"{path}: the last line is incomplete and is skipped"]


def test_a_whole_last_line_needs_no_newline(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(EPISODES[0].model_dump_json())
    assert (list(read(path)), read(path).torn) == ([EPISODES[0]], ())


def test_a_parquet_writer_that_was_killed_leaves_lines_that_are_read(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "a", form=ShardFormat.PARQUET)
    writer.write(EPISODES[0])  # and no close
    assert list(read(tmp_path)) == [EPISODES[0]]
    again = ShardWriter(tmp_path, "a", form=ShardFormat.PARQUET)
    again.write(EPISODES[1])
    again.close()
    assert list(read(tmp_path)) == EPISODES[:2]
    writer.close()


def test_of_an_episode_that_ran_again_the_later_record_counts(tmp_path: Path) -> None:
    failed = episode(0, None, status=EpisodeStatus.INFRA_FAILED)
    lines = [failed, episode(1), episode(0)]
    (tmp_path / "run.jsonl").write_text("".join(f"{one.model_dump_json()}\n" for one in lines))
    assert list(read(tmp_path / "run.jsonl")) == [episode(0), episode(1)]


@pytest.mark.parametrize(("writer", "task"), [("a", "other"), ("a", "t0"), ("b", "t0")])
def test_no_episode_hides_another_one_of_its_index(writer: str, task: str, tmp_path: Path) -> None:
    """Writers that each number from 0 would lose all episodes but those of the last."""
    failed = episode(0, None, status=EpisodeStatus.INFRA_FAILED)
    for name, one in (("a", episode(0)), (writer, failed), (writer, episode(1))):
        output = ShardWriter(tmp_path, name)
        output.write(one)
        output.close()
    assert [one.index for one in read(tmp_path)] == [0, 1]
    output = ShardWriter(tmp_path, writer)
    output.write(episode(0, task_id=task))
    output.close()
    with pytest.raises(ConfigError, match="episode 0 of task"):
        read(tmp_path)
    assert [(one.index, one.task_id) for one in read(tmp_path, renumber=True)] == [
        (0, "t0"), (1, "t1"), (2, task),
    ]  # fmt: skip


def test_joined_files_are_numbered_anew(tmp_path: Path) -> None:
    """The error names the command."""
    joined, target = tmp_path / "all.jsonl", tmp_path / "new.jsonl"
    failed = episode(0, None, status=EpisodeStatus.INFRA_FAILED)
    runs = [episode(0), episode(1), failed, episode(0, 0.0), episode(1, 0.0)]
    joined.write_text("".join(f"{one.model_dump_json()}\n" for one in runs))
    with pytest.raises(ConfigError, match="and so has it of task 't0'") as caught:
        read(joined)
    command = str(caught.value.hint).partition("aenv ")[2].replace("NEW.jsonl", str(target))
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, done.output
    assert [(one.index, one.reward) for one in read(target)] == [(0, 1), (1, 1), (2, 0), (3, 0)]


def test_each_process_of_a_trainer_has_shards_and_indices_of_its_own(tmp_path: Path) -> None:
    """Invariant 12: those of workers at the same time, and those of a run that is started again."""
    for out in (tmp_path / "run", tmp_path / "run.parquet"):
        killed = []
        for run in range(2):
            outputs = [continue_output(out) for _ in range(3)]
            for number in range(2):
                for output, first in outputs:
                    output.write(episode(first + number, task_id=f"{run}"))
            assert len(read(out)) == 6 * (run + 1)  # also while they are written
            killed.append(outputs.pop()[0])
            for output, _ in outputs:
                output.close()
                assert output.failure is None
        assert [one.task_id for one in read(out)] == ["0"] * 6 + ["1"] * 6
        for output in killed:
            output.close()


def test_a_trainer_keeps_the_episodes_of_a_sampling(tmp_path: Path) -> None:
    sampled = open_output(tmp_path / "run")
    sampled.write(episode(0))
    sampled.close()
    output, first = continue_output(tmp_path / "run")
    output.write(episode(first))
    output.close()
    assert [one.index for one in read(tmp_path / "run")] == [0, first]


@pytest.mark.parametrize("rest", ["", "\n", '{"index":7,"task', episode(5).model_dump_json()])
def test_a_trainer_continues_a_file(rest: str, tmp_path: Path) -> None:
    """Of what a killed process wrote, only an incomplete line is removed."""
    path = tmp_path / "run.jsonl"
    earlier = [episode(3), episode(1)] + [episode(5)] * rest.endswith("}")
    path.write_text("".join(f"{one.model_dump_json()}\n" for one in earlier[:2]) + rest)
    output, first = continue_output(path)
    with pytest.raises(ConfigError, match="written by another sampling") as caught:
        continue_output(path)
    assert "directory" in str(caught.value.hint)
    output.write(episode(first))
    output.close()
    assert first == (6 if rest.endswith("}") else 4)
    found = read(path)
    assert (found.torn, [one.index for one in found]) == (
        (), sorted([*(one.index for one in earlier), first]),
    )  # fmt: skip
    again, first = continue_output(path)  # it is closed
    again.close()
    assert first == found[-1].index + 1


@pytest.mark.parametrize("content", ["{}\n", "text", f"{episode(0).model_dump_json()}\ntext\n"])
def test_a_trainer_adds_nothing_to_another_file(content: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"would be continued|line 2: not an episode"):
        continue_output(path)
    assert path.read_text() == content


def test_a_directory_is_resumed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for kept in ([], EPISODES[:1]):
        assert finished_episodes(out, None) == kept
        output = open_output(out, kept)
        output.write(EPISODES[len(kept)])
        output.close()
    assert list(read(out)) == EPISODES[:2]
    open_output(out).close()  # a new run replaces the old one
    assert list(read(out)) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}\n", "line 1: not an episode"),
        (json.dumps(json.loads(EPISODES[0].model_dump_json()) | {"schema_version": 99}) + "\n",
         "line 1: schema version 99 is newer than 1"),
    ],
)  # fmt: skip
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "run.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "run.jsonl")


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.jsonl cannot be read: No such file"):
        read(tmp_path / "gone.jsonl")


def test_a_listed_shard_that_is_missing_or_cut_is_an_error(tmp_path: Path) -> None:
    """Invariant 12: nothing is lost silently."""
    writer = ShardWriter(tmp_path, "a")
    writer.write(EPISODES[0])
    writer.close()
    write_manifest(tmp_path)
    shard = tmp_path / "a-00000.jsonl"
    shard.write_text("")
    with pytest.raises(ConfigError, match="has 0 bytes; the manifest lists it with"):
        read(tmp_path)
    shard.unlink()
    with pytest.raises(ConfigError, match="is missing"):
        read(tmp_path)


def test_a_file_that_is_not_parquet_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "run.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ConfigError, match="not a Parquet file of episodes"):
        read(tmp_path / "run.parquet")


def test_episodes_become_frames_and_datasets(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(f"{one.model_dump_json()}\n" for one in EPISODES))
    found = read(path)
    frame = found.to_pandas()
    assert list(frame["index"]) == [0, 1, 2, 3]
    assert frame["steps"][0][0]["arguments"] == {"text": "hello"}
    table = found.to_arrow()
    assert table.column("status").to_pylist()[2] == "policy_failed"
    dataset = found.to_datasets()
    assert (len(dataset), json.loads(dataset[3]["output"])) == (4, {"deep": [1, None]})
    assert dataset[1]["steps"][1]["text"] == "é\n\x1b[31m"


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text("")
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"to_pandas\(\) requires pandas") as caught:
        read(tmp_path / "run.jsonl").to_pandas()
    assert caught.value.hint == "pip install 'aenv-ray[data]'"


def test_a_directory_that_vanishes_ends_the_writing_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Invariant 12: what is lost is said, once."""
    output = open_output(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    for one in EPISODES:
        output.write(one)
    output.close()
    assert output.failure is not None
    assert "driver-00000.jsonl cannot be written" in output.failure.message
    assert caplog.messages == [f"{output.failure.message}; the run continues"]


def test_a_shard_that_cannot_be_converted_stays_and_the_next_ones_are_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = ShardWriter(tmp_path, "a", form=ShardFormat.PARQUET, episodes_per_shard=1)
    episodes = [episode(0, seed=2**70), episode(1)]
    for one in episodes:
        writer.write(one)
    writer.close()
    assert writer.failure is None
    (warning,) = caplog.messages
    assert "a-00000.jsonl stays JSON Lines" in warning
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-00000.jsonl", "a-00001.parquet"]
    write_manifest(tmp_path)
    assert list(read(tmp_path)) == episodes


def test_a_resumed_run_converts_what_was_left_in_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Readers of Parquet, such as Ray Data, would miss these episodes."""
    out = tmp_path / "run.parquet"
    writers = [ShardWriter(out, name) for name in ("driver", "driver-2")]
    for writer, episodes in zip(writers, (EPISODES[:2], EPISODES[2:3]), strict=True):
        for one in episodes:
            writer.write(one)
        writer.close()
    write_manifest(out)
    with (out / "driver-00000.jsonl").open("a") as file:
        file.write('{"index"')
    resumed = open_output(out, finished_episodes(out, None))
    assert caplog.messages == [
        f"{out}/driver-00000.jsonl: the last line is incomplete and is skipped"
    ]
    assert list(read(out)) == EPISODES[:3]
    resumed.write(EPISODES[3])
    resumed.close()
    assert list(read(out)) == EPISODES
    assert sorted(path.name for path in out.iterdir()) == [
        "driver-00000.parquet", "driver-00001.parquet", "driver-2-00000.jsonl", MANIFEST,
    ]  # fmt: skip


def test_a_hostile_parquet_file_is_a_config_error(tmp_path: Path) -> None:
    """It is a file of others, and `aenv` shows a message."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "run.parquet"
    good = Trajectories([episode(0)]).to_arrow().to_pylist()[0]
    for wrong in ({"reward_detail": "[" * 100_000}, {"phases": "7"}, {"steps": [None]}):
        parquet.write_table(arrow.Table.from_pylist([{**good, **wrong}]), path)
        with pytest.raises(ConfigError, match="not a Parquet file of episodes"):
            read(path)


def test_a_report_of_hostile_numbers_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record = json.loads(episode(0).model_dump_json())
    hostile = {
        **record,
        "duration_s": float("inf"),
        "reward": float("nan"),
        "phases": {"a": -1e999},
    }
    path.write_text(f"{json.dumps(hostile)}\n{json.dumps({**record, 'index': 1})}\n")
    assert "<svg" in report(list(read(path)), "run")


@pytest.mark.parametrize("form", list(ShardFormat))
@pytest.mark.parametrize("where", ["records", "manifest"])
def test_records_of_a_newer_version_are_refused_in_every_form(
    tmp_path: Path, form: ShardFormat, where: str
) -> None:
    """Their fields may mean something else, so values would be wrong without a word."""
    version = {"schema_version": 2} if where == "records" else {}
    newer_one = EPISODES[0].model_copy(update=version)
    path = tmp_path / f"w-00000.{form}"
    if form is ShardFormat.PARQUET:
        arrow.write_parquet([newer_one], path)
    else:
        path.write_text(f"{newer_one.model_dump_json()}\n")
    manifest = write_manifest(tmp_path)
    if where == "manifest":
        newer = manifest.model_copy(update={"schema_version": 2})
        (tmp_path / "manifest.json").write_text(newer.model_dump_json())
    with pytest.raises(ConfigError, match=r": schema version 2 is newer than 1, the newest"):
        read(tmp_path)


def test_the_last_of_several_failures_of_an_episode_is_returned(tmp_path: Path) -> None:
    """Otherwise a resumed run that fails again shows why it failed before."""
    void = EpisodeStatus.INFRA_FAILED
    writer = ShardWriter(tmp_path, "w")
    for index, error in ((0, "first"), (1, "first"), (0, "second")):
        writer.write(episode(index, None, status=void, error=error))
    writer.write(episode(1))
    writer.write(episode(1, None, status=void, error="third"))
    writer.close()
    assert [(one.error, one.reward) for one in read(tmp_path)] == [("second", None), (None, 1.0)]
