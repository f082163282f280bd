"""Grading of a patch in a container of its task that no agent has reached.

The steps are those of the official harness: apply the patch, run the official test script, and let
the official log parser and grading read the output. On top of that, a resolved verdict must be
consistent, because the code of a patch runs in the same process as the tests:

* The marks around the test output appear once.
* No line of the output reports a required test as failed.
* Where a known runner runs the tests (pytest, unittest, Django's, SymPy's), it also runs two tests
  with random names: one passes, and one fails. Both must be reported as what they are. If they are
  not reported without the patch either, they are not used.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol

import patches

PROGRAM: Final = Path(__file__).with_name("official.py").read_text(encoding="utf-8")
"""Read at once: the sources are hidden once they are loaded."""
FAILED_PROGRAM_S: Final = 120.0
"""Longest run of the official package's code."""
STEP_S: Final = 300.0
"""Longest run of git in the container."""
START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
APPLY: Final = (
    "git apply --verbose {patch}",
    "git apply --verbose --3way {patch}",
    "git apply --verbose --reject {patch}",
    "patch --batch --forward --fuzz=5 -p1 -i {patch}",
)
"""What the official harness tries in turn, each on the unchanged repository."""
CLEAN: Final = "git checkout -- . ; git clean -fdq"
ACTIVATE: Final = (
    "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate; "
    "conda activate testbed; fi"
)
PYTEST: Final = re.compile(
    r"^\s*(?:[A-Z_]+=\S+\s+)*(?:\S*python[\d.]*\s+(?:-[A-LN-Za-ln-z]\S*\s+(?:[^-\s]\S*\s+)?)*-m\s+)?(?:\S*/)?pytest\b"
)
UNITTEST: Final = re.compile(r"^\s*(?:[A-Z_]+=\S+\s+)*\S*python[\d.]*\s+-m\s+unittest\b")
TOX: Final = re.compile(r"^\s*(?:[A-Z_]+=\S+\s+)*(?:\S*/)?tox\s.*\s--(?:\s|$)")
"""Passes what follows ``--`` to the test runner that its configuration names, in Sphinx pytest."""
DJANGO: Final = re.compile(
    r"^\s*(?:[A-Z_]+=\S+\s+)*(?:\S*python[\d.]*\s+)?(?:\./)?tests/runtests\.py\b"
)
SYMPY: Final = re.compile(r"^\s*(?:[A-Z_]+=\S+\s+)*(?:\S*python[\d.]*\s+)?(?:\./)?bin/test\s")
R2E_TESTS: Final = "r2e_tests"
R2E_SCRIPT: Final = "run_tests.sh"
"""For a repository in an image of R2E-Gym: the directory of the hidden tests, and what runs
them."""
SUMMARY: Final = "short test summary info"
ANSI: Final = re.compile(r"\x1b\[[0-9;]*m|\r")
_NOT_RUN: Final = 126
PLACES: Final = ("cd ", "source ", ". ", "conda ", "export ", "if [ -f /opt/miniconda3")


class Result(Protocol):
    """What a command in the container gave; see `aenv_ray.runtime.sidecar.CommandResult`."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    truncated: bool


class Box(Protocol):
    """The container of a task; the module `aenv_ray.runtime.sidecar` is one."""

    def exec(self, command: list[str], *, timeout_s: float) -> Result:
        """Run a command."""

    def write_file(self, path: str, data: bytes | str) -> int:
        """Write a file."""


class GradingError(Exception):
    """An instance cannot be graded: it, its image or this image is at fault, not the patch."""


class OutputTooLong(GradingError):
    """The tests write more than can be read."""


@dataclass(frozen=True)
class Grade:
    """The grade of a patch."""

    resolved: bool
    reason: str
    """In words; of an unresolved one, why."""
    left_out: tuple[str, ...] = ()
    """Paths whose changes were not graded."""
    report: dict[str, Any] = field(default_factory=dict)
    """The report of the official grading: ``tests_status``, ``patch_successfully_applied`` and
    more."""
    log_tail: str = ""
    """End of the tests' output."""

    def result(self) -> dict[str, Any]:
        """Return the result of the reward."""
        return {
            "score": float(self.resolved),
            "resolved": self.resolved,
            "reason": self.reason,
            "left_out": list(self.left_out),
            "report": self.report,
            "log_tail": self.log_tail,
        }


Official = Callable[[dict[str, Any]], dict[str, Any]]
"""Asks the official package; see `official`."""


