"""A terminal in the container of a task, and the grading of the task.

The instance's own container runs this code; the task's container is its sidecar. The agent reaches
only the task's container.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Final

import container
from verdict import verdict

from aenv_ray.runtime import (
    register_function,
    register_health,
    register_reward,
    register_tool,
    sidecar,
)

MAX_OUTPUT: Final = 256 * 1024
"""Bytes of a command's output that are returned."""
START_S: Final = 60.0
_GRACE_S: Final = 20.0
_TIMED_OUT: Final = 124
_SHELL: Final = 'exec 2>&1; command -v bash >/dev/null && exec bash -c "$0"; exec sh -c "$0"'


@dataclass
class _Task:
    """The task that was started."""

    directory: str
    variables: dict[str, str]
    fingerprints: dict[str, Any]
    package_settings: dict[str, Any] | None
    image_variables: dict[str, str]
    project: dict[str, Any]
    terminal: str = field(default_factory=lambda: f"aenv-terminal-{secrets.token_hex(8)}")


_task: _Task | None = None


def _started() -> _Task:
    if _task is None:
        raise RuntimeError("no task was started: call the function start_task first")
    return _task


@register_function
def start_task(
    command: list[str] | None = None, variables: dict[str, str] | None = None, directory: str = ""
) -> dict[str, Any]:
    """Prepare the container of a task, before the agent acts.

    Args:
        command: Empty; earlier records have it, and their tasks can be played again.
        variables: The variables of the task's container.
        directory: Working directory; "": that of the image.

    Raises:
        RuntimeError: There is a command, which could not run during the tests. Or the image has a
            user other than root, who could neither unpack the tests nor end the agent's processes.
    """
    global _task
    if command:
        raise RuntimeError(
            f"the task's container has a command, {command}, which would not run during its tests: "
            "load the task again from its directory, which tells whether it can be played"
        )
    place = directory or sidecar.exec(["/bin/sh", "-c", "pwd"]).text().strip()
    request = {"do": "prepare", "directory": place}
    answer = container.run(*container.GRADER, request=request, timeout_s=START_S, as_image=True)
    if "not_root" in answer:
        raise RuntimeError(
            f"the task's image has a USER other than root (user id {answer['not_root']}), and this "
            "environment plays tasks only as root: end the image's Dockerfile with USER root, and "
            "let the task start its programs as another user"
        )
    _task = _Task(place, dict(variables or {}), **answer)
    return {"directory": place}


