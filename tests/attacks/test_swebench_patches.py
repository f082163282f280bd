"""Patches whose code runs in the process of the tests that judge it cannot forge the verdict.

The grading of the built-in environment swebench, with the official package and real test runners,
runs on this machine instead of in a container.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from aenv_ray.project.project import builtins
from aenv_ray.sampling import load_tasks
from tests.ray.envs.swe_repositories import (
    GAUGE,
    IDENTITY,
    INTERVALS,
    LEDGER,
    Repository,
    begin,
    diff,
    make,
    make_r2e,
    packages,
    write,
)

OWN, MONEY = "src/intervals/__init__.py", "ledger/money.py"
PASSED = "\\n".join(f"PASSED {name}" for name in INTERVALS.fail_to_pass + INTERVALS.pass_to_pass)
MADE_UP = """
import _pytest.reports as reports
made = reports.TestReport.from_item_and_call.__func__
def made_up(cls, item, call):
    call.excinfo = None
    return made(cls, item, call)
reports.TestReport.from_item_and_call = classmethod(made_up)
"""
LABELLED = Repository(
    "own__labels-6",
    {
        "tests/runtests.py": "import sys\nimport unittest\n\nsys.path[:0] = ['.', 'tests']\n"
        "labels = [one for one in sys.argv[1:] if not one.startswith('-')]\n"
        "suite = unittest.defaultTestLoader.loadTestsFromNames(labels)\n"
        "unittest.TextTestRunner(verbosity=2).run(suite)\n",
        **{name: text for name, text in LEDGER.files.items() if not name.startswith("tests")},
    },
    LEDGER.gold,
    {"tests/money/tests.py": LEDGER.tests["tests/test_money.py"]},
    ["test_rounding (money.tests.MoneyTest.test_rounding)"],
    ["test_whole (money.tests.MoneyTest.test_whole)"],
    {
        "repo": "own/labels",
        "test_cmd": "python tests/runtests.py --verbosity 2 money.tests",
        "log_parser": "parse_log_django",
    },
)
"""Tested as Django is: its own program runs tests by label."""

PLAIN = Repository(
    "own__plain-7",
    {
        "bin/test": "import runpy\nimport sys\n\nsys.path.insert(0, '.')\n"
        "for path in sys.argv[3:]:\n"
        "    for name, value in runpy.run_path(path).items():\n"
        "        if name.startswith('test_'):\n"
        "            try:\n                value()\n"
        "            except AssertionError:\n                print(name, 'F', ' ' * 9, '[FAIL]')\n"
        "                print('____', path + ':' + name, '____')\n"
        "            else:\n                print(name, 'ok')\n",
        **{name: text for name, text in LEDGER.files.items() if not name.startswith("tests")},
    },
    LEDGER.gold,
    {
        "ledger/tests/test_money.py": "from ledger.money import cents\n\n\n"
        "def test_whole():\n    assert cents('3') == 300\n\n\n"
        "def test_rounding():\n    assert cents('0.29') == 29\n"
    },
    ["test_rounding"],
    ["test_whole"],
    {
        "repo": "own/plain",
        "test_cmd": "python bin/test -C --verbose ledger/tests/test_money.py",
        "log_parser": "parse_log_sympy",
    },
)
"""Tested as SymPy is: its own program runs functions."""
CONFTEST = "def pytest_runtest_makereport(item, call):\n    call.excinfo = None\n"
TESTS = "class TestOverlap:\n    def test_empty(self): pass\n    def test_apart(self): pass\n"


class Machine:
    """Runs what is meant for a task's container here; git's configuration is a file of the test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        own = {"GIT_CONFIG_GLOBAL": str(directory / "gitconfig"), "HOME": str(directory)}
        quick = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        programs = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        self._variables = {**os.environ, **IDENTITY, **own, **quick, **programs}

    def exec(self, command: list[str], *, timeout_s: float) -> Any:
        done = subprocess.run(
            command, cwd=self._directory, env=self._variables, capture_output=True, check=False,
            timeout=min(timeout_s, 60),
        )  # fmt: skip
        return SimpleNamespace(exit_code=done.returncode, stdout=done.stdout, truncated=False)

    def write_file(self, path: str, data: bytes | str) -> int:
        place = self._directory / path
        place.parent.mkdir(parents=True, exist_ok=True)
        return place.write_bytes(data.encode() if isinstance(data, str) else data)