def packages(root: str) -> Official:
    """Return what asks the official package.

    Args:
        root: A directory with the directories ``4`` and ``5``, in which releases are installed.
    """

    def ask(request: dict[str, Any]) -> dict[str, Any]:
        is_specified = request["specs"]["repo"] if "specs" in request else True
        if "instance" in request:
            is_specified = not request["instance"].get("eval_script")
        release = "4" if is_specified else "5"
        directory = Path(root, release)
        if not (directory / "swebench").is_dir():
            raise GradingError(
                f"there is no swebench package in {directory} of this image: make one with "
                "`aenv build swebench`"
            )
        done = subprocess.run(
            [sys.executable, "-I", "-c", PROGRAM, str(directory)],
            input=json.dumps(request), capture_output=True, text=True, check=False,
            timeout=FAILED_PROGRAM_S,
        )  # fmt: skip
        if done.returncode:
            raise GradingError(f"swebench {release} failed: {done.stderr[-2000:]}")
        answer: dict[str, Any] = json.loads(done.stdout)
        if "error" in answer:
            raise GradingError(answer["error"])
        return answer

    return ask


def described(instance: dict[str, Any]) -> dict[str, Any]:
    """Return an instance that has its own script or test command as one with script and parser."""
    if instance.get("eval_script"):
        return {"log_parser": "parse_log_pytest", "eval_type": "pass_and_fail", **instance}
    if not instance.get("test_cmd"):
        return instance
    return {
        "eval_type": "pass_and_fail",
        **instance,
        "log_parser": instance.get("log_parser") or "parse_log_pytest",
        "eval_script": "\n".join(
            r2e_lines(instance) if instance.get("expected") else script_lines(instance)
        ),
    }


def r2e_lines(instance: dict[str, Any]) -> list[str]:
    """Return the test script of an instance of R2E-Gym, whose image has the hidden tests."""
    return [
        f"cd {shlex.quote(instance['directory'])}",
        f"[ -e {R2E_TESTS} ] || ln -s /{R2E_TESTS} {R2E_TESTS}",
        f"export PATH={shlex.quote(instance['directory'])}/.venv/bin:$PATH",
        f": '{START}'",
        *instance["test_cmd"],
        f": '{END}'",
    ]


def r2e_commands(directory: str, box: Box) -> list[str]:
    """Return the lines of the script that runs the tests in an image of R2E-Gym.

    Raises:
        GradingError: The image has none.
    """
    what = f"the task's image has no {directory}/{R2E_SCRIPT}, which images of R2E-Gym have"
    lines = run_git(f"cat {R2E_SCRIPT}", directory, box, what).splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def r2e_statuses(log: str) -> dict[str, str]:
    """Return the status of each test in pytest's summary, by its name without the file.

    As in R2E-Gym, only passed and failed tests and errors count, not those that were skipped.
    """
    sections = ANSI.sub("", log).split(SUMMARY)
    found = {}
    for line in sections[1].splitlines() if len(sections) > 1 else []:
        status = next((one for one in ("PASSED", "FAILED", "ERROR") if one in line), None)
        if status is not None:
            found[".".join(line.split("::")[1:]).split(" - ")[0]] = status
    return found


def unexpected(expected: dict[str, str], statuses: dict[str, str]) -> list[str]:
    """Return the tests whose status differs from the expected one."""
    names = sorted({*expected, *statuses})
    return [name for name in names if expected.get(name) != statuses.get(name)]


def script_lines(instance: dict[str, Any]) -> list[str]:
    """Return the test script of an instance with a test command."""
    commands = instance["test_cmd"]
    commands = [commands] if isinstance(commands, str) else list(commands)
    test_patch = instance["test_patch"]
    files = shlex.join(test_files(instance))
    if PYTEST.match(commands[-1]) and files:
        commands[-1] = f"{commands[-1]} {files}"
    restore = f"git checkout {shlex.quote(instance['base_commit'] or 'HEAD')} --"
    known = shlex.join(sorted(patches.paths(test_patch) or test_files(instance)))
    lines = [ACTIVATE, f"cd {shlex.quote(instance['directory'])}"]
    # One at a time: git restores none if one of them is new.
    lines += [f"for file in {known}; do {restore} $file; done"] if known else []
    if test_patch.strip():
        end = f"EOF_{secrets.token_hex(8)}"
        lines += [f"git apply -v - <<'{end}'", *test_patch.rstrip("\n").split("\n"), end]
    return [*lines, f": '{START}'", *commands, f": '{END}'"]


