"""`aenv init` makes a project that works, and destroys nothing of anybody."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from aenv_ray.cli import init as init_command
from aenv_ray.cli.main import main
from aenv_ray.files import write_atomically
from aenv_ray.project import project

FILES = {
    ".dockerignore",
    ".gitignore",
    "Dockerfile",
    "README.md",
    "config.json",
    "pytest.ini",
    "requirements.txt",
    "src/todo_env.py",
    "tests/test_environment.py",
}


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files_below(directory: Path) -> set[str]:
    return {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}


def test_the_path_is_the_only_output_and_next_steps_are_talk(tmp_path, capsys):
    assert main(["init", "todo"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'todo'}\n"
    assert "aenv test todo" in err


def test_the_project_is_complete_valid_and_leaves_nothing_beside_it(tmp_path):
    assert main(["init", "todo", "-v", "2.1.0"]) == 0
    assert files_below(tmp_path / "todo") == FILES
    assert [p.name for p in tmp_path.iterdir()] == ["todo"]
    loaded = project.load("todo")
    assert loaded.reference == "todo@2.1.0"
    assert loaded.config.deploy.network == "none"
    assert loaded.config.deploy.service.storage_name == "todo"
    assert loaded.config.deploy.ttl == "30m"


def test_no_placeholder_is_left_in_any_file(tmp_path):
    assert main(["init", "todo"]) == 0
    for path in (tmp_path / "todo").rglob("*"):
        assert "aenv-template" not in path.name
        assert "aenv_template" not in path.name
        if path.is_file():
            text = path.read_text()
            assert "aenv-template" not in text
            assert "aenv_template" not in text
            assert "0.0.0-template" not in text


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("todo", "todo_env"),
        ("my-env", "my_env"),
        ("random", "random_env"),
        ("3d", "env_3d_env"),
        ("test-drive", "env_test_drive_env"),
        ("unit-test", "unit_test_env"),
    ],
)
def test_module_names_are_identifiers_that_shadow_nothing(name, module):
    assert init_command.module_name(name) == module
    assert module.isidentifier()


@pytest.mark.parametrize("name", ["Todo", "-x", "x-", "a_b", "a.b", "", "x" * 64, "../up", "a/b"])
def test_a_bad_name_is_refused_before_anything_is_written(name, tmp_path, capsys):
    assert main(["init", "--", name]) == 3
    assert not list(tmp_path.iterdir())
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: invalid environment name ")
    assert "\nhint: use 1-63 lower-case letters" in err


def test_a_bad_version_or_template_is_refused(tmp_path, capsys):
    assert main(["init", "todo", "-v", "1 0"]) == 3
    assert "version '1 0'" in capsys.readouterr().err
    assert main(["init", "todo", "-t", "../default"]) == 3
    assert "templates: default" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_work_dir_is_where_the_project_is_made_and_may_be_new(tmp_path):
    assert main(["init", "todo", "-w", "deep/er"]) == 0
    assert files_below(tmp_path / "deep/er/todo") == FILES


def test_an_empty_directory_is_filled(tmp_path):
    (tmp_path / "todo").mkdir()
    assert main(["init", "todo"]) == 0
    assert files_below(tmp_path / "todo") == FILES


def test_a_directory_with_content_is_refused_naming_force(tmp_path, capsys):
    (tmp_path / "todo").mkdir()
    (tmp_path / "todo" / "notes.txt").write_text("mine")
    assert main(["init", "todo"]) == 3
    assert "--force" in capsys.readouterr().err
    assert files_below(tmp_path / "todo") == {"notes.txt"}


def test_force_overwrites_the_templates_files_and_keeps_all_others(tmp_path):
    """AEnvironment's --force never worked: it compared True with the text "force"."""
    assert main(["init", "todo"]) == 0
    mine = {"notes.txt": "mine", "src/other.py": "x = 1\n", "data/rows.csv": "1,2\n"}
    for relative, content in mine.items():
        (tmp_path / "todo" / relative).parent.mkdir(exist_ok=True)
        (tmp_path / "todo" / relative).write_text(content)
    (tmp_path / "todo/config.json").write_text("broken")
    assert main(["init", "todo", "--force"]) == 0
    assert files_below(tmp_path / "todo") == FILES | set(mine)
    assert all((tmp_path / "todo" / r).read_text() == c for r, c in mine.items())
    assert project.load("todo").reference == "todo@1.0.0"


def test_force_replaces_a_link_and_not_what_it_points_to(tmp_path):
    outside = tmp_path / "outside.json"
    outside.write_text("precious")
    (tmp_path / "todo").mkdir()
    (tmp_path / "todo/config.json").symlink_to(outside)
    assert main(["init", "todo", "--force"]) == 0
    assert outside.read_text() == "precious"
    assert json.loads((tmp_path / "todo/config.json").read_text())["name"] == "todo"


def test_a_file_in_the_way_is_never_replaced(tmp_path, capsys):
    (tmp_path / "todo").write_text("mine")
    assert main(["init", "todo", "--force"]) == 3
    assert "is not a directory" in capsys.readouterr().err
    assert (tmp_path / "todo").read_text() == "mine"


def test_a_failure_in_the_middle_leaves_no_half_project(tmp_path, monkeypatch, capsys):
    written = []

    def fail_at_the_fourth(path, *args, **kwargs):
        written.append(path)
        if len(written) == 4:
            raise OSError(28, "No space left on device")
        write_atomically(path, *args, **kwargs)

    monkeypatch.setattr(init_command, "write_atomically", fail_at_the_fourth)
    assert main(["init", "todo"]) == 3
    assert "No space left on device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_config_only_writes_one_file_and_refuses_to_overwrite(tmp_path, capsys):
    assert main(["init", "todo", "--config-only"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'config.json'}\n"
    assert files_below(tmp_path) == {"config.json"}
    assert main(["init", "other", "--config-only"]) == 3
    assert "--force" in capsys.readouterr().err
    assert main(["init", "other", "--config-only", "--force"]) == 0
    assert project.read_config(tmp_path / "config.json").deploy.service.storage_name == "other"


def test_files_get_the_users_ordinary_modes(tmp_path):
    before = os.umask(0o027)
    try:
        assert main(["init", "todo"]) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "todo").stat().st_mode) == 0o750
    assert stat.S_IMODE((tmp_path / "todo/config.json").stat().st_mode) == 0o640