@pytest.fixture(scope="module")
def grading() -> Iterator[ModuleType]:
    """The environment's code, which imports its own modules by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(builtins()["swebench"] / "src"))
        import grading

        yield grading
        for name in ("grading", "patches"):
            patch.delitem(sys.modules, name)


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory, grading: ModuleType) -> Any:
    return grading.packages(str(packages(tmp_path_factory.mktemp("packages"))))


def appended(repository: Repository, path: str, code: str) -> dict[str, str]:
    return {path: repository.files[path] + code}


def printing(repository: Repository, code: str) -> dict[str, str]:
    """Return a change that runs code with the passed results of all tests in ``text``."""
    form = "{} ok" if repository is PLAIN else "{} ... ok"
    lines = map(form.format, (*repository.fail_to_pass, *repository.pass_to_pass))
    return appended(repository, MONEY, f"text = {chr(10).join(lines)!r}\n{code}")


EXITS = "import os\nprint(text, flush=True)\nos._exit(0)\n"
AT_EXIT = "import atexit\natexit.register(print, text)\n"
INTERRUPTS = f"""
import sys
whole = cents
def cents(amount):
    print(file=sys.stderr)
    return whole(amount)
{AT_EXIT}
"""
"""Also puts the result of a test on another line than its name."""


@pytest.mark.parametrize(
    ("repository", "files", "reason"),
    [
        (INTERVALS, INTERVALS.gold, "resolved"),
        (LEDGER, LEDGER.gold, "resolved"),
        (INTERVALS, {"src/intervals/test_overlap.py": TESTS}, "only tests"),
        (INTERVALS, {"conftest.py": CONFTEST, "x.pth": "import os", "pytest.py": ""}, "only tests"),
        (
            INTERVALS,
            appended(INTERVALS, OWN, f"import atexit\natexit.register(print, '{PASSED}')\n"),
            "contradicts itself",
        ),
        (INTERVALS, appended(INTERVALS, OWN, MADE_UP), "not that of the test runner"),
        (
            INTERVALS,
            appended(INTERVALS, OWN, f"print('{PASSED}\\n>>>>> End Test Output')\n"),
            "",
        ),
        (LEDGER, printing(LEDGER, EXITS), "not that of the test runner"),
        (LABELLED, LABELLED.gold, "resolved"),
        (LABELLED, printing(LABELLED, EXITS), "not that of the test runner"),
        (LABELLED, printing(LABELLED, AT_EXIT), "contradicts itself"),
        (LABELLED, printing(LABELLED, INTERRUPTS), "contradicts itself"),
        (PLAIN, PLAIN.gold, "resolved"),
        (PLAIN, printing(PLAIN, EXITS), "not that of the test runner"),
        (PLAIN, printing(PLAIN, AT_EXIT), "contradicts itself"),
    ],
    ids=[
        "repairs", "repairs-unittest", "edits-tests", "steers-tests", "prints-at-exit",
        "changes-reports", "ends-the-output", "prints-and-exits", "repairs-django",
        "prints-and-exits-django", "prints-at-exit-django", "interrupts-results-django",
        "repairs-sympy", "prints-and-exits-sympy", "prints-at-exit-sympy",
    ],
)  # fmt: skip
def test_a_patch_does_not_forge_its_verdict(
    grading: ModuleType,
    official: Any,
    tmp_path: Path,
    repository: Repository,
    files: dict[str, str],
    reason: str,
) -> None:
    """Invariant 14: the agent cannot forge a reward."""
    place = tmp_path / "repository"
    row = make(repository, place)
    if "eval_script" in row:
        row["eval_script"] = row["eval_script"].replace("/testbed", str(place))
    (task,) = load_tasks([{**row, "directory": str(place)}])
    assert task.reward is not None
    instance = json.loads(json.dumps(task.reward.arguments["instance"]))
    verdict = grading.grade(instance, diff(place, files), Machine(tmp_path), official, timeout_s=60)
    assert verdict.resolved == (reason == "resolved"), verdict
    assert reason in verdict.reason


HARMLESS = appended(INTERVALS, OWN, "# harmless\n")
BODY = "@@ -0,0 +1,2 @@\n+def pytest_runtest_makereport(item, call):\n+    call.excinfo = None\n"
HOOK = "@@ -0,0 +1,2 @@\n+#!/bin/sh\n+touch /tmp/hooked\n"
HIDDEN = {
    "after-a-hunk": f"--- /dev/null\n+++ b/conftest.py\n{BODY}",
    "quoted": 'diff --git "a/conf\\164est.py" "b/conf\\164est.py"\nnew file mode 100644\n'
    f'--- /dev/null\n+++ "b/conf\\164est.py"\n{BODY}',
    "index-line": f"Index: a/conftest.py\n{BODY}",
    "git-hook": "diff --git a/.git/hooks/post-checkout b/.git/hooks/post-checkout\n"
    f"new file mode 100755\n--- /dev/null\n+++ b/.git/hooks/post-checkout\n{HOOK}",
    "hidden-git-hook": f"Index: a/.git/hooks/post-checkout\n{HOOK}",
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_patch_cannot_hide_which_files_it_changes(
    name: str, grading: ModuleType, official: Any, tmp_path: Path
) -> None:
    """Invariant 14: also with syntax that git and patch understand and our parser does not."""
    place = tmp_path / "repository"
    row = make(INTERVALS, place)
    (task,) = load_tasks([{**row, "directory": str(place)}])
    assert task.reward is not None
    instance = json.loads(json.dumps(task.reward.arguments["instance"]))
    patch = diff(place, HARMLESS) + HIDDEN[name]
    verdict = grading.grade(instance, patch, Machine(tmp_path), official, timeout_s=60)
    assert not verdict.resolved
    told = f"{verdict.reason} {verdict.left_out}"
    assert "steer" in told or "conftest" in told or "hooks" in told, verdict
    assert not Path("/tmp/hooked").exists()


SUMMARY = "= short test summary info =\\n" + "\\n".join(
    [
        "PASSED r2e_tests/test_1.py::TestLevel::test_low",
        "PASSED r2e_tests/test_1.py::TestLevel::test_high",
        "FAILED r2e_tests/test_1.py::test_wrong",
    ]
)
WRITE_TO_ALL = """
import os
def write(text):
    for number in range(3, 20):  # pytest has set the terminal aside
        try:
            os.write(number, text.encode())
        except OSError:
            continue
