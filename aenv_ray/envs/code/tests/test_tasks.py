"""The reference solution of every task scores 1; the wrong one and nothing score 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import code_environment
import pytest
from conftest import PROJECT, TASKS, Play


@pytest.mark.parametrize("task", TASKS, ids=[task["id"] for task in TASKS])
def test_reference_scores_1_and_wrong_or_nothing_scores_0(task: dict[str, Any], play: Play) -> None:
    nothing = play(task, None)
    assert (nothing["score"], nothing["reason"]) == (0.0, "nothing was submitted")
    wrong = play(task, task["wrong"][0]["arguments"]["code"])
    assert wrong["score"] == 0.0
    assert 0 < wrong["passed"] < wrong["total"]
    assert wrong["tests"][0]["verdict"] != "passed"
    solved = play(task, task["reference"][0]["arguments"]["code"])
    assert (solved["score"], solved["passed"]) == (1.0, solved["total"])


def test_grading_outlasts_a_busy_node() -> None:
    """A shorter limit would end gradings that wait for a CPU, and solved tasks would score 0."""
    assert {task["reward"]["timeout_s"] for task in TASKS} == {code_environment.MOST_S}


def test_config_names_the_environment_and_hides_its_source() -> None:
    config = json.loads((PROJECT / "config.json").read_text())
    assert config["name"] == "code"
    assert config["deployConfig"]["hideSource"] is True
    assert config["deployConfig"]["network"] == "none"


def test_an_agent_sees_public_tests_and_no_others() -> None:
    for task in TASKS:
        hidden = task["reward"]["arguments"]["tests"]
        public = task["public_tests"]
        assert public
        assert len(hidden) > len(public)
        assert all(one in hidden for one in public)


def test_public_tests_run_before_grading(play: Play) -> None:
    task = TASKS[0]
    play(task, "def run_lengths(items): return [(1, 2), (2, 1)]")
    assert code_environment.run_public_tests()["score"] == 1.0
    assert play(task, "def run_lengths(items): return [(1, 2), (2, 1)]")["score"] == 0.0


def test_agent_writes_runs_and_submits_a_file(play: Play) -> None:
    play(TASKS[0], None)
    code_environment.write_file("answer/solution.py", "print(input()[::-1])\n")
    ran = code_environment.run_code("import answer.solution", stdin="abc\n")
    assert (ran["stdout"], ran["exit_code"], ran["timed_out"]) == ("cba\n", 0, False)
    assert code_environment.submit_solution(path="answer/solution.py")["submitted"]
    with pytest.raises(ValueError, match="not in the work directory"):
        code_environment.submit_solution(path="/etc/hostname")
    with pytest.raises(ValueError, match="either code or path"):
        code_environment.submit_solution()


def test_a_program_that_has_closed_its_outputs_gets_all_of_its_input(play: Play) -> None:
    play(TASKS[0], None)
    code = (
        "import os, sys\nfor fd in (1, 2): os.close(fd)\n"
        "open('size', 'w').write(str(len(sys.stdin.read())))"
    )
    ran = code_environment.run_code(code, stdin="x" * 300_000, timeout=20)
    assert not ran["timed_out"]
    assert Path("size").read_text("utf-8") == "300000"


def test_run_code_ends_in_time_and_cuts_output(play: Play) -> None:
    play(TASKS[0], None)
    assert code_environment.run_code("while True: pass", timeout=0.3)["timed_out"]
    ran = code_environment.run_code("print('x' * 200_000)")
    assert ran["truncated"]
    assert len(ran["stdout"]) == 64 * 1024
