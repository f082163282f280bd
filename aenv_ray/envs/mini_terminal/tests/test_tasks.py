"""The reference solution of every task scores 1; the wrong one and doing nothing score 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mini_terminal
import pytest
from conftest import PROJECT, Execute
from tasks import TASKS

ROWS: list[dict[str, Any]] = [
    json.loads(line) for line in (PROJECT / "tasks.jsonl").read_text().splitlines()
]

REWARDS = {"task_reward": mini_terminal.task_reward, "process_reward": mini_terminal.process_reward}


def run_task(row: dict[str, Any], execute: Execute, solution: str | None) -> dict[str, Any]:
    """Start a task, run one of its solutions (None: none), and return the reward."""
    mini_terminal.start_task(**row["setup"]["arguments"])
    for call in row[solution] if solution else []:
        assert call["tool"] == "execute_command"
        result = execute(**call["arguments"])
        assert result["output"][1], result
        assert "restarted" not in result
    found: dict[str, Any] = REWARDS[row["reward"]["name"]](**row["reward"]["arguments"])
    return found


@pytest.mark.parametrize("row", ROWS, ids=[row["id"] for row in ROWS])
def test_reference_scores_1_and_wrong_or_nothing_scores_0(
    row: dict[str, Any], execute: Execute
) -> None:
    nothing = run_task(row, execute, None)
    assert (nothing["score"], nothing["passed"]) == (0.0, False)
    wrong = run_task(row, execute, "wrong")
    assert (wrong["score"], wrong["passed"]) == (0.0, False)
    assert wrong["reason"]
    solved = run_task(row, execute, "reference")
    assert solved == {"score": 1.0, "passed": True, "reason": "solved"}


def test_tasks_and_their_descriptions_have_the_same_ids() -> None:
    assert [row["id"] for row in ROWS] == list(TASKS)
    assert len(ROWS) >= 48
    for row in ROWS:
        assert row["setup"] == {"function": "start_task", "arguments": {"task_id": row["id"]}}
        name = "process_reward" if TASKS[row["id"]].is_about_running else "task_reward"
        assert row["reward"] == {"name": name, "arguments": {"task_id": row["id"]}}
        assert row["instruction"]
        assert row["reference"]
        assert row["wrong"]
        assert row["reference"] != row["wrong"]
    assert mini_terminal.list_tasks() == [
        {"id": row["id"], "instruction": row["instruction"]} for row in ROWS
    ]


def snapshot(root: Path) -> dict[str, tuple[int, bytes | str]]:
    found: dict[str, tuple[int, bytes | str]] = {}
    for path in sorted(root.rglob("*")):
        content: bytes | str = ""
        if path.is_symlink():
            content = str(path.readlink())
        elif path.is_file():
            # SQLite counts writes in its header.
            content = path.read_bytes()
        found[str(path.relative_to(root))] = (path.lstat().st_mode, content)
    return found


@pytest.mark.parametrize("name", TASKS)
def test_setup_creates_the_same_files_each_time(name: str, tmp_path: Path) -> None:
    for copy in ("one", "two"):
        (tmp_path / copy).mkdir()
        TASKS[name].setup(tmp_path / copy)
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "two") != {}


def test_start_task_gives_a_fresh_directory_and_a_shell_in_it(
    execute: Execute, workdir: Path
) -> None:
    execute("cd /; x=old")
    started = mini_terminal.start_task("count-lines-01")
    assert started["task_id"] == "count-lines-01"
    assert started["instruction"] == ROWS[0]["instruction"]
    assert started["workdir"] == str(workdir / "count-lines-01")
    shown = execute('pwd; echo "[$x]"; echo > extra; rm notes.txt')
    assert shown == {"output": [f"{workdir}/count-lines-01\n[]\n", True], "returncode": 0}
    mini_terminal.start_task("count-lines-01")
    assert execute("ls")["output"][0] == "notes.txt\n"


def test_start_task_again_removes_read_only_directories(execute: Execute) -> None:
    mini_terminal.start_task("count-lines-01")
    execute("mkdir -p a/b; echo > a/b/c; chmod 0 a/b a")
    mini_terminal.start_task("count-lines-01")
    assert execute("ls")["output"][0] == "notes.txt\n"


@pytest.mark.parametrize("call", [mini_terminal.start_task, mini_terminal.task_reward])
def test_unknown_task_is_an_error_with_examples(call: Any, workdir: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown task 'nope'.*count-lines-01"):
        call("nope")


def test_a_task_has_one_reward(workdir: Path) -> None:
    """The other one would end the processes that the task asks for, or keep those of the agent."""
    with pytest.raises(ValueError, match="call process_reward"):
        mini_terminal.task_reward("stop-one-62")
    with pytest.raises(ValueError, match="call task_reward"):
        mini_terminal.process_reward("count-lines-01")


def test_reward_before_start_is_an_error(execute: Execute) -> None:
    with pytest.raises(RuntimeError, match="start_task"):
        mini_terminal.task_reward("count-lines-01")


@pytest.mark.parametrize(
    "command",
    [
        "mkfifo answer.txt",
        "mkdir answer.txt",
        "ln -s answer.txt answer.txt",
        "ln -s /dev/zero answer.txt",
        "head -c 5000000 /dev/zero > answer.txt",
        "printf '\\xff' > answer.txt",
        "printf '195\\n195\\n' > answer.txt",
        "cd ..; rm -rf count-lines-01",
        "cd ..; rm -rf count-lines-01; echo > count-lines-01",
    ],
)
def test_hostile_answers_score_0(execute: Execute, command: str) -> None:
    mini_terminal.start_task("count-lines-01")
    execute(command)
    assert mini_terminal.task_reward("count-lines-01")["score"] == 0.0


@pytest.mark.parametrize("body", ["yes", "kill -9 0", "exec 1>&-; exit 0", "no-such-program"])
def test_hostile_programs_score_0(execute: Execute, body: str) -> None:
    mini_terminal.start_task("script-sum-46")
    execute(f"printf '#!/bin/bash\\n%s\\n' '{body}' > sum.sh; chmod +x sum.sh")
    assert mini_terminal.task_reward("script-sum-46")["score"] == 0.0


def test_program_that_runs_for_ever_scores_0(
    execute: Execute, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks import base

    monkeypatch.setattr(base.run, "__defaults__", ("", 0.2))
    mini_terminal.start_task("script-sum-46")
    execute("printf '#!/bin/bash\\nsleep 100 & wait\\n' > sum.sh; chmod +x sum.sh")
    reward = mini_terminal.task_reward("script-sum-46")
    assert reward["score"] == 0.0
    assert "ran over 0.2 s" in reward["reason"]


def test_broken_shell_does_not_disturb_the_check(execute: Execute) -> None:
    row = next(row for row in ROWS if row["id"] == "script-retry-53")
    mini_terminal.start_task(row["id"])
    for call in row["reference"]:
        execute(**call["arguments"])
    execute("export PATH=/nowhere BASH_ENV=/dev/full LD_PRELOAD=x; exec 1>&-; kill -9 $$")
    assert mini_terminal.task_reward(row["id"])["score"] == 1.0
