"""Rows of HumanEval, MBPP and LiveCodeBench become tasks; malformed ones are named."""

from __future__ import annotations

import base64
import gzip
import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.errors import ConfigError
from aenv_ray.sampling import load_tasks

HUMANEVAL: dict[str, Any] = {
    "task_id": "HumanEval/900",
    "prompt": 'def double(x: int) -> int:\n    """Return twice x."""\n',
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
}
MBPP: dict[str, Any] = {
    "text": "Write a function to sum a tree.",
    "code": "import math\r\nclass Node: pass\r\ndef total(root): return 0",
    "task_id": 900,
    "test_setup_code": "root = Node()\r\nroot.left = None",
    "test_list": ["assert total(root) == 0", "assert math.pi"],
    "challenge_test_list": [],
}
CASES = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]
LIVE: dict[str, Any] = {
    "question_id": "abc900_a",
    "question_title": "Next",
    "question_content": "Print the next number.",
    "starter_code": "",
    "public_test_cases": json.dumps(CASES),
    "private_test_cases": json.dumps(CASES),
    "metadata": "{}",
}


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def hidden_tests(row: dict[str, Any]) -> list[dict[str, Any]]:
    (task,) = load_tasks([row])
    assert task.reward is not None
    found: list[dict[str, Any]] = task.reward.arguments["tests"]
    return found


def test_humaneval_is_recognized_by_its_fields(tmp_path: Path) -> None:
    file = tmp_path / "HumanEval.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps(HUMANEVAL).encode()))
    (task,) = load_tasks(file)
    assert task.reward is not None
    assert task.reward.timeout_s == 600.0  # gradings that wait for a CPU are not ended before
    assert task.id == "HumanEval/900"
    assert HUMANEVAL["prompt"] in task.instruction
    assert task.reward is not None
    (test,) = task.reward.arguments["tests"]
    assert test["source"].endswith("\n\ncheck(double)\n")
    assert (test["names"], task.reward.arguments["preamble"]) == (["double"], HUMANEVAL["prompt"])
    assert task.reference[0].arguments == {"code": "    return 2 * x\n"}
    shown = task.model_dump(exclude={"reward", "reference"})
    assert "candidate" not in json.dumps(shown)


@pytest.mark.parametrize(
    "row",
    [
        HUMANEVAL | {"test": f"import numpy as np\n\n{HUMANEVAL['test']}"},
        MBPP | {"code": "from numpy.linalg import norm\n\ndef total(root): return 0"},
    ],
    ids=["humaneval", "mbpp"],
)
def test_problems_whose_tests_need_a_package_are_refused(row: dict[str, Any]) -> None:
    """Every solution, the reference too, would earn 0.0."""
    known, task = load_tasks([HUMANEVAL | {"task_id": "known"}, row])
    assert known.unsupported is None
    assert task.unsupported is not None
    assert "tests import numpy; the judge has the standard library only" in task.unsupported


def test_a_prompt_may_end_with_the_header_of_a_function() -> None:
    (test,) = hidden_tests(HUMANEVAL | {"prompt": "import math\n\ndef double(x: int) -> int:\n"})
    assert test["setup"] == "import math\n\ndef double(x: int) -> int:\n    pass\n"
    with pytest.raises(ConfigError, match="prompt is not Python"):
        load_tasks([HUMANEVAL | {"prompt": "def double("}])


def test_live_code_bench_solutions_may_recurse_as_in_its_harness() -> None:
    (task,) = load_tasks([LIVE])
    assert task.reward is not None
    assert task.reward.arguments["preamble"].endswith("\nsys.setrecursionlimit(50000)\n")
    assert task.reward.arguments["limits"] == {"memory_mib": 1536}


def test_mbpp_has_a_test_for_each_assertion() -> None:
    tests = hidden_tests(MBPP)
    assert [one["source"].splitlines()[-1] for one in tests] == MBPP["test_list"]
    assert {tuple(one["names"]) for one in tests} == {("Node", "total")}
    assert {one["setup"] for one in tests} == {"import math"}
    without_code = {k: v for k, v in MBPP.items() if k != "code"} | {"test_setup_code": ""}
    assert {tuple(one["names"]) for one in hidden_tests(without_code)} == {("total",)}


def test_a_row_of_mbpp_may_have_most_fields_of_another_format() -> None:
    """Those of MBPP+ have a prompt and a test, too."""
    row = {**MBPP, "prompt": "Write a function.", "test": "assertion(total([]), 0)"}
    assert len(hidden_tests(row)) == len(MBPP["test_list"])


@pytest.mark.parametrize("private", [json.dumps(CASES), packed(json.dumps(CASES)), CASES])
def test_livecodebench_tests_may_be_text_compressed_or_a_list(private: Any) -> None:
    tests = hidden_tests(LIVE | {"private_test_cases": private})
    assert tests == 2 * [{"kind": "program", "input": "1\n", "expected": "2\n"}]


def test_livecodebench_functions_get_a_json_value_per_line() -> None:
    case = {"input": '[1, 2]\n"x"', "output": "[2]", "testtype": "functional"}
    row = LIVE | {
        "public_test_cases": [case],
        "private_test_cases": "[]",
        "metadata": '{"func_name": "next"}',
    }
    (test,) = hidden_tests(row)
    assert (test["function"], test["arguments"], test["expected"]) == ("next", [[1, 2], "x"], [2])


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("pickled-code-ran",)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (HUMANEVAL | {"test": "def check(:"}, "test is not Python"),
        (HUMANEVAL | {"prompt": None}, "prompt is not text"),
        (MBPP | {"test_list": []}, "test_list is not a list of tests"),
        (MBPP | {"code": "def f(:"}, "code is not Python"),
        (LIVE | {"private_test_cases": "!"}, "neither JSON nor compressed JSON"),
        (LIVE | {"private_test_cases": packed(Evil())}, "test cases contain posix.mkdir"),
        (LIVE | {"public_test_cases": "[]", "private_test_cases": "[]"}, "it has no tests"),
        (LIVE | {"public_test_cases": [{"input": "1"}]}, "'output'"),
    ],
)
def test_a_malformed_problem_is_reported(
    row: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="task 0: not a valid") as caught:
        load_tasks([row])
    assert message in caught.value.message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("row", "field", "name"),
    [(HUMANEVAL, "entry_point", "humaneval"), (LIVE, "private_test_cases", "livecodebench")],
)
def test_a_missing_field_is_reported(row: dict[str, Any], field: str, name: str) -> None:
    lacking = {key: value for key, value in row.items() if key != field}
    with pytest.raises(ConfigError, match=f"task 0: {field} is missing; with it, .* {name}"):
        load_tasks([lacking])


def test_code_that_causes_python_warnings_is_accepted() -> None:
    """MBPP has regular expressions in plain strings; warnings may be errors, as they are here."""
    code = "import re\ndef total(root): return len(re.findall('\\w', root))"
    (task,) = load_tasks([MBPP | {"code": code}])
    assert task.reference
