"""Commands that take a project take it the same way: PATH, relative to --work-dir."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer.main

from aenv_ray.cli.main import app, main
from aenv_ray.cli.terminal.options import project_of
from aenv_ray.project.project import named_on_command_line
from aenv_ray.sampling.suites import read_suite


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


def test_a_name_of_a_built_in_environment_is_a_project_unless_a_directory_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For commands that take a project, and for those that also take published environments."""
    monkeypatch.chdir(tmp_path)
    assert project_of(tmp_path, Path("mini-terminal")).config.name == "mini-terminal"
    assert named_on_command_line("mini-terminal") == "mini-terminal"
    (tmp_path / "mini-terminal").mkdir()  # for example its tasks
    assert project_of(tmp_path, Path("mini-terminal")).config.name == "mini-terminal"
    assert named_on_command_line("mini-terminal") == "mini-terminal"
    (tmp_path / "mini-terminal" / "config.json").write_text('{"model_type": "llama"}')
    assert named_on_command_line("mini-terminal") == "mini-terminal"
    assert named_on_command_line("") == ""
    assert named_on_command_line("~no-such-user/x") == "./~no-such-user/x"
    (tmp_path / "mini-terminal" / "config.json").write_text('{"name": "mine", "version": "1.0.0"}')
    assert project_of(tmp_path, Path("mini-terminal")).config.name == "mine"
    assert named_on_command_line("mini-terminal") == "./mini-terminal"


@pytest.mark.parametrize(
    "words",
    [
        ["sample", "todo", "--policy", "null", "--out", "a.jsonl"],
        ["synthesize", "todo", "-g", "proposals.jsonl", "--out", "a.jsonl"],
        ["eval", "todo", "--policy", "null"],
        ["replay", "episodes.jsonl", "--environment", "todo"],
        ["rescore", "episodes.jsonl", "--environment", "todo", "--out", "a.jsonl"],
    ],
)
def test_a_project_directory_needs_no_slash(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `aenv init todo; aenv test todo` need none: a published ``todo`` would be used instead."""
    (tmp_path / "todo").mkdir()
    (tmp_path / "todo" / "config.json").write_text('{"name": "todo", "version": "1.0.0"}')
    monkeypatch.chdir(tmp_path)
    command = typer.main.get_command(app)
    context = command.make_context("aenv", words[:1], resilient_parsing=True)
    name, found, left = command.resolve_command(context, words)  # type: ignore[attr-defined]
    parsed = found.make_context(name, left, parent=context).params
    given = parsed.get("environment", parsed.get("suite"))
    read = [one.environment for one in read_suite(given)] if words[0] == "eval" else [given]
    assert read == ["./todo"]