def test_files(instance: dict[str, Any]) -> list[str]:
    """Return the files of an instance's tests."""
    changed = patches.paths(instance["test_patch"])
    if changed:
        return sorted(path for path in changed if path.endswith((".py", ".t", ".sh")))
    required = [*instance["FAIL_TO_PASS"], *instance["PASS_TO_PASS"]]
    return sorted({name.partition("::")[0] for name in required if "::" in name})


# --- canaries ------------------------------------------------------------------------------------


CASE: Final = """\
import unittest


class TestMore(unittest.TestCase):
    def {passing}(self):
        pass

    def {failing}(self):
        self.fail()
"""
FUNCTIONS: Final = """\
def {passing}():
    pass


def {failing}():
    assert False
"""
"""For SymPy's own runner, which knows no classes of tests."""


def _label(path: str) -> str:
    """Return what Django's test runner calls a file of tests, such as ``admin_views.tests``."""
    return ".".join(PurePosixPath(path.removeprefix("tests/")).with_suffix("").parts)


@dataclass(frozen=True)
class Runner:
    """A test runner to which a canary can be added."""

    command: re.Pattern[str]
    """How the lines begin that start it."""
    called: Callable[[str], str] | None = None
    """What its command line calls a file of tests, by its path in the repository; None: its path,
    which may also be absolute."""
    text: str = CASE

    def names(self, tests: Collection[str]) -> dict[str, str]:
        """Return the paths of files of tests by what the command line calls them."""
        return {self.called(path) if self.called else path: path for path in sorted(tests)}


RUNNERS: Final = (
    Runner(PYTEST),
    Runner(UNITTEST),
    Runner(TOX),
    Runner(DJANGO, _label),
    Runner(SYMPY, str, FUNCTIONS),
)


@dataclass(frozen=True)
class Canary:
    """Two tests of which one passes and one fails, under names that nobody can know before."""

    path: str
    argument: str
    """What the command line of the test runner calls its file."""
    passing: str
    failing: str
    template: str = CASE

    @property
    def text(self) -> str:
        """The content of its file."""
        return self.template.format(passing=self.passing, failing=self.failing)

    def has(self, name: str) -> bool:
        """Return whether this is the name of one of its tests."""
        return self.passing in name or self.failing in name

    def is_reported(self, statuses: dict[str, str]) -> bool:
        """Return whether both tests are reported as what they are."""
        passing = {status for name, status in statuses.items() if self.passing in name}
        failing = {status for name, status in statuses.items() if self.failing in name}
        return (passing, failing) == ({"PASSED"}, {"FAILED"})


def canary_of(lines: list[str], directory: str, tests: Collection[str]) -> Canary | None:
    """Return a canary for a test script; None if no known runner runs its tests."""
    found = runner_line(lines)
    if found is None:
        return None
    number, runner = found
    words = lines[number].split()
    first = next((path for name, path in runner.names(tests).items() if name in words), "")
    one, two, three = (secrets.token_hex(4) for _ in range(3))
    place = str(PurePosixPath(first).parent / f"test_{one}.py")
    path = str(PurePosixPath(directory, place))
    argument = runner.called(place) if runner.called else path
    return Canary(path, argument, f"test_{two}", f"test_{three}", runner.text)


def runner_line(lines: list[str]) -> tuple[int, Runner] | None:
    """Return the number of the last line between the marks that starts a known runner."""
    marks = [number for number, line in enumerate(lines) if START in line or END in line]
    if len(marks) < 2:
        return None
    between = range(marks[0] + 1, marks[1])
    found = [(n, one) for n in between for one in RUNNERS if one.command.match(lines[n])]
    return found[-1] if found else None


def with_canary(lines: list[str], canary: Canary) -> list[str]:
    """Return a script that runs the canary's tests after the others."""
    found = runner_line(lines)
    if found is None:
        return lines
    number, _ = found
    line = f"{lines[number].rstrip()} {shlex.quote(canary.argument)}"
    return [*lines[:number], line, *lines[number + 1 :]]


def only_canary(lines: list[str], canary: Canary, tests: Collection[str]) -> list[str]:
    """Return a script that runs only the canary's tests, as the script runs its tests."""
    found = runner_line(lines)
    if found is None:
        return []
    number, runner = found
    command = lines[number]
    if starts := UNITTEST.match(command):
        command = f"{starts.group()} -v"
    else:
        named = runner.names(tests)
        command = " ".join(word for word in command.split() if word not in named)
    places = [line for line in lines[:number] if line.startswith(PLACES)]
    run = f"{command} {shlex.quote(canary.argument)}"
    return ["#!/bin/bash", "set -uxo pipefail", *places, f": '{START}'", run, f": '{END}'"]


