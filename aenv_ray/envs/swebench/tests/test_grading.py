"""Scripts, canaries and verdicts, with stand-ins for the containers and the official package."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import grading
import pytest

PATCH = "diff --git a/code.py b/code.py\n--- a/code.py\n+++ b/code.py\n@@ -1 +1 @@\n-a\n+b\n"
TESTS = PATCH.replace("code.py", "tests/test_code.py")
INSTANCE: dict[str, Any] = {
    "instance_id": "own-1",
    "repo": "own/repo",
    "version": "",
    "base_commit": "abc",
    "directory": "/testbed",
    "test_patch": TESTS,
    "FAIL_TO_PASS": ["tests/test_code.py::test_a"],
    "PASS_TO_PASS": [],
    "eval_script": "",
    "test_cmd": ["make", "python -m pytest -rA"],
    "log_parser": "",
    "eval_type": "pass_and_fail",
    "bug_patch": "",
    "gold_files": ["code.py"],
}
PASSED = {
    "tests_status": {
        "FAIL_TO_PASS": {"success": ["tests/test_code.py::test_a"], "failure": []},
        "PASS_TO_PASS": {"success": [], "failure": []},
    },
    "resolved": True,
    "conflicts": [],
}
LOG = f"+ : '{grading.START}'\n+ : '{grading.END}'\n"


@dataclass
class Done:
    exit_code: int = 0
    stdout: bytes = LOG.encode()
    stderr: bytes = b""
    truncated: bool = False


@dataclass
class FakeBox:
    """A container whose commands do what they are told, except the refused ones."""

    refused: tuple[str, ...] = ()
    commands: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    def exec(self, command: list[str], *, timeout_s: float) -> Done:
        assert timeout_s > 0
        self.commands.append(command[-1])
        return Done(exit_code=int(any(word in command[-1] for word in self.refused)))

    def write_file(self, path: str, data: bytes | str) -> int:
        self.files[path] = str(data)
        return len(data)


@dataclass
class FakePackage:
    """The official package: reports what it is told, and the canary's tests."""

    report: dict[str, Any] = field(default_factory=lambda: dict(PASSED))
    canary: tuple[str, ...] = ("PASSED", "FAILED")
    box: FakeBox = field(default_factory=FakeBox)
    grades: int = 0

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "script":
            return {"script": request["instance"]["eval_script"]}
        self.grades += 1
        known = self.canary if self.grades == 2 else ("PASSED", "FAILED")
        tests = next(t for p, t in self.box.files.items() if "/tests/test_" in p)
        names = [word.split("(")[0] for word in tests.split("def ")[1:]]
        statuses = {f"x::{name}": status for name, status in zip(names, known, strict=False)}
        return {**self.report, "statuses": statuses}


def verdict(package: FakePackage, patch: str = PATCH, **more: Any) -> grading.Grade:
    return grading.grade(INSTANCE | more, patch, package.box, package, timeout_s=60)


def test_a_resolved_report_is_a_resolved_verdict() -> None:
    found = verdict(FakePackage())
    assert (found.resolved, found.result()["score"]) == (True, 1.0)


def test_an_empty_patch_starts_nothing() -> None:
    package = FakePackage()
    assert not verdict(package, " \n").resolved
    assert package.box.commands == []


@pytest.mark.parametrize(
    ("package", "reason"),
    [
        (FakePackage({**PASSED, "conflicts": ["a"]}), "contradicts itself about a"),
        (FakePackage(canary=("PASSED", "PASSED")), "not that of the test runner"),
        (FakePackage(canary=()), "not that of the test runner"),
        (FakePackage({"resolved": False, "conflicts": []}), "no results"),
        (FakePackage(box=FakeBox(refused=("apply", "patch"))), "does not apply"),
    ],
)
def test_a_report_that_is_not_that_of_the_tests_resolves_nothing(
    package: FakePackage, reason: str
) -> None:
    found = verdict(package)
    assert not found.resolved
    assert reason in found.reason


def test_a_second_mark_in_the_output_resolves_nothing() -> None:
    log = LOG + grading.END
    assert "marks" in grading.why_unresolved(PASSED, {}, log, None)
    assert grading.why_unresolved(PASSED, {}, LOG, None) == ""


def test_failures_are_named() -> None:
    status = {"FAIL_TO_PASS": {"failure": list("abcdefg")}, "PASS_TO_PASS": {"failure": []}}
    report = {"resolved": False, "tests_status": status}
    assert grading.why_unresolved(report, {}, LOG, None) == "failed: a, b, c, d, e and 2 more"


def test_tests_that_take_too_long_resolve_nothing() -> None:
    class Slow(FakeBox):
        def exec(self, command: list[str], *, timeout_s: float) -> Done:
            if timeout_s == 60:
                raise TimeoutError
            return super().exec(command, timeout_s=timeout_s)

    assert "longer than 60 s" in verdict(FakePackage(box=Slow())).reason


