"""The tests that built-in environments bring pass by `aenv test`."""

from __future__ import annotations

import pytest

from aenv_ray.cli.test import run_tests
from aenv_ray.project import project

SELECTED = {
    # The rest takes ten seconds of a core or more, each.
    # tests/ray/envs/test_mini_program.py uses a browser.
    "mini-program": "-k 'landing-page or repair-stepper'",
    "mini-terminal": "--deselect tests/test_tasks.py --deselect tests/test_interrupts.py",
}


@pytest.mark.parametrize(
    "name", ["code", "mini-program", "mini-terminal", "swebench", "tau2", "terminal-bench"]
)
def test_the_tests_of_a_built_in_environment_pass(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of gymnasium and reasoning-gym need packages, which tests/ray/envs installs."""
    monkeypatch.setenv("PYTEST_ADDOPTS", SELECTED.get(name, ""))
    run_tests(project.builtins()[name])
