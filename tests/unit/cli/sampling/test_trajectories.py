"""``aenv trajectories``: records are shown safely, filtered and exported."""

from __future__ import annotations

import contextlib
import csv
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from aenv_ray.actors.fabric import driver_api
from aenv_ray.cli.main import main
from aenv_ray.cli.sampling import rollouts
from aenv_ray.cli.sampling.replay import _rescoring
from aenv_ray.sampling import Sampling, sample
from aenv_ray.sampling import replay as replay_module
from aenv_ray.sampling.replay import replay
from aenv_ray.trajectories import read
from aenv_ray.trajectories.arrow import pyarrow
from aenv_ray.trajectories.attachments import AttachmentFiles, attachment_of
from aenv_ray.trajectories.export import STEP_COLUMNS
from aenv_ray.trajectories.files import EpisodeFile
from aenv_ray.trajectories.schema import Episode, EpisodeStatus
from tests.full_disk import full_disk
from tests.unit.trajectories.episodes import episode, step

HOSTILE = "\x1b]0;owned\x07\x1b[2J</pre><script>alert(1)</script>"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    episodes = [
        episode(0),
        episode(1, 0.0, steps=(step(HOSTILE),), output=HOSTILE, task_id=HOSTILE),
        episode(2, None, status=EpisodeStatus.POLICY_FAILED, error=HOSTILE),
    ]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(f"{one.model_dump_json()}\n" for one in episodes))
    return path