def test_a_patch_whose_tests_write_too_much_resolves_nothing() -> None:
    """An error would leave the episode out of means, and a patch can cause it."""

    class Chatty(FakeBox):
        def exec(self, command: list[str], *, timeout_s: float) -> Done:
            done = super().exec(command, timeout_s=timeout_s)
            return replace(done, truncated=timeout_s == 60)

    found = verdict(FakePackage(box=Chatty()))
    assert (found.resolved, "10 MiB" in found.reason) == (False, True)


def test_a_container_that_starts_no_program_is_no_fault_of_the_patch() -> None:
    class Full(FakeBox):
        def exec(self, command: list[str], *, timeout_s: float) -> Done:
            return Done(126, b"", b"bash: Resource temporarily unavailable\n")

    with pytest.raises(grading.GradingError, match="temporarily unavailable"):
        verdict(FakePackage(box=Full()))


def test_a_script_restores_the_tests_and_runs_them_between_the_marks() -> None:
    lines = grading.script_lines(INSTANCE)
    run = lines.index("python -m pytest -rA tests/test_code.py")
    assert lines[run - 2 :][:2] == [f": '{grading.START}'", "make"]
    assert lines[run + 1 :] == [f": '{grading.END}'"]
    assert any("git checkout abc -- $file" in line for line in lines[:run])


@pytest.mark.parametrize(
    ("command", "file", "argument"),
    [
        ("pytest -rA {}", "tests/test_a.py", "/testbed/tests/{}.py"),
        ("PYTHONPATH=. python3.9 -W error -m pytest {}", "a.py", "/testbed/{}.py"),
        ("python -m unittest -v a", "a.py", "/testbed/{}.py"),
        ("tox --current-env -epy39 -v -- {}", "tests/test_a.py", "/testbed/tests/{}.py"),
        ("./tests/runtests.py --verbosity 2 a.b.tests", "tests/a/b/tests.py", "a.b.{}"),
        ("W='a::B,c::D' bin/test -C --verbose {}", "sympy/tests/test_a.py", "sympy/tests/{}.py"),
        ("/opt/bin/pytest", "a.py", "/testbed/{}.py"),
    ],
)
def test_a_canary_is_added_where_a_known_runner_runs(
    command: str, file: str, argument: str
) -> None:
    command = command.format(file)
    lines = ["cd /testbed", "make", f": '{grading.START}'", command, f": '{grading.END}'"]
    canary = grading.canary_of(lines, "/testbed", {file, "z.txt"})
    assert canary is not None
    name = canary.path.rpartition("/")[2].removesuffix(".py")
    assert canary.argument == argument.format(name)
    assert canary.path.rpartition("/")[0] == f"/testbed/{file}".rpartition("/")[0]
    assert grading.with_canary(lines, canary)[3] == f"{command} {canary.argument}"
    alone = grading.only_canary(lines, canary, {file, "z.txt"})
    assert "make" not in alone
    assert file not in alone[-2].split()
    assert "tests" not in alone[-2].rpartition(".")[2]
    assert alone[-2].endswith(f" {canary.argument}")


@pytest.mark.parametrize("command", ["npm test", "tox -e py39", "bash bin/test-all", "make pytest"])
def test_no_canary_is_added_where_no_known_runner_runs(command: str) -> None:
    lines = [f": '{grading.START}'", command, f": '{grading.END}'"]
    assert grading.canary_of(lines, "/testbed", ()) is None
    canary = grading.Canary("/testbed/test_a.py", "test_a.py", "test_b", "test_c")
    assert grading.with_canary(lines, canary) == lines
    assert grading.only_canary(lines, canary, ()) == []


SUMMARY = """
PASSED r2e_tests/test_1.py::test_printed
\x1b[36m==== short test summary info ====\x1b[0m
\x1b[32mPASSED\x1b[0m r2e_tests/test_1.py::\x1b[1mA::test_x\x1b[0m
SKIPPED [1] r2e_tests/test_1.py:7: not here
XFAIL r2e_tests/test_1.py::test_later
FAILED r2e_tests/test_1.py::test_y - assert 1 == 2
"""


def test_an_instance_of_r2e_gym_needs_all_expected_statuses() -> None:
    expected = {"A.test_x": "PASSED", "test_y": "FAILED"}
    statuses = grading.r2e_statuses(SUMMARY)
    assert statuses == expected
    assert grading.r2e_report(expected, statuses)["resolved"]
    for changed in ({**statuses, "test_z": "PASSED"}, {"A.test_x": "PASSED"}):
        report = grading.r2e_report(expected, changed)
        assert "failed: test_" in grading.why_unresolved(report, changed, LOG, None)
    lines = grading.described({**INSTANCE, "test_cmd": ["bash run_tests.sh"], "expected": expected})
    assert "bash run_tests.sh\n" in lines["eval_script"]


def test_a_missing_package_is_named(tmp_path: Any) -> None:
    with pytest.raises(grading.GradingError, match=r"aenv build swebench"):
        grading.packages(str(tmp_path))({"do": "script", "instance": INSTANCE})
