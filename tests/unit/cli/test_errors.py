"""What `aenv` exits with and says when something goes wrong; stdout stays data."""

from __future__ import annotations

import json
import sys

import pytest
import typer

from aenv_ray.cli import main as cli
from aenv_ray.cli.main import main
from aenv_ray.errors import CapacityExceeded, ConfigError, EnvironmentNotFound


def raise_config_error() -> None:
    raise ConfigError("memory '2Q' is not a size", hint='write it as "4G"')


def raise_capacity() -> None:
    raise CapacityExceeded("the cluster is full")


def raise_bug() -> None:
    raise RuntimeError("it\nbroke")


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def raise_abort() -> None:
    raise typer.Abort


def raise_exit() -> None:
    raise typer.Exit(7)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command made of a function of this module."""

    def run(function, *options: str) -> tuple[int, str, str]:
        target = f"{__name__}:{function.__name__}"
        monkeypatch.setitem(sys.modules, __name__, sys.modules[function.__module__])
        monkeypatch.setattr(cli, "COMMANDS", {**cli.COMMANDS, "probe": target})
        code = main([*options, "probe"])
        return (code, *capsys.readouterr())

    return run


def test_our_errors_are_two_lines_on_stderr(run):
    assert run(raise_config_error) == (
        3,
        "",
        "error: memory '2Q' is not a size\nhint: write it as \"4G\"\n",
    )
    assert run(raise_capacity) == (1, "", "error: the cluster is full\n")


@pytest.mark.parametrize("option", ["--verbose", "-v", "--debug"])
def test_a_traceback_is_shown_only_when_asked_for(run, option):
    assert "Traceback" not in run(raise_bug)[2]
    code, out, err = run(raise_bug, option)
    assert (code, out) == (1, "")
    assert "Traceback (most recent call last)" in err
    assert "raise_bug" in err


def test_an_unexpected_exception_is_one_line_that_asks_for_a_report(run):
    code, out, err = run(raise_bug)
    assert (code, out) == (1, "")
    first, second = err.splitlines()
    assert first == "error: unexpected RuntimeError: it broke; please report it"
    assert second.startswith("hint: ")


def test_ctrl_c_says_interrupted_and_exits_with_130(run):
    assert run(raise_interrupt) == (130, "", "interrupted\n")


def test_a_command_chooses_its_exit_code(run):
    assert run(raise_exit) == (7, "", "")
    assert run(raise_abort) == (1, "", "error: aborted\n")


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["versoin"], "no such command 'versoin', did you mean 'version'?", "aenv --help"),
        (["qqq"], "no such command 'qqq'", "aenv --help"),
        (["version", "--bad"], "no such option: --bad", "aenv version --help"),
        (["init"], "missing argument 'NAME'", "aenv init --help"),
        (
            ["run", "-e", "novalue"],
            "invalid value for --env: expected KEY=VALUE",
            "aenv run --help",
        ),
        (["run", "-p", "70000"], "invalid value for '--port' / '-p'", "aenv run --help"),
    ],
)
def test_wrong_usage_exits_with_2_and_names_the_help(arguments, message, hint, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {message}")
    assert err.endswith(f"hint: see: {hint}\n")


@pytest.mark.parametrize("command", ["run", "test"])
def test_a_broken_project_is_found_before_anything_starts(command, tmp_path, capsys):
    (tmp_path / "config.json").write_text('{\n  "name": "x",\n}')
    assert main([command, str(tmp_path)]) == 3
    assert "config.json, line 3" in capsys.readouterr().err
    assert main([command, str(tmp_path / "missing")]) == 1
    assert "there is no project directory" in capsys.readouterr().err


def test_no_arguments_show_the_help(capsys):
    assert main([]) == 0
    assert "Usage: aenv" in capsys.readouterr().out


def test_not_found_is_a_failure_and_not_a_config_error(monkeypatch, run):
    def missing() -> None:
        raise EnvironmentNotFound("there is no environment 'x'")

    monkeypatch.setattr(sys.modules[raise_bug.__module__], "missing", missing, raising=False)
    assert run(missing)[0] == 1


# --- streams ------------------------------------------------------------------------------------


def here(capsys, *arguments: str) -> tuple[int, str, str]:
    """Run a command that starts nothing in this process; return its exit code and what it wrote."""
    return (main(list(arguments)), *capsys.readouterr())


def test_version_is_json_when_asked_and_short_when_asked(capsys):
    facts = json.loads(here(capsys, "version", "--json")[1])
    assert set(facts) == {"aenv-ray", "python", "ray", "fastmcp", "mcp", "platform"}
    assert json.loads(here(capsys, "version", "-o", "json")[1]) == facts
    assert here(capsys, "version", "-s")[1] == f"{facts['aenv-ray']}\n"
    assert f"ray       {facts['ray']}\n" in here(capsys, "version")[1]


def test_a_project_without_a_script_is_a_config_error_that_shows_one(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"name": "x", "testConfig": {"script": "  "}}')
    code, _, err = here(capsys, "test", str(tmp_path))
    assert code == 3
    assert "has no testConfig.script" in err
    assert '"testConfig": {"script": "python -m pytest' in err


def test_a_file_after_output_instead_of_out_is_told_apart(capsys):
    assert main(["sample", "mini-terminal", "--policy", "null", "--output", "run.jsonl"]) == 2
    printed = capsys.readouterr().err
    assert "'run.jsonl' is not one of" in printed
    assert "name a file with --out\n" in printed
    assert main(["list", "--output", "run.jsonl"]) == 2
    assert capsys.readouterr().err.endswith("hint: see: aenv list --help\n")


@pytest.mark.parametrize("options", [[], ["--policy", "null", "--predictions", "p.json"]])
def test_a_sampling_has_either_a_policy_or_predictions(options, capsys):
    assert main(["sample", "swebench", "--tasks", "rows.jsonl", *options]) == 2
    assert "give either --policy or --predictions" in capsys.readouterr().err
