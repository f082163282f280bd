"""What `aenv` exits with and says when something goes wrong; stdout stays data."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from aenv_ray.cli import main as cli
from aenv_ray.cli.main import main
from aenv_ray.errors import CapacityExceeded, ConfigError, EnvironmentNotFound

AENV = [sys.executable, "-m", "aenv_ray.cli.main"]


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
    assert first == "error: unexpected RuntimeError: it broke, please report it"
    assert second.startswith("hint: ")


def test_ctrl_c_says_interrupted_and_exits_with_130(run):
    assert run(raise_interrupt) == (130, "", "interrupted\n")


def test_a_command_chooses_its_exit_code(run):
    assert run(raise_exit) == (7, "", "")
    assert run(raise_abort) == (1, "", "error: aborted\n")


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["versoin"], "there is no command 'versoin', did you mean 'version'?", "aenv --help"),
        (["qqq"], "there is no command 'qqq'", "aenv --help"),
        (["version", "--bad"], "no such option: --bad", "aenv version --help"),
        (["init"], "missing argument 'NAME'", "aenv init --help"),
        (
            ["run", "-e", "novalue"],
            "invalid value for --env: write it as KEY=VALUE",
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


def aenv(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*AENV, *arguments], capture_output=True, text=True, timeout=60, check=False, **options
    )


def test_version_is_json_when_asked_and_short_when_asked(capsys):
    facts = json.loads(here(capsys, "version", "--json")[1])
    assert set(facts) == {"aenv-ray", "python", "ray", "fastmcp", "mcp", "platform"}
    assert json.loads(here(capsys, "version", "-o", "json")[1]) == facts
    assert here(capsys, "version", "-s")[1] == f"{facts['aenv-ray']}\n"
    assert f"ray       {facts['ray']}\n" in here(capsys, "version")[1]


def here(capsys, *arguments: str) -> tuple[int, str, str]:
    """Run a command that starts nothing in this process; return its exit code and what it wrote."""
    return (main(list(arguments)), *capsys.readouterr())


def test_a_narrow_terminal_does_not_break_json():
    ran = aenv("version", "--json", env={**os.environ, "COLUMNS": "10"})
    json.loads(ran.stdout)


@pytest.mark.parametrize("arguments", [("version",), ("--help",), ("run", "--help")])
def test_a_reader_that_leaves_is_no_error(arguments):
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run(
        [*AENV, *arguments], stdout=write, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(write)
    assert ran.stderr == b""


def stderr_on_a_terminal(variables: dict[str, str]) -> bytes:
    leader, follower = os.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "FORCE_COLOR"}}
    subprocess.run(
        [*AENV, "init", "Bad"],
        stderr=follower,
        stdout=subprocess.DEVNULL,
        env={**environment, "TERM": "xterm", **variables},
        timeout=60,
        check=False,
    )
    os.close(follower)
    shown = os.read(leader, 65536)
    os.close(leader)
    return shown


def test_colour_is_for_terminals_that_want_it():
    assert b"\x1b[1;31merror:\x1b[0m" in stderr_on_a_terminal({})
    assert b"\x1b" not in stderr_on_a_terminal({"NO_COLOR": "1"})
    assert b"\x1b" not in stderr_on_a_terminal({"TERM": "dumb"})
    assert "\x1b" not in aenv("init", "Bad").stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion_knows_the_commands(shell):
    variables = {
        "_AENV_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": "aenv v",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "COMP_WORDS": "aenv v",
        "COMP_CWORD": "1",
    }
    assert "version" in aenv(env={**os.environ, **variables}).stdout


# --- aenv test ----------------------------------------------------------------------------------


@pytest.fixture
def make_project(tmp_path):
    def make(script: str, **deploy) -> str:
        config = {"name": "x", "testConfig": {"script": script}, "deployConfig": deploy}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "src").mkdir()
        (tmp_path / "src" / "helper.py").write_text("VALUE = 42\n")
        return str(tmp_path)

    return make


def test_a_script_sees_our_python_the_sources_and_the_variables(make_project):
    script = (
        "python -c 'import helper,os,sys; print(sys.executable, helper.VALUE, os.getenv(\"K\"))'"
    )
    path = make_project(script, environmentVariables={"K": "v"})
    ran = aenv("test", path, env={**os.environ, "PATH": "/usr/bin:/bin"})
    assert ran.returncode == 0, ran.stderr
    executable, *rest = ran.stdout.split()
    assert Path(executable).parent == Path(sys.executable).parent
    assert rest == ["42", "v"]
    assert ran.stderr == ""


def test_work_dir_is_what_the_path_is_relative_to(make_project, tmp_path):
    make_project("pwd")
    assert aenv("test", "-w", str(tmp_path)).stdout.strip() == str(tmp_path)
    ran = aenv("test", tmp_path.name, "-w", str(tmp_path.parent))
    assert ran.stdout.strip() == str(tmp_path)


def test_output_passes_unchanged_and_a_failure_is_1_with_the_script_and_its_code(make_project):
    ran = aenv("test", make_project("printf 'a[b]\\n'; printf 'c\\n' >&2; exit 5"))
    assert ran.returncode == 1
    assert ran.stdout == "a[b]\n"
    out, error = ran.stderr.splitlines()
    assert out == "c"
    assert error.startswith("error: test script ")
    assert error.endswith("failed with code 5")


def test_a_missing_command_has_a_hint(make_project):
    ran = aenv("test", make_project("no-such-command-here --flag"))
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith("hint: a command of the script is not on PATH")


def test_a_script_ended_by_a_signal_says_so(make_project):
    ran = aenv("test", make_project("kill -9 $$"))
    assert ran.returncode == 1
    assert "was ended by signal 9" in ran.stderr


def test_a_project_without_a_script_is_a_config_error_that_shows_one(make_project, capsys):
    code, _, err = here(capsys, "test", make_project("  "))
    assert code == 3
    assert "has no testConfig.script" in err
    assert '"testConfig": {"script": "python -m pytest' in err


def test_ctrl_c_reaches_the_script_and_exits_with_130(make_project):
    path = make_project("trap 'echo cleaned; exit 0' INT; echo ready; while :; do sleep 0.1; done")
    process = subprocess.Popen(
        [*AENV, "test", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "cleaned\n", "interrupted\n")