@register_tool
def execute_command(
    command: str, timeout_s: float = 60.0, variables: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run a command in a new shell in the task's directory, and wait for its end.

    Directory and variables do not persist, files and background processes do. For programs that
    need a terminal use `keystrokes`.

    Args:
        command: Text for the shell.
        timeout_s: Seconds after which it is killed.
        variables: Environment variables of the command.

    Returns:
        ``{"output": text, "returncode": code}``: stdout and stderr together; the code is 124 after
        the timeout. If the output is long, its middle is cut, and ``truncated`` is true.
    """
    task = _started()
    began = time.monotonic()
    try:
        done = sidecar.exec(
            ["/bin/sh", "-c", _SHELL, command],
            cwd=task.directory,
            env={**task.variables, **(variables or {})},
            timeout_s=timeout_s,
        )
    except TimeoutError:
        seconds = time.monotonic() - began
        return {"output": f"[killed after {seconds:.1f} s]", "returncode": _TIMED_OUT}
    output, cut = done.stdout + done.stderr, done.truncated
    if len(output) > MAX_OUTPUT:
        half, cut = MAX_OUTPUT // 2, True
        left_out = len(output) - 2 * half
        output = output[:half] + b"\n[%d bytes left out]\n" % left_out + output[-half:]
    found = {"output": output.decode(errors="replace"), "returncode": done.exit_code}
    return {**found, "truncated": True} if cut else found


@register_tool
def keystrokes(
    keys: str | list[str], wait_s: float = 1.0, until_idle: bool = False
) -> dict[str, Any]:
    """Type into the terminal, wait, and return the screen.

    The terminal has a shell, which persists between calls.

    Args:
        keys: What to type. In a list, each item is text or the name of a key as in tmux: "Enter",
            "Tab", "Escape", "Up", "C-c", "M-x", "F1" … Text is typed as it is, so a line ends with
            "Enter" in a list, or with a newline in a string.
        wait_s: Seconds to wait before the screen is read, at most 3600.
        until_idle: Wait only until the shell waits for the next command.

    Returns:
        ``{"screen": text}``.
    """
    pressed = [keys.replace("\n", "\r")] if isinstance(keys, str) else keys
    return {"screen": _terminal(pressed, wait_s, until_idle=until_idle)}


@register_tool
def capture_pane(history: bool = False) -> dict[str, Any]:
    """Return the screen of the terminal.

    Args:
        history: Also the lines that have left the screen.

    Returns:
        ``{"screen": text}``.
    """
    return {"screen": _terminal([], 0.0, history=history)}


def _terminal(
    keys: list[str], wait_s: float, *, until_idle: bool = False, history: bool = False
) -> str:
    task = _started()
    if not 0 <= wait_s <= 3600:
        raise ValueError(f"wait_s {wait_s!r} is not between 0 and 3600")
    request = {
        "name": task.terminal, "directory": task.directory, "keys": keys, "wait_s": wait_s,
        "until_idle": until_idle, "history": history,
        "shell": ["/bin/sh", "-c", "command -v bash >/dev/null && exec bash -i; exec sh -i"],
        "variables": {**task.image_variables, **task.variables},
    }  # fmt: skip
    answer = container.run(
        "screen", "terminal", request=request, timeout_s=wait_s + _GRACE_S, directory=task.directory
    )
    return str(answer["screen"])


@register_tool
def upload(path: str, archive: str) -> dict[str, Any]:
    """Unpack a tar archive into a directory of the task's container.

    Args:
        path: The directory; it is created if it is missing.
        archive: The archive, as base64; it may be compressed.
    """
    _started()
    request = {"do": "unpack", "path": path, "archive": archive}
    container.run(*container.GRADER, request=request, timeout_s=START_S)
    return {"path": path}


@register_reward
def run_tests(
    tests: str, script: str, verdict_by: str, timeout_s: float, variables: dict[str, str]
) -> dict[str, Any]:
    """Run the task's tests in its container, after the agent's processes have ended.

    Args:
        tests: Archive of the directory ``/tests``, as base64.
        script: The file in it that runs the tests.
        verdict_by: ``pytest`` or ``file``, see `verdict`.
        timeout_s: Seconds for the tests.
        variables: The variables of the tests.

    Returns:
        ``score``, ``reason``, the verdict of each of the ``tests`` that pytest ran, and the end of
        the ``output``.
    """
    task = _started()
    request = {
        "do": "grade", "tests": tests, "script": script, "timeout_s": timeout_s,
        "variables": {**task.variables, **variables}, "directory": task.directory,
        "fingerprints": task.fingerprints, "package_settings": task.package_settings,
        "image_variables": task.image_variables,
        "project": task.project, "plugin": container.PLUGIN, "start": container.START,
        "copied": verdict_by == "pytest",
    }  # fmt: skip
    try:
        container.run(*container.GRADER, request={"do": "end_others"}, timeout_s=START_S)
        outcome = container.run(
            *container.GRADER, request=request, timeout_s=timeout_s + _GRACE_S + START_S
        )
    except (container.ProgramFailed, TimeoutError) as exc:
        # What runs in the task's container may end or stop the grader.
        return {"score": 0.0, "reason": f"the tests did not report: {exc}", "tests": {}}
    return verdict(verdict_by, outcome)


@register_health
def health() -> dict[str, str]:
    """Return whether the code is loaded; the task's container is watched by the engine."""
    return {"status": "healthy"}
