"""The ``PYTHONPATH`` of a task, in the Pythons of its tests."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import fingerprints
import grader
import pytest
from conftest import PROJECT

NOTHING: fingerprints.Marks = {
    "files": {}, "plugins": [], "starting": [], "beside": [], "devices": {}, "since": 0,
}  # fmt: skip
START = (PROJECT / "programs/python_start.py").read_text(encoding="utf-8")
SHOW = "import json, os, sys, mine; print(json.dumps([json.__file__, mine.__file__]))"
ORDER = (
    "import json, sys, aenv_report as one; late = sys.path[-1]; "
    "one.pytest_load_initial_conftests(); print(json.dumps([late, sys.path]))"
)
CHILD = "import aenv_report, os; print(os.environ['PYTHONPATH'], 'AENV_PYTHONPATH' in os.environ)"


def run(code: str, variables: dict[str, str], directory: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PATH": os.defpath, **variables},
        capture_output=True, text=True, check=True, cwd=directory,
    )  # fmt: skip
    return done.stdout.strip()


def test_a_task_keeps_its_path_behind_the_modules_of_python(tmp_path: Path) -> None:
    """Its tests import from it, and no module of the agent there replaces one of Python's."""
    task, aside = tmp_path / "task", tmp_path / "aside"
    for directory in (task, aside):
        directory.mkdir()
    (task / "mine.py").write_text("")
    (task / "json.py").write_text("raise SystemExit(0)")
    (task / "sitecustomize.py").write_text("raise SystemExit(0)")
    variables = grader.python_variables(str(aside), str(task), START)
    library, own = json.loads(run(SHOW, variables))
    assert (library, own) == (json.__file__, str(task / "mine.py"))


def test_what_the_tests_start_has_the_path_of_the_task_alone(tmp_path: Path) -> None:
    (tmp_path / "aenv_report.py").write_text((PROJECT / "programs/report_plugin.py").read_text())
    assert (
        run(CHILD, grader.python_variables(str(tmp_path), "/app:/srv", START)) == "/app:/srv False"
    )


def test_pytest_loads_no_plugin_of_the_agent_from_the_path_of_the_task(tmp_path: Path) -> None:
    """D19: what the image has there stays."""
    plugin = tmp_path / "e-1.dist-info" / "entry_points.txt"
    hook = tmp_path / "sitecustomize.py"
    plugin.parent.mkdir()
    plugin.write_text("[pytest11]\ne = e\n")
    for path in (tmp_path / "iniconfig.py", hook):
        path.write_text("")
    found = fingerprints.Comparison(NOTHING, "", set(), "/none", "/none", f"{tmp_path}:")
    added = {path for path in found.added if path.startswith(str(tmp_path))}
    assert added == {str(plugin), str(hook)}
    later: fingerprints.Marks = {**NOTHING, "since": hook.stat().st_ctime_ns}
    found = fingerprints.Comparison(later, "", set(), "/none", "/none", f"{tmp_path}:")
    assert not any(path.startswith(str(tmp_path)) for path in found.added)


def test_what_runs_tests_is_never_taken_from_directories_of_the_task() -> None:
    (given,) = (
        one.value
        for one in ast.parse(START).body
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "RUNNERS"
    )
    names = {one.value for one in ast.walk(given) if isinstance(one, ast.Constant)}
    assert names == fingerprints.RUNNERS | fingerprints.SHARED


@pytest.mark.parametrize("name", ["_pytest", "iniconfig", "argparse"])
def test_another_pytest_on_the_path_of_the_task_is_not_loaded(name: str, tmp_path: Path) -> None:
    """D19: nor in the working directory."""
    task, aside = tmp_path / "task", tmp_path / "aside"
    for directory in (task, aside):
        directory.mkdir()
    (task / f"{name}.py").write_text("")
    variables = grader.python_variables(str(aside), str(task), START)
    where = run(f"import {name}; print({name}.__file__)", variables, task)
    assert not where.startswith(str(task))


def test_an_installed_plugin_is_not_taken_from_the_path_of_the_task(tmp_path: Path) -> None:
    """D19: the path comes last until the plugins are loaded, and then before installed packages."""
    task, aside = tmp_path / "task", tmp_path / "aside"
    for directory in (task, aside):
        directory.mkdir()
    (aside / "aenv_report.py").write_text((PROJECT / "programs/report_plugin.py").read_text())
    late, path = json.loads(run(ORDER, grader.python_variables(str(aside), str(task), START)))
    assert (late, path.count(str(task))) == (str(task), 1)
    assert path.index(str(task)) < next(n for n, one in enumerate(path) if "-packages" in one)


def test_without_a_path_of_the_task_none_is_added(tmp_path: Path) -> None:
    task, aside = tmp_path / "task", tmp_path / "aside"
    for directory in (task, aside):
        directory.mkdir()
    variables = grader.python_variables(str(aside), "", START)
    path = json.loads(run("import json, sys; print(json.dumps(sys.path[1:]))", variables, task))
    assert str(task) not in path


def test_a_script_may_bring_pytest_on_its_path(tmp_path: Path) -> None:
    """If it is nowhere else, and not where the agent works."""
    aside, brought = tmp_path / "aside", tmp_path / "brought"
    for directory in (aside, brought):
        directory.mkdir()
    (brought / "pytest_ctrf.py").write_text("")
    variables = grader.python_variables(str(aside), "", START)
    variables["PYTHONPATH"] += f":{brought}"
    where = run("import pytest_ctrf; print(pytest_ctrf.__file__)", variables, tmp_path)
    assert where == str(brought / "pytest_ctrf.py")
