"""`aenv` as a program: its streams, its terminal, its signals, and the scripts of `aenv test`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aenv_ray.cli.main import main

pytestmark = pytest.mark.e2e

AENV = [sys.executable, "-m", "aenv_ray.cli.main"]


def aenv(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*AENV, *arguments], capture_output=True, text=True, timeout=60, check=False, **options
    )


def test_a_narrow_terminal_does_not_break_json():
    ran = aenv("version", "--json", env={**os.environ, "COLUMNS": "10"})
    json.loads(ran.stdout)


@pytest.mark.parametrize("arguments", [("version",), ("--help",), ("run", "--help")])
def test_a_closed_pipe_is_no_error(arguments):
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run(
        [*AENV, *arguments], stdout=write, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(write)
    assert ran.stderr == b""


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_from_the_start_is_no_error(closed):
    ran = subprocess.run(
        ["/bin/sh", "-c", f'"$@" {closed}', "sh", *AENV, "version"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")


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
        "python -c 'import aenv,helper,os,sys; "
        'print(sys.executable, helper.VALUE, os.getenv("K"))\''
    )
    path = make_project(script, environmentVariables={"K": "v"})
    ran = aenv("test", path, env={**os.environ, "PATH": "/usr/bin:/bin"})
    assert ran.returncode == 0, ran.stderr
    executable, *rest = ran.stdout.split()
    assert Path(executable).parent == Path(sys.executable).parent
    assert rest == ["42", "v"]
    assert ran.stderr == ""


def test_paths_are_relative_to_work_dir(make_project, tmp_path):
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


@pytest.mark.parametrize("code", [0, 5])
def test_standard_output_is_only_the_json_result(make_project, code):
    ran = aenv("test", make_project(f"echo loud; exit {code}"), "-o", "json")
    told = json.loads(ran.stdout)
    assert (told["exit_code"], told["passed"]) == (code, not code)
    assert ran.returncode == bool(code)
    assert ran.stderr.startswith("loud\n")


_TOOL = "from aenv_ray.runtime import *\n@register_tool\ndef say(text: str) -> str:\n    {}\n"
_REWARD = "@register_reward\ndef score() -> float:\n    return 1.0\n"


def test_a_check_of_a_good_project_runs_no_script_and_finds_no_problems(make_project, tmp_path):
    path = make_project("touch ran", network="none")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "description": "Says it"}))
    (tmp_path / "src" / "tools.py").write_text(_TOOL.format("'Say it.'; return text") + _REWARD)
    ran = aenv("test", path, "--check")
    assert (ran.returncode, ran.stdout.split()[-3:]) == (0, ["no", "problems", "found"]), ran.stderr
    assert not (tmp_path / "ran").exists()


def test_warnings_of_a_check_are_printed_with_their_remedy_and_pass(make_project, tmp_path):
    (Path(make_project("true")) / "src" / "tools.py").write_text(_TOOL.format("return text"))
    ran = aenv("test", str(tmp_path), "--check")
    assert ran.returncode == 0
    assert "warning  it has no description for the model" in ran.stdout
    assert "give the function a docstring" in ran.stderr


@pytest.mark.parametrize("output", ["table", "json"])
def test_a_failed_check_exits_with_1(make_project, tmp_path, output):
    (Path(make_project("true")) / "src" / "tools.py").write_text("import no_such_module\n")
    ran = aenv("test", str(tmp_path), "--check", "-o", output)
    assert ran.returncode == 1
    if output == "json":
        (failed,) = [row for row in json.loads(ran.stdout) if row["verdict"] == "failed"]
        assert failed["name"] == "start"
        assert "no_such_module" in failed["found"]
    else:
        assert "no_such_module" in ran.stdout


def test_a_missing_command_has_a_hint(make_project):
    ran = aenv("test", make_project("no-such-command-here --flag"))
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith("hint: a command of the script is not on PATH")


def test_a_script_ended_by_a_signal_says_so(make_project):
    ran = aenv("test", make_project("kill -9 $$"))
    assert ran.returncode == 1
    assert "was killed by signal 9" in ran.stderr


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


# --- aenv init ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["random", "test-drive", "3d"])
def test_the_new_project_passes_its_own_tests(name, tmp_path):
    """Under names that would shadow a module of Python or look like a test, too."""
    assert main(["init", name, "-w", str(tmp_path)]) == 0
    # The plugins that our own tests need are not what is tested here.
    ran = aenv(
        "test", str(tmp_path / name), env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "5 passed" in ran.stdout