# --- grading -------------------------------------------------------------------------------------


def grade(
    instance: dict[str, Any], patch: str, box: Box, ask: Official, *, timeout_s: float
) -> Grade:
    """Return the verdict about a patch.

    Args:
        instance: A row of a data set, as the loader hands it over.
        patch: What the agent submitted.
        box: A new container of the task's image.
        ask: Asks the official package.
        timeout_s: Longest run of the tests in seconds.

    Raises:
        GradingError: The verdict cannot be found, whatever the patch.
    """
    if not patch.strip():
        return Grade(False, "the patch is empty")
    is_r2e = bool(instance.get("expected"))
    if is_r2e:
        instance = {**instance, "test_cmd": r2e_commands(instance["directory"], box)}
    instance = described(instance)
    if instance.get("bug_patch"):
        introduce(instance["bug_patch"], instance["directory"], box)
    tests = patches.paths(instance["test_patch"]) | set(instance.get("hidden") or ())
    if is_r2e:
        tests |= {R2E_TESTS, *of_r2e_tests(patches.paths(patch))}
    submission = patches.permitted(patch, tests, instance.get("gold_files") or ())
    script = ask({"do": "script", "instance": instance})["script"]
    canary = _working_canary(script.split("\n"), instance, tests, box, ask)
    if not submission.patch:
        return Grade(False, "the patch changes only tests", submission.left_out)
    mark = _mark(instance["directory"], box)
    applied, output = _apply(submission.patch, instance["directory"], box)
    if not applied:
        return Grade(False, f"the patch does not apply: {output[-2000:]}", submission.left_out)
    changed = _changed_since(mark, instance["directory"], box)
    if is_r2e:
        tests |= of_r2e_tests(changed)
    hidden = patches.steering(changed, tests, instance.get("gold_files") or ())
    if hidden:
        reason = f"the patch changes files that steer the tests, and hides it: {', '.join(hidden)}"
        return Grade(False, reason, submission.left_out)
    lines = script.split("\n")
    if canary is not None:
        box.write_file(canary.path, canary.text)
        lines = with_canary(lines, canary)
    try:
        log = _run(lines, box, timeout_s)
    except TimeoutError:
        reason = f"the tests took longer than {timeout_s:g} s"
        return Grade(False, reason, submission.left_out)
    except OutputTooLong as exc:  # the patch can cause it
        return Grade(False, str(exc), submission.left_out)
    report = ask({"do": "grade", "instance": instance, "patch": submission.patch, "log": log})
    statuses = report.pop("statuses")
    if is_r2e:
        statuses = r2e_statuses(log)
        own = {n: s for n, s in statuses.items() if canary is None or not canary.has(n)}
        report = r2e_report(instance["expected"], own)
    reason = why_unresolved(report, statuses, log, canary)
    return Grade(not reason, reason or "resolved", submission.left_out, report, log[-4000:])


def of_r2e_tests(paths: Collection[str]) -> set[str]:
    """Return those of some paths that R2E-Gym's hidden tests have."""
    return {path for path in paths if path.startswith((R2E_TESTS, R2E_SCRIPT))}


def r2e_report(expected: dict[str, str], statuses: dict[str, str]) -> dict[str, Any]:
    """Return a report in the official form about an instance of R2E-Gym."""
    failure = unexpected(expected, statuses)
    success = [name for name in expected if name not in failure]
    tests = {
        "FAIL_TO_PASS": {"success": success, "failure": failure},
        "PASS_TO_PASS": {"success": [], "failure": []},
    }
    return {"resolved": not failure, "tests_status": tests, "conflicts": []}


def why_unresolved(
    report: dict[str, Any], statuses: dict[str, str], log: str, canary: Canary | None
) -> str:
    """Return why a report does not resolve an instance; empty if it does."""
    if not report["resolved"]:
        tests = report.get("tests_status")
        if tests is None:
            return "the output has no results of the tests"
        failed = [*tests["FAIL_TO_PASS"]["failure"], *tests["PASS_TO_PASS"]["failure"]]
        more = f" and {len(failed) - 5} more" if len(failed) > 5 else ""
        return f"failed: {', '.join(failed[:5])}{more}"
    if log.count(START) != 1 or log.count(END) != 1:
        return "the output has marks that the test script did not write"
    if report["conflicts"]:
        return f"the output contradicts itself about {', '.join(report['conflicts'][:5])}"
    if canary is not None and not canary.is_reported(statuses):
        return "the report is not that of the test runner: it lacks the tests that were added"
    return ""


