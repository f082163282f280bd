"""The configuration of the project, and its import, which has no side effects."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import mini_terminal
import pytest
from conftest import PROJECT

from aenv_ray.runtime import register_tool

IMPORT = """
import os, shutil, sys, threading
before = set(os.listdir("/proc/self/fd"))
sys.path.insert(0, sys.argv[1] + "/src")
import mini_terminal
assert set(os.listdir("/proc/self/fd")) == before
assert threading.active_count() == 1
assert open(f"/proc/self/task/{os.getpid()}/children").read() == ""
shutil.rmtree(sys.argv[1])
pid = os.fork()
if pid:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
mini_terminal.start_task("session-63")
mini_terminal.execute_command(". ./session.sh; export SESSION_USER=ada; cd inner; ../finish.sh")
reward = mini_terminal.task_reward("session-63")
mini_terminal._shell.close()
assert reward["score"] == 1.0, reward
"""


def test_import_is_fork_safe_and_the_project_is_not_needed_afterwards(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(PROJECT, copy, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    work = tmp_path / "work"
    work.mkdir()
    program = [sys.executable, "-c", IMPORT, str(copy)]
    packages = str(Path(register_tool.__code__.co_filename).parents[2])
    outcome = subprocess.run(
        program,
        check=False,
        cwd=work,
        env={"PYTHONPATH": packages, "PATH": "/usr/bin:/bin"},
        timeout=30,
    )
    assert outcome.returncode == 0


def test_config_names_the_environment_and_hides_its_source() -> None:
    config = json.loads((PROJECT / "config.json").read_text())
    assert (config["name"], config["version"]) == ("mini-terminal", "1.0.0")
    assert config["deployConfig"]["hideSource"] is True
    assert config["deployConfig"]["network"] == "none"


def test_health_says_whether_there_is_a_bash(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mini_terminal.health() == {"status": "healthy"}
    monkeypatch.setenv("PATH", "/nonexistent")
    assert mini_terminal.health()["status"] == "unhealthy"
