"""A terminal for an agent, and a set of shell tasks.

The agent has one tool, `execute_command`. The trainer starts a task with `start_task` and calls the
task's reward at the end: `task_reward`, or `process_reward` if it asks for running processes.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from shell import Shell
from tasks import TASKS, Failed, as_outcome

from aenv_ray.runtime import (
    current_call,
    register_function,
    register_health,
    register_reward,
    register_tool,
)


def _instructions() -> dict[str, str]:
    # At import: later the project directory is hidden, from this process and from the agent.
    path = Path(__file__).resolve().parent.parent / "tasks.jsonl"
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    return {row["id"]: row["instruction"] for row in rows}


_INSTRUCTIONS = _instructions()
_shell = Shell()
_started: dict[str, Path] = {}


@register_tool
def execute_command(command: str, timeout: float = 60) -> dict[str, Any]:
    """Run a command in a bash shell that persists between calls.

    The current directory, variables, functions and background jobs persist. Standard input is
    /dev/null unless the command redirects it. The output is stdout and stderr as a terminal shows
    them; if it exceeds 1 MiB, the middle is cut.

    Args:
        command: Bash source, one or more lines.
        timeout: Seconds, above 0, at most 86400. After it the command is interrupted or killed; the
            shell keeps running.

    Returns:
        ``{"output": [text, finished], "returncode": code}``. The code is the command's exit code;
        after a timeout it is 124 and ``finished`` is false. ``truncated``: output was cut.
        ``note``: the command was stopped, or the shell ended. ``restarted``: this is a new shell,
        since the previous one had ended.

    Raises:
        ValueError: The command contains NUL or a lone surrogate, or the timeout is out of range.
    """
    # Interrupted shortly before the deadline of the call, the command still gives a result.
    remaining_s = current_call().remaining_s
    return _shell.run(command, min(timeout, remaining_s - min(1.0, 0.1 * remaining_s)))


@register_function
def start_task(task_id: str) -> dict[str, str]:
    """Create a task's files in a new directory, and start the shell there.

    Starting a task again creates its files again. A running shell and its processes are killed.

    Returns:
        ``task_id``, ``instruction`` for the agent, and ``workdir``, the shell's directory.

    Raises:
        ValueError: Unknown task.
    """
    task = TASKS[_known(task_id)]
    directory = Path.cwd() / task_id
    _shell.move(str(directory))
    _started.pop(task_id, None)
    _remove(directory)
    directory.mkdir()
    task.setup(directory)
    _started[task_id] = directory
    return {
        "task_id": task_id,
        "instruction": _INSTRUCTIONS[task_id],
        "workdir": str(directory),
    }


@register_reward
def task_reward(task_id: str) -> dict[str, Any]:
    """Check the current content of the task's directory.

    Returns:
        ``score`` 1.0 or 0.0, ``passed``, and ``reason``: what is wrong, or "solved".

    Raises:
        ValueError: Unknown task, or one for `process_reward`.
        RuntimeError: The task was not started in this instance.
        OSError: The machine is out of memory, disk space or file descriptors: there is no outcome.
    """
    if TASKS[_known(task_id)].is_about_running:
        raise ValueError(f"task {task_id!r} asks for running processes; call process_reward")
    return _checked(task_id)


@register_reward(keep_processes=True)
def process_reward(task_id: str) -> dict[str, Any]:
    """Check a task that asks for running processes; the agent's processes continue meanwhile.

    Returns:
        As for `task_reward`.

    Raises:
        ValueError: Unknown task, or one for `task_reward`.
        RuntimeError: As for `task_reward`.
        OSError: As for `task_reward`.
    """
    if not TASKS[_known(task_id)].is_about_running:
        raise ValueError(f"task {task_id!r} asks for no running processes; call task_reward")
    return _checked(task_id)


def _checked(task_id: str) -> dict[str, Any]:
    task = TASKS[task_id]
    directory = _started.get(task_id)
    if directory is None:
        raise RuntimeError(f"task {task_id!r} was not started; call start_task first")
    try:
        try:
            task.check(directory)
        except OSError as exc:
            raise as_outcome(exc, f"{exc.filename or directory} cannot be checked") from None
    except Failed as exc:
        return {"score": 0.0, "passed": False, "reason": str(exc)}
    return {"score": 1.0, "passed": True, "reason": "solved"}


@register_function
def list_tasks() -> list[dict[str, str]]:
    """Return ``id`` and ``instruction`` of every task."""
    return [{"id": name, "instruction": _INSTRUCTIONS[name]} for name in TASKS]


@register_health
def health() -> dict[str, str]:
    """Return whether bash is installed."""
    if shutil.which("bash") is None:
        return {"status": "unhealthy", "reason": "bash is not on the PATH"}
    return {"status": "healthy"}


def _remove(directory: Path) -> None:
    """Remove the files of an earlier start, also from directories that are unreadable."""
    if not directory.is_symlink() and directory.is_dir():
        directory.chmod(0o700)
        for parent, names, _ in os.walk(directory):
            for name in names:
                path = os.path.join(parent, name)
                if not os.path.islink(path):
                    os.chmod(path, 0o700)
        shutil.rmtree(directory)
    else:
        directory.unlink(missing_ok=True)


def _known(task_id: str) -> str:
    if task_id not in TASKS:
        some = ", ".join(list(TASKS)[:3])
        raise ValueError(f"unknown task {task_id!r}; list_tasks returns all {len(TASKS)}: {some}…")
    return task_id