def introduce(bug_patch: str, directory: str, box: Box) -> None:
    """Apply the patch that makes a repository wrong, and forget how it was before.

    Raises:
        GradingError: It does not apply.
    """
    applied, output = _apply(bug_patch, directory, box)
    if not applied:
        raise GradingError(f"the patch that introduces the bug does not apply: {output[-2000:]}")
    run_git(
        f"rm -rf .git && git init -q && git add -A && {COMMIT} -qm task",
        directory,
        box,
        "a new repository cannot be made",
    )


COMMIT: Final = "git -c user.name=task -c user.email=task@localhost commit"


def run_git(command: str, directory: str, box: Box, what: str) -> str:
    """Run a command in the repository.

    Raises:
        GradingError: It failed.
    """
    exit_code, output = _shell(command, directory, box)
    if exit_code:
        raise GradingError(f"{what}: {output[-2000:]}")
    return output


def _shell(command: str, directory: str, box: Box) -> tuple[int, str]:
    text = f"cd {shlex.quote(directory)} && {{ {command}\n}} 2>&1"
    result = _exec(text, box, STEP_S)
    return result.exit_code, result.stdout.decode(errors="replace")


def _exec(text: str, box: Box, timeout_s: float) -> Result:
    result = box.exec(["bash", "-c", text], timeout_s=timeout_s)
    # The texts redirect their errors: this one is of the container, which could not start bash.
    if result.exit_code == _NOT_RUN and result.stderr:
        raise GradingError(result.stderr.decode(errors="replace").strip())
    return result


def _apply(patch: str, directory: str, box: Box) -> tuple[bool, str]:
    path = f"/tmp/{secrets.token_hex(8)}.diff"
    box.write_file(path, patch)
    output = ""
    for number, command in enumerate(APPLY):
        if number:
            _shell(CLEAN, directory, box)
        exit_code, output = _shell(command.format(patch=path), directory, box)
        if exit_code == 0:
            return True, output
    exit_code, _ = _shell(f"git apply --check --reverse {path}", directory, box)
    return exit_code == 0, output


def _mark(directory: str, box: Box) -> str:
    """Return the path of a file that is older than all changes that follow."""
    path = f"/tmp/{secrets.token_hex(8)}.mark"
    run_git(f"touch {path} && sleep 0.05", directory, box, "a file cannot be written")
    return path


def _changed_since(mark: str, directory: str, box: Box) -> list[str]:
    """Return the files that are younger, whatever a patch calls them."""
    find = "find . -path ./.git/objects -prune -o '(' -type f -o -type l ')'"
    # Busybox does not know the first form.
    command = f"{find} -cnewer {mark} -print 2>/dev/null || {find} -newer {mark} -print"
    output = run_git(command, directory, box, "the changed files cannot be listed")
    return [line.removeprefix("./") for line in output.splitlines()]


def _run(lines: list[str], box: Box, timeout_s: float) -> str:
    """Return what a script writes; through a pipe, so that nothing can change it afterwards."""
    path = f"/tmp/{secrets.token_hex(8)}.sh"
    box.write_file(path, "\n".join(lines) + "\n")
    result = _exec(f"exec bash {path} 2>&1 </dev/null", box, timeout_s)
    if result.truncated:
        raise OutputTooLong("the tests wrote more than 10 MiB; have them write less")
    return result.stdout.decode(errors="replace")


def _working_canary(
    lines: list[str], instance: dict[str, Any], tests: Collection[str], box: Box, ask: Official
) -> Canary | None:
    """Return a canary that is reported without the patch; None if there is none."""
    canary = canary_of(lines, instance["directory"], tests)
    if canary is None:
        return None
    box.write_file(canary.path, canary.text)
    try:
        log = _run(only_canary(lines, canary, tests), box, STEP_S)
    except TimeoutError as exc:  # without the canary, a forged report could be believed
        text = f"a single test did not end within {STEP_S:g} s without the patch: the node is slow"
        raise GradingError(text) from exc
    finally:
        _shell(f"rm -f {shlex.quote(canary.path)}", instance["directory"], box)
    graded = ask({"do": "grade", "instance": instance, "patch": "canary", "log": log})
    return canary if canary.is_reported(graded["statuses"]) else None