@pytest.mark.parametrize(
    "words", [["show", "1", "--full"], ["list"], ["stats"], ["stats", "--by", "tool"]]
)
def test_texts_of_sandboxes_reach_no_terminal_as_escapes(
    run: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trajectories", words[0], str(run), *words[1:]]) == 0
    shown = capsys.readouterr().out
    assert shown
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_diff_escapes_too(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    changed = read(run)[1].model_copy(update={"steps": (), "reward": 0.5})
    other.write_text(changed.model_dump_json() + "\n")
    assert main(["trajectories", "diff", str(run), str(other)]) == 1
    shown = capsys.readouterr().out
    assert "reward: 0.0 -> 0.5" in shown
    assert "\x1b" not in shown


def test_stats_keep_equal_group_numbers_of_joined_runs_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each run numbers its groups from 0."""
    joined = tmp_path / "joined.jsonl"
    found = [episode(n, float(n // 2), task_id=f"t{n // 2}", group="0") for n in range(4)]
    joined.write_text("".join(f"{one.model_dump_json()}\n" for one in found))
    assert main(["trajectories", "stats", str(joined), "--by", "group", "--output", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["key"], row["reward_mean"]) for row in rows] == [
        ("0 of t0", 0.0),
        ("0 of t1", 1.0),
    ]


def test_equal_runs_have_no_difference(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trajectories", "diff", str(run), str(run), "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["equal"] == 3


def test_filter_writes_what_matches(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "good.jsonl"
    command = ["trajectories", "filter", str(run), "--out", str(out)]
    assert main([*command, "--min-reward", "1"]) == 0
    assert [one.index for one in read(out)] == [0]
    assert main([*command, "--status", "policy_failed", "--force"]) == 0
    assert [one.index for one in read(out)] == [2]
    assert main([*command, "--status", "lost"]) == 2


def test_filter_writes_parquet_into_a_file_of_that_name(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "good.parquet"
    command = ["trajectories", "filter", str(run), "--out", str(out), "--min-reward", "1"]
    assert main(command) == 0
    assert list(read(out)) == [read(run)[0]]


WRITING = [
    ["filter"], ["report"], ["export"], ["export", "--as", "preferences"],
    ["export", "--as", "steps"],
]  # fmt: skip


@pytest.mark.parametrize("words", WRITING)
@pytest.mark.parametrize("name", ["out.txt", "out.parquet"])
def test_a_file_is_only_overwritten_if_asked_for(
    words: list[str], name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / name
    out.write_text("mine")
    command = ["trajectories", words[0], str(run), *words[1:], "--out", str(out)]
    assert main(command) == 3
    assert f"{out} already exists" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert main([*command, "--force"]) == 0
    assert out.read_bytes() != b"mine"


@pytest.mark.parametrize(
    "command",
    [
        ["rescore", "RUN", "--out", "FILE"],
        ["synthesize", "code", "--generator", "RUN", "--out", "FILE"],
        ["synthesize", "code", "--generator", "RUN", "--out", "new.jsonl", "--report", "FILE"],
    ],
)
def test_commands_that_play_overwrite_a_file_only_if_asked_to(
    run: Path, tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """They say so before anything starts."""
    file = tmp_path / "of_yesterday.jsonl"
    file.write_bytes(run.read_bytes())
    paths = {"RUN": str(run), "FILE": str(file)}
    assert main([paths.get(word, word) for word in command]) == 3
    said = capsys.readouterr().err
    assert "already" in said
    assert "--force" in said
    assert file.read_bytes() == run.read_bytes()


def test_rescored_episodes_never_replace_the_recorded_ones(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run.read_bytes()
    assert main(["rescore", str(run), "--out", str(run), "--force"]) == 3
    assert "is the input" in capsys.readouterr().err
    assert run.read_bytes() == before


@pytest.mark.parametrize("words", WRITING)
@pytest.mark.parametrize("name", ["run.jsonl", "link.jsonl", "shards/driver-00000.jsonl"])
def test_no_command_overwrites_its_input(
    words: list[str], name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link.jsonl").symlink_to(run)
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "driver-00000.jsonl").write_bytes(run.read_bytes())
    before, out = run.read_bytes(), tmp_path / name
    source = out.parent if out.parent != tmp_path else run
    command = ["trajectories", words[0], str(source), *words[1:], "--out", str(out), "--force"]
    assert main(command) == 3
    assert f"{out} is the input" in capsys.readouterr().err
    assert run.read_bytes() == out.read_bytes() == before


@pytest.mark.parametrize("words", [["filter"], ["export", "--as", "steps"]])
def test_a_full_disk_leaves_the_earlier_parquet_file(
    words: list[str], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.parquet"
    command = ["trajectories", words[0], str(run), *words[1:], "--out", str(out), "--force"]
    assert main(command) == 0
    before = out.read_bytes()
    with full_disk(after_bytes=64):
        code = main(command)
    assert code == 3
    assert f"{out} cannot be written: File too large" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out.parquet", "run.jsonl"]


def test_groups_without_a_pair_are_counted(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Invariant 12."""
    words = ["trajectories", "export", str(run), "--as", "preferences", "-o", "json"]
    assert main([*words, "--out", str(tmp_path / "dpo.jsonl")]) == 0
    shown = capsys.readouterr()
    why = "without two episodes that have an assistant message"
    assert json.loads(shown.out)["without_pair"] == {why: 2}
    assert f"no pair of 2 groups {why}" in shown.err


def test_exports(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "sft.jsonl"
    assert main(["trajectories", "export", str(run), "--out", str(out)]) == 0
    assert len(out.read_text().splitlines()) == 2
    for name in ("steps.csv", "steps.parquet"):
        command = ["trajectories", "export", str(run), "--as", "steps", "--out"]
        assert main([*command, str(tmp_path / name)]) == 0
    with (tmp_path / "steps.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["index"] for row in rows] == ["0", "1", "2"]
    assert rows[1]["text"] == HOSTILE
    table = pyarrow("pyarrow.parquet").read_table(tmp_path / "steps.parquet")
    assert table.column("tool").to_pylist() == ["echo"] * 3


def test_all_tables_of_steps_have_the_same_columns(run: Path, tmp_path: Path) -> None:
    """Also those of a run without steps, groups or errors."""
    empty = tmp_path / "empty.jsonl"
    empty.write_text(f"{episode(0, steps=()).model_dump_json()}\n")
    schemas = []
    for source in (run, empty):
        out = tmp_path / f"{source.stem}.parquet"
        command = ["trajectories", "export", str(source), "--as", "steps", "--out", str(out)]
        assert main(command) == 0
        schemas.append(pyarrow("pyarrow.parquet").read_schema(out))
    assert schemas[0] == schemas[1]
    assert schemas[0].names == list(STEP_COLUMNS)
    assert {name: str(schemas[0].field(name).type) for name in ("group", "sample", "reward")} == {
        "group": "string", "sample": "int64", "reward": "double",
    }  # fmt: skip


def test_records_match_the_json_schema(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trajectories", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == set(Episode.model_fields)
    for line in run.read_text().splitlines():
        jsonschema.Draft202012Validator(schema).validate(json.loads(line))


def test_an_unknown_episode_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trajectories", "show", str(run), "9"]) == 3
    assert "has no episode 9" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "gone" / "report.html")
    assert main(["trajectories", "report", str(run), "--out", out]) == 3
    assert f"{out} cannot be written: No such file" in capsys.readouterr().err


def test_the_report_loads_nothing_and_escapes_texts(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert main(["trajectories", "report", str(run), "--out", str(out)]) == 0
    page = out.read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "\x1b" not in page
    assert "default-src 'none'" in page
    assert not any(
        word in page for word in ("src=", "href=", "url(", "@import", "http://", "https://")
    )


TALK = (
    {"role": "user", "content": "Please say hello."},
    {"role": "assistant", "content": f"I shall <b>{HOSTILE}", "reasoning": "it is easy"},
    {"role": "assistant", "content": None, "refusal": "but I will not"},
)


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    path = tmp_path / "talk.jsonl"
    usage = {"requests": 2, "prompt_tokens": 1200, "completion_tokens": 34, "cost": 0.5}
    facts = {"policy": "openai:m", "node_id": "n" * 56, "start_mode": "template"}
    one = episode(0, messages=TALK, usage=usage, **facts)
    path.write_text(f"{one.model_dump_json()}\n")
    return path


def test_show_has_what_the_model_said(talk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trajectories", "show", str(talk), "0"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "\nuser\n  Please say hello.\n", "\nassistant, reasoning\n  it is easy\n",
        "\nassistant\n  I shall <b>", "\nassistant, refusal\n  but I will not\n", "step 0  echo",
        "openai:m", "2 requests, 1,200 prompt tokens, 34 completion tokens, cost 0.5", "n" * 56,
        "template",
    ):  # fmt: skip
        assert text in shown
    assert "\x1b" not in shown


def test_the_report_has_what_the_model_said(talk: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert main(["trajectories", "report", str(talk), "--out", str(out)]) == 0
    page = out.read_text()
    for text in (
        "Please say hello.", "it is easy", "I shall &lt;b&gt;", "but I will not", "openai:m",
        "2 requests, 1,200 prompt tokens, 34 completion tokens, cost 0.5",
    ):  # fmt: skip
        assert text in page
    assert "<script" not in page
    assert "\x1b" not in page


TOOLS = [{"type": "function", "function": {"name": "echo", "parameters": {"type": "object"}}}]


@pytest.fixture
def with_tools(tmp_path: Path) -> Path:
    """Two samples of a task by a model with tools, in a directory of their own."""
    data = json.dumps(TOOLS).encode()
    path = tmp_path / "run1" / "run.jsonl"
    path.parent.mkdir()
    file = EpisodeFile(path)
    for index in range(2):
        one = episode(
            index,
            float(index),
            task_id="t",
            messages=TALK,
            tools=attachment_of(data, "application/json").model_dump(),
        )
        one.contents[one.attachments[-1].digest] = data
        file.write(one)
    file.close()
    assert file.failure is None
    return path


@pytest.mark.parametrize("form", ["chat", "preferences"])
def test_an_export_has_the_tools_of_the_model(form: str, with_tools: Path, tmp_path: Path) -> None:
    """Without them a chat template cannot render the prompt that the model had."""
    out = tmp_path / "rows.jsonl"
    words = ["trajectories", "export", str(with_tools), "--as", form, "--out", str(out)]
    assert main(words) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["tools"] for row in rows] == [TOOLS] * (2 if form == "chat" else 1)
    assert len(list((with_tools.parent / "attachments").iterdir())) == 1, "one for all episodes"


def test_records_without_their_lists_of_tools_are_exported_and_filtered(
    with_tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those that were copied alone from another machine; what is missing is said once."""
    alone = tmp_path / "alone.jsonl"
    alone.write_bytes(with_tools.read_bytes())
    out = tmp_path / "rows.jsonl"
    assert main(["trajectories", "export", str(alone), "--out", str(out)]) == 0
    assert [set(json.loads(line)) for line in out.read_text().splitlines()] == [{"messages"}] * 2
    assert "lists of tools that are not in the rows: 1; the attachment" in capsys.readouterr().err
    (tmp_path / "new").mkdir()
    out = tmp_path / "new" / "run.jsonl"
    assert main(["trajectories", "filter", str(alone), "--out", str(out)]) == 0
    assert list(read(out)) == list(read(alone))
    assert "lists of tools that are not in the output: 1; the att" in capsys.readouterr().err


def test_filtered_and_rescored_episodes_take_their_tools_along(
    with_tools: Path, tmp_path: Path
) -> None:
    found = read(with_tools)
    for name in ("filtered", "rescored"):
        (tmp_path / name).mkdir()
    outs = [tmp_path / name / "run.jsonl" for name in ("filtered", "rescored")]
    assert main(["trajectories", "filter", str(with_tools), "--out", str(outs[0])]) == 0
    with _rescoring(found, replay(found, "todo@2"), outs[1]) as each:
        assert each is not None
        each(episode(0, 1.0))
    for out in outs:
        after = read(out)
        assert after[0].tools is not None
        assert json.loads(after.attachment(after[0].tools)) == TOOLS


# --- rescoring ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rescored.jsonl", "rescored"])
def test_a_rescored_episode_is_the_recorded_one_with_another_reward(
    name: str, tmp_path: Path
) -> None:
    image = attachment_of(b"image", "image/png")
    (tmp_path / "before").mkdir()
    before = tmp_path / "before" / "run.jsonl"
    recorded = [
        episode(0, None, status=EpisodeStatus.TIMED_OUT),
        episode(1, 0.0, steps=(step(attachments=[image.model_dump()]),), group="1", sample=0,
                messages=({"role": "user", "content": "hi"},), environment="todo@1",
                usage={"requests": 2}, policy_versions=(1, 2)),
        episode(2, 0.0),
    ]  # fmt: skip
    before.write_text("".join(f"{one.model_dump_json()}\n" for one in recorded))
    AttachmentFiles(before, is_directory=False).write({image.digest: b"image"})
    found = read(before)
    played = replay(found, "todo@2")

    news = [
        episode(1, None, status=EpisodeStatus.REWARD_FAILED, error="function_failed: no"),
        episode(0, 1.0, environment="todo@2", environment_digest="sha256:2", output="other"),
    ]
    with _rescoring(found, played, tmp_path / name) as each:
        assert each is not None
        for one in news:  # as they finish, numbered by the sampler of the replay
            each(one)

    after = read(tmp_path / name)
    new = {"reward": 1.0, "reward_detail": {"score": 1.0}}
    new |= {"environment": "todo@2", "environment_digest": "sha256:2"}
    failed = {"reward": None, "reward_detail": {"score": None}, "error": "function_failed: no"}
    failed |= {"status": EpisodeStatus.REWARD_FAILED}
    assert list(after) == [
        recorded[0],
        recorded[1].model_copy(update=new),
        recorded[2].model_copy(update=failed),
    ], "one that is not replayed stays in the output: means are over the same episodes"
    assert after.attachment(image) == b"image"


def test_records_without_their_attachments_are_rescored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those that were copied alone from another machine; what is missing is said once."""
    names = [attachment_of(one, "image/png") for one in (b"one", b"two")]
    before = tmp_path / "run.jsonl"
    steps = tuple(step(attachments=[one.model_dump()]) for one in names)
    before.write_text(f"{episode(0, 0.0, steps=steps).model_dump_json()}\n")
    AttachmentFiles(before, is_directory=False).write({names[0].digest: b"one"})
    found = read(before)
    (tmp_path / "new").mkdir()
    with _rescoring(found, replay(found, "todo@2"), tmp_path / "new" / "run.jsonl") as each:
        assert each is not None
        each(episode(0, 1.0))
    after = read(tmp_path / "new" / "run.jsonl")
    assert [one.reward for one in after] == [1.0]
    assert after.attachment(names[0]) == b"one"
    said = capsys.readouterr().err
    assert "attachments that are not in the output: 1; " in said
    assert names[1].digest in said


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Sampling]:
    """Replays are not run: each episode has another reward, and that of task t1 failed."""
    begun: list[Sampling] = []

    def run_all(sampling: Sampling, *, quiet: bool, each: Any = None) -> None:
        del quiet
        begun.append(sampling)
        for index, task in enumerate(sampling._tasks.known or ()):
            is_void = task.id == "t1"
            status = EpisodeStatus.INFRA_FAILED if is_void else EpisodeStatus.COMPLETED
            one = episode(index, None if is_void else 0.5, status=status, task_id=task.id)
            sampling._held.append(one)
            if each is not None:
                each(one)

    monkeypatch.setattr(rollouts, "on_ray", contextlib.nullcontext)
    monkeypatch.setattr(rollouts, "run_all", run_all)
    monkeypatch.setattr(driver_api, "init", lambda: None)
    return begun


def test_a_failure_of_the_infrastructure_replaces_no_recorded_reward(
    replays: list[Sampling], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del replays
    recorded = [
        *(episode(n, 1.0) for n in range(3)),
        episode(3, 0.0, status=EpisodeStatus.TIMED_OUT),
        episode(4, 0.0, unrecorded_calls=2),
    ]
    before, after = tmp_path / "run.jsonl", tmp_path / "rescored.jsonl"
    before.write_text("".join(f"{one.model_dump_json()}\n" for one in recorded))
    words = ["rescore", str(before), "--environment", "todo@2", "--out", str(after), "-o", "json"]
    assert main(words) == 1
    assert [(one.index, one.reward, one.status) for one in read(after)] == [
        (0, 0.5, "completed"), (1, 1.0, "completed"), (2, 0.5, "completed"), (3, 0.0, "timed_out"),
        (4, 0.0, "completed"),
    ]  # fmt: skip
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert [one["index"] for one in found["episodes"]] == [0, 2]
    assert found["infra_failed"] == [1]
    assert found["diverged"] == 0
    why = "with commands or written files that are not steps"
    assert found["not_replayed"] == {"timed_out": 1, why: 1}
    assert f"2 episodes not replayed: 1 timed_out, 1 {why}" in shown.err


@pytest.mark.parametrize("command", ["replay", "rescore"])
def test_episodes_are_replayed_with_the_options_that_they_were_played_with(
    command: str, replays: list[Sampling], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def noted(*args: Any, **options: Any) -> Sampling:
        given.update(options)
        return sample(*args, **options)

    monkeypatch.setattr(replay_module, "sample", noted)
    path = tmp_path / "run.jsonl"
    path.write_text(f"{episode(0, 0.5).model_dump_json()}\n")
    words = [command, str(path), "--environment", "todo@2", "-e", "A=1", "--ttl", "2h"]
    words += ["--episode-timeout", "90m", "--reward-on-death", "-1", "--reward-on-timeout", "none"]
    words += ["--reward-on-failure", "-2"]
    words += ["--out", str(tmp_path / "new.jsonl")] if command == "rescore" else []
    assert main(words) == 0
    assert len(replays) == 1
    assert given == {
        "concurrency": "16", "environment_variables": {"A": "1"}, "ttl": "2h",
        "episode_timeout": "90m", "reward_on_death": -1.0, "reward_on_timeout": None,
        "reward_on_failure": -2.0,
    }  # fmt: skip
