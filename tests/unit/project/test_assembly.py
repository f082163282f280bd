"""A built-in that needs another project's files gets them from the copy that the user names."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv_ray.config import settings
from aenv_ray.errors import ConfigError
from aenv_ray.project import project

STAND_IN = Path(__file__).parents[2] / "fixtures" / "tau2_bench"


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    made = tmp_path / "copy"
    shutil.copytree(STAND_IN, made)
    monkeypatch.setenv("AENV_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("AENV_TAU2", str(made))
    settings.cache_clear()
    yield made
    settings.cache_clear()


def test_the_project_has_the_files_the_python_and_the_packages(copy: Path) -> None:
    (copy / "src" / "tau2" / "__pycache__").mkdir(exist_ok=True)
    found = project.resolve("tau2@1.0.0")
    assert (found.path / "bench" / "src" / "tau2" / "registry.py").is_file()
    assert not list(found.path.rglob("__pycache__"))
    assert found.config.requires_python == ">=3.11,<3.13"
    assert (found.path / "requirements.txt").read_text() == ""  # litellm is left out
    assert project.resolve("tau2") == found


def test_an_edit_makes_another_project(copy: Path) -> None:
    before = project.resolve("tau2")
    policy = copy / "data" / "tau2" / "domains" / "mock" / "policy.md"
    policy.write_text("Be terse.")
    after = project.resolve("tau2")
    assert after.digest != before.digest
    assert (before.path / "config.json").is_file()


def test_a_copy_that_is_missing_or_another_project_is_refused(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(copy / "data")
    with pytest.raises(ConfigError, match="not a copy of tau2-bench") as raised:
        project.resolve("tau2")
    assert "data/tau2/user_simulator" in raised.value.message
    monkeypatch.delenv("AENV_TAU2")
    settings.cache_clear()
    with pytest.raises(ConfigError, match="AENV_TAU2 is not set") as raised:
        project.resolve("tau2")
    assert "git clone" in str(raised.value.hint)


@pytest.mark.parametrize("line", ['version = "0.2.1-dev"', 'version = "of mine"', ""])
def test_another_version_is_refused_before_anything_is_installed(copy: Path, line: str) -> None:
    """tau2-bench 0.2.0 has every file that is copied, and then lacks a module."""
    path = copy / "pyproject.toml"
    path.write_text(path.read_text().replace('version = "1.0.1"', line))
    with pytest.raises(ConfigError, match=r"AENV_TAU2: .*>=1\.0\.1 is needed") as raised:
        project.resolve("tau2")
    assert (line.split('"')[1] if line else "unknown") in raised.value.message
    assert "checkout fc0055dc" in str(raised.value.hint)


def test_a_malformed_pyproject_is_named(copy: Path) -> None:
    (copy / "pyproject.toml").write_text("[project")
    with pytest.raises(ConfigError, match=r"pyproject\.toml"):
        project.resolve("tau2")


def test_projects_of_users_are_not_assembled(tmp_path: Path, copy: Path) -> None:
    """A publisher would otherwise take files of whoever runs the project."""
    mine = tmp_path / "mine"
    shutil.copytree(project.BUILTIN_DIR / "tau2", mine)
    assert project.resolve(mine).path == mine
