"""Files of the agent that installers must not find, and that come back when pytest starts."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import grader
import hidden
import package_managers
import pytest

TEMPLATE = """
uv venv .tbench-testing
source .tbench-testing/bin/activate
uv pip install pytest==8.4.1
uv run pytest $TEST_DIR/test_outputs.py -rA
"""
"""That of Terminal-Bench 1."""


@pytest.mark.parametrize(
    ("script", "is_hidden"),
    [
        (TEMPLATE, True),
        ("uv init\nuv add pytest==8.4.1\nuv run pytest /tests", True),
        ("uvx -p 3.13 -w pytest==8.4.1 \\\n  pytest /tests", True),
        ("uv venv\nuv run python /tests/generate.py\nuv run pytest /tests", True),
        ("pytest /tests", False),
        ("uv run pytest /tests", False),
        ("uv sync\nuv run --with pytest pytest /tests", False),
        ("uv pip install -e .\nuvx pytest /tests", False),
        ("uv pip install '.[dev]' pytest\nuv run pytest /tests", False),
        ("uv venv\nuv pip install -r pyproject.toml pytest\nuv run pytest", False),
        ("uv venv\nuv run main.py\nuv run pytest", False),
    ],
)
def test_a_project_is_hidden_unless_the_script_uses_it(
    script: str, is_hidden: bool, tmp_path: Path
) -> None:
    """What the image has there stays, too."""
    before = hidden.save(str(tmp_path))
    mine = tmp_path / "pyproject.toml"
    mine.write_text("[project]\n")
    found = hidden.found_by_uv(script, str(tmp_path), before)
    assert found == ([str(mine)] if is_hidden else [])
    assert hidden.found_by_uv(script, str(tmp_path), hidden.save(str(tmp_path))) == []


def test_an_environment_in_the_place_of_that_of_the_script_is_found(tmp_path: Path) -> None:
    directory = str(tmp_path)
    assert hidden.made_by_script(TEMPLATE, directory, 0) == []
    made = tmp_path / ".tbench-testing" / "bin"
    made.mkdir(parents=True)
    assert hidden.made_by_script(TEMPLATE, directory, 0) == [str(made.parent)]
    assert hidden.made_by_script("uvx pytest", directory, 0) == []
    assert hidden.made_by_script(TEMPLATE, directory, made.stat().st_ctime_ns) == []


def test_hidden_files_come_back(tmp_path: Path) -> None:
    """But not in the place of programs and environments that the tests have made."""
    project, lock, program, kept = (
        tmp_path / name for name in ("pyproject.toml", "uv.lock", "python3.13", ".venv")
    )
    for path in (project, lock, program):
        path.write_text("mine")
    kept.mkdir()
    (kept / "mine").write_text("")
    image = {str(project): ["f", 0o644, "aW1hZ2U="]}
    files = hidden.Hidden()
    files.hide([str(one) for one in (project, lock, program, kept)], image)
    assert (project.read_text(), lock.exists(), kept.exists()) == ("image", False, False)
    lock.write_text("of the tests")
    program.write_text("of the tests")
    kept.mkdir()
    files.put_back()
    texts = [path.read_text() for path in (project, lock, program)]
    assert (texts, list(kept.iterdir())) == (["mine", "mine", "of the tests"], [])


def test_settings_come_back_where_the_tests_have_not_written(tmp_path: Path) -> None:
    """An added, a changed and a removed file, a directory, and one that the tests changed."""
    image = ["f", 0o644, "aW1hZ2U="]
    mine = ["f", 0o644, "bWluZQ=="]
    paths = [str(tmp_path / name) for name in ("added", "changed", "directory", "removed", "used")]
    added, changed, directory, removed, used = paths
    inside = f"{directory}/a"
    for path in (changed, removed, used):
        package_managers.write(path, image)
    Path(used).write_text("of the tests")
    package_managers.put_back(
        {
            added: (mine, None),
            changed: (mine, image),
            directory: (["d", 0o755, ""], None),
            inside: (mine, None),
            removed: (None, image),
            used: (mine, image),
        }
    )
    texts = [Path(path).read_text() for path in (added, changed, inside, used)]
    assert (texts, Path(removed).exists()) == (["mine", "mine", "mine", "of the tests"], False)


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl_reads_no_settings_of_the_home_directory(tmp_path: Path) -> None:
    """D19: scripts run what it downloads; some versions look there if ``CURL_HOME`` has none."""
    wanted, mine, aside = (tmp_path / name for name in ("wanted", "mine", "aside"))
    wanted.write_text("wanted")
    mine.write_text("mine")
    aside.mkdir()
    (tmp_path / ".curlrc").write_text(f'url = "file://{mine}"\n')
    variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    variables |= grader.installer_variables(str(aside))
    done = subprocess.run(
        ["curl", "-sS", f"file://{wanted}"], env=variables, capture_output=True, check=True
    )
    assert done.stdout == b"wanted"
