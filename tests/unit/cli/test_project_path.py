"""Commands that take a project take it the same way: PATH, relative to --work-dir."""

from __future__ import annotations

from pathlib import Path

import pytest

from aenv_ray.cli.main import main
from aenv_ray.cli.terminal.options import project_of
from aenv_ray.errors import EnvironmentNotFound


@pytest.mark.parametrize("command", ["test", "run", "push", "build"])
def test_a_project_is_a_path_relative_to_the_work_dir(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    for words, missing in (
        (["no-such"], tmp_path / "no-such"),
        (["no-such", "-w", "sub"], tmp_path / "sub" / "no-such"),
        (["-w", "no-such"], tmp_path / "no-such"),
    ):
        assert main([command, *words]) == 1
        assert f"there is no project directory {missing}\n" in capsys.readouterr().err


def test_a_name_of_a_built_in_environment_is_a_project_unless_a_directory_has_it(
    tmp_path: Path,
) -> None:
    assert project_of(tmp_path, Path("mini-terminal")).config.name == "mini-terminal"
    (tmp_path / "mini-terminal").mkdir()
    with pytest.raises(EnvironmentNotFound, match=str(tmp_path / "mini-terminal")):
        project_of(tmp_path, Path("mini-terminal"))
