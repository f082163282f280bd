"""A terminal for an agent, with a set of shell tasks to solve in it.

The agent has one tool, `execute_command`. The trainer starts a task with `start_task` and asks for
`task_reward` at the end.
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
    # Read now: later the project's directory is hidden, from this process as from the agent.
    path = Path(__file__).resolve().parent.parent / "tasks.jsonl"
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    return {row["id"]: row["instruction"] for row in rows}


_INSTRUCTIONS = _instructions()
_shell = Shell()
_started: dict[str, Path] = {}


@register_tool
def execute_command(command: str, timeout: float = 60) -> dict[str, Any]:
    """Run a command in a bash shell that stays between calls.

    The current directory, variables, functions and background jobs persist. Standard input is
    /dev/null unless the command redirects it. Output is stdout and stderr as a terminal shows them;
    of more than 1 MiB the middle is left out.

    Args:
        command: Bash source: one or many lines.
        timeout: Seconds, above 0, at most 86400. Then the command is interrupted, at last killed,
            and the shell stays.

    Returns:
        ``{"output": [text, finished], "returncode": code}``. The code is the command's own; 124
        with ``finished`` false after a timeout. ``truncated``: output was left out. ``note``: the
        command was stopped, or the shell ended. ``restarted``: this is a fresh shell, since the one
        before had ended.

    Raises:
        ValueError: The command holds NUL or a lone surrogate, or the timeout is out of range.
    """
    # The call's own deadline comes first when it is the shorter one: interrupted a moment before
    # it, the command still has a result, and the shell stays.
    remaining_s = current_call().remaining_s
    return _shell.run(command, min(timeout, remaining_s - min(1.0, 0.1 * remaining_s)))


@register_function
def start_task(task_id: str) -> dict[str, str]:
    """Make a task's files in a fresh directory and start the shell there.

    Starting a task again makes its files anew; a running shell and what it started is killed.

    Returns:
        ``task_id``, ``instruction`` for the agent, and ``workdir``, where its shell starts.

    Raises:
        ValueError: There is no such task.
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
    """Check what the task's directory holds now.

    Returns:
        ``score`` 1.0 or 0.0, ``passed``, and ``reason``: what is wrong, or "solved".

    Raises:
        ValueError: There is no such task.
        RuntimeError: The task was not started in this instance.
        OSError: The machine is short of memory, space or files: no outcome.
    """
    task = TASKS[_known(task_id)]
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
    """Return whether there is a bash to run."""
    if shutil.which("bash") is None:
        return {"status": "unhealthy", "reason": "there is no bash on the PATH"}
    return {"status": "healthy"}


def _remove(directory: Path) -> None:
    """Remove what an earlier start left, with directories that the agent made unreadable."""
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
        raise ValueError(
            f"there is no task {task_id!r}; list_tasks names all {len(TASKS)}: {some}…"
        )
    return task_id
