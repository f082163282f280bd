"""``aenv test``: runs a project's test script, or checks the project in a fresh sandbox."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

import aenv_ray
from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import (
    DataFormatOption,
    ProjectArgument,
    WorkDirOption,
    directory_of,
    project_of,
)
from aenv_ray.cli.terminal.output import Format, show, show_findings
from aenv_ray.errors import ConfigError

_COMMAND_NOT_FOUND: Final = 127
_GRACE_S: Final = 5.0
"""Time for the script to end after Ctrl-C, which the terminal also sends to the script."""


def run_tests(
    path: ProjectArgument = Path(),
    work_dir: WorkDirOption = Path(),
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Check the project in a fresh sandbox; do not run the script."
        ),
    ] = False,
    output: DataFormatOption = None,
) -> None:
    """Run a project's own test script, or check the project.

    The shell runs testConfig.script of config.json in the project's directory,
    with src/ on PYTHONPATH, the variables of config.json, and this python first
    on PATH. Exits with 0 if the script does, else with 1. With -o json or yaml,
    the script's output goes to standard error.

    With --check, aenv starts the project in a sandbox instead, inspects its
    tools, rewards and health, and prints what to correct. Exits with 1 if a
    check failed; warnings do not count.

    Example:
      aenv test ./todo
      aenv test ./todo --check
    """
    if check:
        _check(directory_of(work_dir, path), output)
        return
    from aenv_ray.project.project import CONFIG_NAME

    loaded = project_of(work_dir, path)
    script = loaded.config.test.script.strip()
    if not script:
        raise ConfigError(
            f"{loaded.path / CONFIG_NAME} has no testConfig.script",
            hint='add one, for example: "testConfig": {"script": "python -m pytest -q tests"}',
        )
    as_data = output not in {None, Format.TABLE}
    code = _run_script(script, loaded.path, loaded.config.deploy.variables, is_quiet=as_data)
    if as_data:
        facts = {"environment": loaded.reference, "script": script, "exit_code": code}
        show(facts | {"passed": not code}, output)
    if code:
        how = f"was killed by signal {-code}" if code < 0 else f"failed with code {code}"
        console.error(f"test script {script!r} {how}", _hint(script, code))
        raise typer.Exit(1)


def _check(path: Path, output: Format | None) -> None:
    from aenv_ray.findings import Finding, Verdict
    from aenv_ray.testing.environment_check import check_environment

    console.say("checking the project in a sandbox …")
    findings = check_environment(path)
    show_findings(findings or [Finding("project", Verdict.OK, "no problems found")], output)
    if any(finding.verdict is Verdict.FAILED for finding in findings):
        raise typer.Exit(1)


def _run_script(script: str, directory: Path, variables: dict[str, str], *, is_quiet: bool) -> int:
    """Run the script with this process's input and output; return its exit code.

    With `is_quiet` its output goes to standard error.
    """
    from aenv_ray.cli.local.local_server import die_with_parent

    source = directory / "src" if (directory / "src").is_dir() else directory
    environment = {**os.environ, **variables}
    # Projects of AEnvironment import `aenv`.
    shim = f"{source}{os.pathsep}{Path(aenv_ray.__file__).parent / 'runtime' / 'shim'}"
    for name, first in (("PYTHONPATH", shim), ("PATH", str(Path(sys.executable).parent))):
        rest = environment.get(name)
        environment[name] = f"{first}{os.pathsep}{rest}" if rest else first
    begin = die_with_parent(signal.SIGTERM)

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if begin is not None:
            begin()

    # Until the script can be waited for, Ctrl-C stays pending here; the script gets it at once.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    process = subprocess.Popen(
        script,
        shell=True,
        cwd=directory,
        env=environment,
        stdout=sys.stderr.fileno() if is_quiet else None,
        preexec_fn=in_child,  # noqa: PLW1509  # we have one thread
    )
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return process.wait()
    except KeyboardInterrupt:
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
        raise


def _hint(script: str, code: int) -> str | None:
    if re.search(r"\bpytest\b", script) and importlib.util.find_spec("pytest") is None:
        return f"pytest is not installed; run: {sys.executable} -m pip install pytest"
    if code == _COMMAND_NOT_FOUND:
        return "a command of the script is not on PATH: install it, or change testConfig.script"
    return None
