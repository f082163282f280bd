"""Rows of data sets of SWE-bench's form become tasks; malformed ones are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.engines.images.serving import sidecar_image
from aenv_ray.errors import ConfigError
from aenv_ray.project import project
from aenv_ray.sampling import Task, load_predictions, load_tasks, with_predictions

PATCH = "diff --git a/code.py b/code.py\n--- a/code.py\n+++ b/code.py\n@@ -1 +1 @@\n-a\n+b\n"
TESTS = PATCH.replace("code.py", "tests/test_code.py")
ROW: dict[str, Any] = {
    "instance_id": "astropy__astropy-12907",
    "problem_statement": "It is wrong.",
    "repo": "astropy/astropy",
    "version": "4.3",
    "base_commit": "d16bfe0",
    "patch": PATCH,
    "test_patch": TESTS,
    "FAIL_TO_PASS": '["tests/test_code.py::test_a"]',
    "PASS_TO_PASS": ["tests/test_code.py::test_b"],
    "hints_text": "secret",
}
OWN = {"eval_script": "#!/bin/bash\n", "log_parser": "parse_log_pytest", "image": "own/image:1"}


def arguments(task: Task) -> dict[str, Any]:
    assert task.reward is not None
    return task.reward.arguments


def test_a_row_becomes_a_task_that_hides_tests_and_solution_from_the_agent() -> None:
    (task,) = load_tasks([ROW])
    assert task.id == "astropy__astropy-12907"
    assert task.instruction.endswith("It is wrong.")
    assert task.datasource == (
        "docker.io/swebench/sweb.eval.x86_64.astropy_1776_astropy-12907:latest"
    )
    deploy = project.resolve("swebench").config.deploy
    assert sidecar_image("swebench", deploy, task.id) == task.datasource
    instance = arguments(task)["instance"]
    assert instance["FAIL_TO_PASS"] == ["tests/test_code.py::test_a"]
    assert instance["PASS_TO_PASS"] == ["tests/test_code.py::test_b"]
    assert instance["gold_files"] == ["code.py"]
    assert task.submission is not None
    assert [call.tool for call in task.reference] == ["shell", "submit"]
    assert PATCH in task.reference[0].arguments["command"]
    seen = task.model_dump_json(exclude={"reward", "reference", "wrong"})
    assert "test_code" not in seen
    assert "+b" not in seen
    assert "secret" not in seen


@pytest.mark.parametrize(
    ("more", "image", "commands", "parser"),
    [
        (OWN, "own/image:1", [], "parse_log_pytest"),
        (
            {
                "docker_image": "rebench/x:1",
                "install_config": {"test_cmd": "pytest -rA", "log_parser": "parse_log_pytest"},
            },
            "rebench/x:1", ["pytest -rA"], "parse_log_pytest",
        ),
        (
            {"image_name": "smith/x", "test_patch": None, "base_commit": None, "version": None},
            "smith/x", ["pytest -rA --color=no"], "",
        ),
        ({"repo": "own/repo", "image": "own/x", "test_cmd": ["make", "make check"],
          "log_parser": "parse_log_tap"}, "own/x", ["make", "make check"], "parse_log_tap"),
    ],
    ids=["swebench-5", "swe-rebench", "swe-smith", "own"],
)  # fmt: skip
def test_rows_of_similar_data_sets_are_accepted(
    more: dict[str, Any], image: str, commands: list[str], parser: str
) -> None:
    (task,) = load_tasks([ROW | more])
    instance = arguments(task)["instance"]
    assert (instance["test_cmd"], instance["log_parser"]) == (commands, parser)
    assert (task.datasource, task.unsupported) == (image, None)
    assert task.setup is not None
    assert task.setup.arguments["specs"]["repo"] == "", "the official specs are not used"


def test_a_row_of_r2e_gym_becomes_a_task() -> None:
    """Its hidden tests are in the image, and are removed before the agent acts."""
    row = {
        "repo_name": "orange3",
        "docker_image": "namanjain12/orange3_final:0a1b",
        "commit_hash": "0a1b2c3d4e5f6071",
        "problem_statement": "[ISSUE] It is wrong. [/ISSUE]",
        "expected_output_json": json.dumps(
            {"\x1b[1mA.test_x\x1b[0m": "PASSED", "test_y - z": "FAILED"}
        ),
    }
    (task,) = load_tasks([row])
    assert (task.id, task.datasource) == ("orange3-0a1b2c3d4e5f", row["docker_image"])
    assert arguments(task)["instance"]["expected"] == {"A.test_x": "PASSED", "test_y": "FAILED"}
    assert task.setup is not None
    assert "/r2e_tests" in task.setup.arguments["remove"]
    assert "bug_patch" not in task.setup.arguments
    assert task.reference == (), "the row has no commit"
    with pytest.raises(ConfigError, match=r"task 0: expected_output_json"):
        load_tasks([{**row, "expected_output_json": "[1"}])
    ranges = {"old_range": {"start": 1}, "new_range": {"start": 1, "length": 2}}
    lines = [
        {"content": "a", "type": "deleted"},
        {"content": "b", "type": "added"},
        {"content": "No newline at end of file", "type": "note"},
    ]
    changed = {
        "header": {"file": {"path": "pkg/a.py"}, "misc_line": None},
        "minus_file": {"path": "a/pkg/a.py"},
        "plus_file": {"path": "b/pkg/a.py"},
        "hunks": [{"descriptor": ranges, "line_group": {"all_lines": lines}}],
    }
    tests = {"header": {"file": {"path": "pkg/tests/data.py"}}, "hunks": []}
    commit = {"file_diffs": [changed, tests, {**changed, "is_binary_file": True}]}
    (task,) = load_tasks([{**row, "parsed_commit_content": json.dumps(commit)}])
    patch = (
        "diff --git a/pkg/a.py b/pkg/a.py\n--- a/pkg/a.py\n+++ b/pkg/a.py\n@@ -1 +1,2 @@\n"
        "-a\n+b\n\\ No newline at end of file\n"
    )
    command = task.reference[0].arguments["command"]
    assert command.split("'\n", 1)[1].rpartition("EOF_")[0] == patch
    assert arguments(task)["instance"]["gold_files"] == ["pkg/a.py"]
    del changed["hunks"][0]["line_group"]["all_lines"][0]["type"]
    with pytest.raises(ConfigError, match=r"parsed_commit_content: file_diffs\.0\.hunks\.0\."):
        load_tasks([{**row, "parsed_commit_content": commit}])


def test_a_patch_without_tests_introduces_the_bug() -> None:
    """As in SWE-smith: the reference takes it back."""
    (task,) = load_tasks([{**ROW, "test_patch": "", "image_name": "smith/x"}])
    assert task.setup is not None
    assert task.setup.arguments["bug_patch"] == PATCH
    assert (
        task.setup.arguments["remove"]
        == arguments(task)["instance"]["hidden"]
        == ["tests/test_code.py"]
    )
    assert "git apply --reverse" in task.reference[0].arguments["command"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"problem_statement": ""}, "the row has no problem_statement"),
        ({"problem_statement": None}, "the row has no problem_statement"),
        ({"FAIL_TO_PASS": ["TestAdd"]}, "the row's tests are not pytest's, and it has no test_cmd"),
        ({"FAIL_TO_PASS": ["TestAdd"], "test_cmd": "go test -v ./..."}, None),
        ({}, None),
    ],
)
def test_an_unplayable_row_does_not_affect_other_rows(
    change: dict[str, Any], why: str | None
) -> None:
    """SWE-smith has rows without an issue text, and repositories in other languages."""
    smith = {**ROW, "test_patch": "", "image_name": "smith/x", "PASS_TO_PASS": []}
    row, other = load_tasks([{**smith, **change}, {**smith, "instance_id": "other"}])
    assert (row.unsupported, other.unsupported) == (why, None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, "the row has no image, and SWE-bench publishes none for getmoto/moto"),
        (
            {"test_cmd": "pytest -rA"},
            "the row has no image, and SWE-bench publishes none for getmoto/moto",
        ),
        (
            {"image": "moto:1"},
            "the row has no test_cmd, and swebench has no specs for getmoto/moto",
        ),
        ({"image": "moto:1", "test_cmd": "pytest -rA"}, None),
        ({"repo": "pallets/flask"}, None),
    ],
)
def test_a_row_of_an_unknown_repository_needs_an_image_and_a_command(
    change: dict[str, Any], why: str | None
) -> None:
    """SWE-Gym publishes rows without both: they are refused before a container starts."""
    gym = {**ROW, "instance_id": "getmoto__moto-1", "repo": "getmoto/moto", "version": "4.1"}
    (task,) = load_tasks([{**gym, **change}])
    assert task.unsupported == why


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("django__django-11099", None),
        ("pylint-dev__pylint-4551", None),
        ("mine__tool-1", "the row has no image, and SWE-bench publishes none for mine/tool"),
        ("other", "the row has no image, and SWE-bench publishes none for other"),
    ],
)
def test_the_id_of_a_row_determines_whether_swebench_publishes_its_image(
    name: str, why: str | None
) -> None:
    """The published images are named by ids; a row with a test command needs no repo."""
    row = {key: value for key, value in ROW.items() if key not in {"repo", "version"}}
    (task,) = load_tasks([{**row, "instance_id": name, "test_cmd": "pytest -rA"}])
    assert task.unsupported == why


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"FAIL_TO_PASS": None}, "FAIL_TO_PASS: Field required"),
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS: "),
        ({"FAIL_TO_PASS": "['a']"}, "a list of tests as JSON text"),
        ({"FAIL_TO_PASS": {"a": 1}}, "FAIL_TO_PASS: "),
        ({"PASS_TO_PASS": [1]}, "PASS_TO_PASS.0: "),
        ({"patch": 3}, "patch: "),
        ({"patch": "change a to b"}, "patch: it is not a patch"),
        ({"base_commit": ""}, "base_commit: it is missing"),
        ({"version": None}, "version: repo and version name the official specs"),
        ({"test_patch": None}, "test_patch: it is missing; a task without one needs an image"),
        ({"eval_script": "#!/bin/bash"}, "log_parser: it is missing"),
    ],
)
def test_a_malformed_row_is_reported_with_its_field(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in (ROW, ROW | change)))
    with pytest.raises(ConfigError) as caught:
        load_tasks(path)
    assert caught.value.message.startswith(f"{path}, line 2")
    assert words in caught.value.message


def test_rows_are_read_from_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{**ROW, "hints_text": ""}, ROW]), path)
    assert load_tasks(path) == load_tasks([ROW, ROW])


def test_a_task_with_an_id_is_not_taken_for_a_row() -> None:
    (task,) = load_tasks([{"id": "a", "instance_id": "b"}])
    assert (task.id, task.submission) == ("a", None)


# --- predictions ---------------------------------------------------------------------------------

GIVEN = [
    {"instance_id": "astropy__astropy-12907", "model_patch": PATCH, "model_name_or_path": "m"},
]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.json", json.dumps(GIVEN)),
        ("p.json", json.dumps({one["instance_id"]: one for one in GIVEN})),
        ("p.json", json.dumps(GIVEN[0])),
        ("p.jsonl", "\n".join(map(json.dumps, GIVEN))),
    ],
    ids=["list", "by id", "one line", "lines"],
)
def test_predictions_replace_the_submissions_of_agents(
    tmp_path: Path, name: str, text: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    (task,) = with_predictions(load_tasks([ROW]), load_predictions(path))
    assert (task.setup, task.submission) == (None, None)
    assert arguments(task)["submission"] == {"patch": PATCH}
    assert task.model_extra == {"model_name_or_path": "m"}


@pytest.mark.parametrize("patch", [None, ""])
def test_a_prediction_may_have_no_patch(tmp_path: Path, patch: str | None) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({**GIVEN[0], "model_patch": patch}))
    (task,) = with_predictions(load_tasks([ROW]), load_predictions(path))
    assert arguments(task)["submission"] == {"patch": ""}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model_patch": ""}', "line 1: instance_id: Field required"),
        ('{"instance_id": "x", "model_patch": 3}', "line 1: model_patch: "),
        ("nonsense", "line 1: Expecting value: column 1"),
        (f"{json.dumps(GIVEN[0])}\n{json.dumps(GIVEN[0])}", "line 2: there is another prediction"),
        ('{"instance_id": "other"}', "no task has the id 'other'"),
    ],
)
def test_invalid_predictions_are_reported(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        with_predictions(load_tasks([ROW]), load_predictions(path))
    assert words in caught.value.message


def test_a_missing_predictions_file_is_reported(tmp_path: Path) -> None:
    for name in ("none.jsonl", "none.json"):
        with pytest.raises(ConfigError, match=f"no file of predictions .*/{name}"):
            load_predictions(tmp_path / name)


def test_predictions_need_tasks_with_submissions() -> None:
    tasks = load_tasks([ROW])
    (prediction,) = [one.model_copy() for one in _predictions()]
    with pytest.raises(ConfigError, match="has no submission"):
        with_predictions([tasks[0].model_copy(update={"submission": None})], [prediction])


def _predictions() -> list[Any]:
    from aenv_ray.sampling.tasks.repositories import Prediction

    return [Prediction.model_validate(one) for one in GIVEN]
