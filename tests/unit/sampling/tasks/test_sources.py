"""Tasks from files and tables of every format, and which of them are sampled."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from aenv_ray.errors import ConfigError
from aenv_ray.sampling import Task, environment_tasks, load_tasks, sample, select_tasks
from aenv_ray.sampling.tasks.feed import TaskFeed

TASKS: list[dict[str, Any]] = [
    {
        "id": "a",
        "instruction": "Count\nthe lines, please.",
        "setup": {"function": "start", "arguments": {"task_id": "a"}},
        "reference": [{"tool": "run", "arguments": {"command": "wc -l"}}],
        "level": 1,
    },
    {"id": "b", "instruction": "Nothing to set up.", "level": 2},
    {"id": "c", "reward": {"name": "strict", "arguments": {"limit": 1}}, "level": 3},
]
EXPECTED = [Task.model_validate(task) for task in TASKS]


def as_text(task: dict[str, Any]) -> dict[str, str]:
    """Return a task as the cells of a table of text."""
    return {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in task.items()
    }


def write(path: Path) -> Path:
    match path.suffix:
        case ".csv":
            columns = ["id", "instruction", "setup", "reward", "reference"]
            frame = pandas.DataFrame([as_text(task) for task in TASKS], columns=columns)
            frame.to_csv(path, index=False)
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(columns_of(TASKS)), path)
        case ".json":
            path.write_text(json.dumps(TASKS))
        case _:
            path.write_text("".join(json.dumps(task) + "\n\n" for task in TASKS))
    return path


def columns_of(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = ["id", "instruction", "setup", "reward", "reference", "level"]
    return [{name: task.get(name) for name in names} for task in tasks]


@pytest.mark.parametrize("name", ["t.jsonl", "t.txt", "t.json", "t.csv", "t.parquet"])
def test_every_format_gives_the_same_tasks(tmp_path: Path, name: str) -> None:
    expected = EXPECTED
    if name == "t.csv":
        expected = [Task.model_validate(t.model_dump(exclude={"level"})) for t in EXPECTED]
    path = write(tmp_path / name)
    assert load_tasks(path) == expected
    assert load_tasks(str(path)) == expected


@pytest.mark.parametrize("library", ["pandas", "arrow", "datasets", "text columns"])
def test_every_table_gives_the_same_tasks(library: str) -> None:
    rows = columns_of(TASKS)
    table: Any = {
        "pandas": lambda: pandas.DataFrame(rows),
        "arrow": lambda: pyarrow.Table.from_pylist(rows),
        "datasets": lambda: datasets.Dataset.from_list(rows),
        "text columns": lambda: pandas.DataFrame(
            [{**as_text(task), "level": task["level"]} for task in TASKS]
        ),
    }[library]()
    assert load_tasks(table) == EXPECTED
    assert TaskFeed(table).known == EXPECTED


CALL = {"function": "patch", "arguments": {"x": 1}}
NEEDS = {"build": {"context": "/a", "ignored": ["b"]}, "cpu": "2"}
UNLIKE: list[dict[str, Any]] = [
    {"id": "a", "submission": {"function": "patch"}, "instance": {"build": {"context": "/a"}}},
    {"id": "b", "submission": CALL, "instance": NEEDS},
    {"id": "c", "submission": CALL | {"arguments": {"y": "z"}}, "instance": {"network": "none"}},
]


@pytest.mark.parametrize("form", ["parquet", "csv", "pandas", "arrow", "datasets"])
def test_rows_with_unlike_submissions_and_instances_are_tasks(tmp_path: Path, form: str) -> None:
    """A table adds nulls so that all its rows have one type: these are absent fields."""
    table = pyarrow.Table.from_pylist(UNLIKE)
    source: Any
    match form:
        case "parquet":
            source = tmp_path / "t.parquet"
            pyarrow.parquet.write_table(table, source)
        case "csv":
            source = tmp_path / "t.csv"
            pandas.DataFrame([as_text(task) for task in UNLIKE]).to_csv(source, index=False)
        case "pandas":
            source = pandas.DataFrame(UNLIKE)
        case "arrow":
            source = table
        case _:
            source = datasets.Dataset(table)
    assert load_tasks(source) == [Task.model_validate(task) for task in UNLIKE]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_maps_of_a_table_are_objects(tmp_path: Path, form: str) -> None:
    """DuckDB, Spark and Polars write arguments so."""
    texts = pyarrow.map_(pyarrow.string(), pyarrow.string())
    call = pyarrow.struct([("tool", pyarrow.string()), ("arguments", texts)])
    rows: dict[str, Any] = {
        "id": pyarrow.array(["a", "b"]),
        "setup": pyarrow.array(
            [{"function": "f", "arguments": [("x", "1")]}, {"function": "f", "arguments": []}],
            type=pyarrow.struct([("function", pyarrow.string()), ("arguments", texts)]),
        ),
        "reference": pyarrow.array(
            [[{"tool": "t", "arguments": [("y", "2")]}], None], type=pyarrow.list_(call)
        ),
    }
    source: Any = pyarrow.table(rows)
    if form == "parquet":
        pyarrow.parquet.write_table(source, tmp_path / "t.parquet")
        source = tmp_path / "t.parquet"
    first, second = load_tasks(source)
    assert first.setup is not None
    assert first.setup.arguments == {"x": "1"}
    assert first.reference[0].arguments == {"y": "2"}
    assert second.setup is not None
    assert (second.setup.arguments, second.reference) == ({}, ())


def test_a_stream_is_read_as_tasks_are_taken() -> None:
    taken: list[str] = []

    def rows() -> Iterator[dict[str, Any]]:
        for row in columns_of(TASKS):
            taken.append(row["id"])
            yield row

    async def first(feed: TaskFeed) -> Any:
        return await feed.take(1)

    feed = TaskFeed(datasets.IterableDataset.from_generator(rows))
    assert feed.total is None
    assert asyncio.run(first(feed)) == [(0, EXPECTED[0])]
    feed.close()
    assert "c" not in taken


def test_a_data_set_is_loaded_by_name(tmp_path: Path) -> None:
    """A directory is loaded as a name of the Hub is."""
    write(tmp_path / "train.parquet")
    write(tmp_path / "test.parquet")
    assert load_tasks(f"hf:{tmp_path}:test") == EXPECTED
    assert load_tasks(f"hf:{tmp_path}") == EXPECTED
    with pytest.raises(ConfigError, match=r"cannot be loaded.*validation"):
        load_tasks(f"hf:{tmp_path}:validation")


def test_a_group_of_tables_is_refused_with_its_splits() -> None:
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(columns_of(TASKS))})
    with pytest.raises(ConfigError, match="splits train"):
        TaskFeed(splits)


def test_columns_are_renamed_and_rows_numbered() -> None:
    rows = [{"question": "1 + 1?", "answer": "2"}, {"question": "2 + 2?", "answer": "4"}]
    named = load_tasks(rows, {"id": "#", "instruction": "question"})
    assert [(t.id, t.instruction) for t in named] == [("0", "1 + 1?"), ("1", "2 + 2?")]
    assert named[1].model_extra == {"answer": "4"}
    assert load_tasks([{"key": 7}], {"id": "key"})[0].id == "7"


# --- what is wrong with a file --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t.jsonl", '{"id": "a"}\n{"id": \n', "line 2"),
        ("t.jsonl", '{"id": "a"}\n' + "[" * 100_000, "line 2: nested too deeply"),
        ("t.json", '[{"id": "a"}, {"instruction": "b"}]', "task 1: id"),
        ("t.json", '[{"id": "a"},]', r"t\.json: "),
        ("t.csv", "id,instruction\na,one\nb,two,three\n", "line 3: more fields"),
        ("t.csv", 'id,instruction\na,"one\nline"\nb,"not closed\n', "line 4"),
        ("t.csv", "id,setup\na,{}\nb,{x}\n", "line 3: setup"),
        ("t.csv", "instruction\none\n", "line 2: id"),
        ("t.parquet", "not Parquet", "cannot be read"),
        ("t.csv", "id\n\udcff\n", "cannot be read"),
    ],
)
def test_a_broken_file_is_reported_with_the_line(
    tmp_path: Path, name: str, content: str, says: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=says):
        load_tasks(path)


def test_a_missing_id_says_how_to_name_its_column() -> None:
    with pytest.raises(ConfigError) as raised:
        load_tasks([{"question": "?"}])
    assert "--task-field id=COLUMN" in (raised.value.hint or "")


def test_line_separators_in_texts_and_byte_order_marks_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('\ufeff{"id": "a", "instruction": "one\u2028two\x85three"}\n', encoding="utf-8")
    (task,) = load_tasks(path)
    assert task.instruction == "one\u2028two\x85three"


def test_a_missing_package_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError) as raised:
        load_tasks(path)
    assert "aenv-ray[parquet]" in (raised.value.hint or "")
    with pytest.raises(ConfigError) as raised:
        load_tasks("hf:some/name")
    assert "aenv-ray[data]" in (raised.value.hint or "")


# --- of an environment ----------------------------------------------------------------------------


def test_an_environment_brings_its_tasks_in_a_file() -> None:
    assert len(environment_tasks("mini-terminal")) == 65
    assert sample("mini-terminal", "null").total == 65


# --- which tasks ----------------------------------------------------------------------------------


def ids(tasks: list[Task]) -> list[str]:
    return [task.id for task in tasks]


def test_tasks_are_filtered_then_shuffled_then_limited() -> None:
    tasks = [Task(id=f"{kind}-{n}") for kind in ("count", "find") for n in range(20)]
    assert select_tasks(tasks) == tasks
    assert ids(select_tasks(tasks, ids=["find-3", "count-1?"], limit=2)) == ["count-10", "count-11"]
    shuffled = select_tasks(tasks, shuffle=1)
    assert shuffled == select_tasks(tasks, shuffle=1)
    assert shuffled not in (tasks, select_tasks(tasks, shuffle=2))
    assert sorted(ids(shuffled)) == sorted(ids(tasks))
    assert select_tasks(tasks, shuffle=1, limit=5) == shuffled[:5]


def test_an_id_with_brackets_is_not_a_pattern() -> None:
    """tau2-bench has such ids; as a pattern, the first one matches the second one alone."""
    tasks = [Task(id="fix:[data]off"), Task(id="fix:doff"), Task(id="other")]
    assert ids(select_tasks(tasks, ids=["fix:[data]off"])) == ["fix:[data]off"]
    assert ids(select_tasks(tasks, ids=["fix:[data]off", "o*"])) == ["fix:[data]off", "other"]
    assert ids(select_tasks(tasks[1:], ids=["fix:[data]off"])) == ["fix:doff"]


def test_an_unknown_id_is_refused() -> None:
    with pytest.raises(ConfigError, match="'cuont-1'") as raised:
        select_tasks([Task(id="count-1")], ids=["cuont-1"])
    assert "count-1" in (raised.value.hint or "")