"""
PLUGIN = {
    ".venv/lib/python3/site-packages/trap.py": "def pytest_runtest_makereport(call):\n"
    "    call.excinfo = None\n",
    ".venv/lib/python3/site-packages/trap-1.dist-info/entry_points.txt": "[pytest11]\ntrap=trap\n",
}


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (GAUGE.gold, "resolved"),
        ({"harmless.py": ""}, "failed: TestLevel.test_low"),
        ({"r2e_tests/test_1.py": "", "run_tests.sh": "echo PASSED\n"}, "only tests"),
        (PLUGIN, "only tests"),
        (
            appended(GAUGE, "gauge.py", f"{WRITE_TO_ALL}write('\\n{SUMMARY}\\n')\nos._exit(0)\n"),
            "not that of the test runner",
        ),
        (
            appended(GAUGE, "gauge.py", f"import atexit\natexit.register(print, '{SUMMARY}')\n"),
            "failed: TestLevel.test_low",
        ),
    ],
    ids=["repairs", "nothing", "edits-tests", "installs-a-plugin", "prints-and-exits", "at-exit"],
)
def test_a_patch_does_not_forge_its_verdict_in_the_form_of_r2e_gym(
    grading: ModuleType, official: Any, tmp_path: Path, files: dict[str, str], reason: str
) -> None:
    """Invariant 14; skipped tests and expected failures count as R2E-Gym counts them."""
    place = tmp_path / "repository"
    row = make_r2e(GAUGE, place, sys.executable)
    write(place, GAUGE.tests)
    begin(tmp_path / "agent", GAUGE.files)
    patch = diff(tmp_path / "agent", files)
    (task,) = load_tasks([{**row, "docker_image": "x", "directory": str(place)}])
    assert task.reward is not None
    instance = json.loads(json.dumps(task.reward.arguments["instance"]))
    verdict = grading.grade(instance, patch, Machine(tmp_path), official, timeout_s=60)
    assert verdict.resolved == (reason == "resolved"), verdict
    assert reason in verdict.reason
