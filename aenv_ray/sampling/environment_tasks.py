"""The tasks that an environment brings."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from aenv_ray.actors.fabric import driver_api
from aenv_ray.actors.fabric.references import resolve
from aenv_ray.errors import ConfigError
from aenv_ray.sampling.tasks import load_tasks
from aenv_ray.trajectories.schema import Task

TASK_FILE: Final = "tasks.jsonl"


def environment_tasks(environment: str | Path) -> list[Task]:
    """Return the tasks that an environment brings.

    They are in the file ``tasks.jsonl`` of its project.

    Raises:
        ConfigError: The environment brings no tasks, or one of them is invalid.
        EnvironmentNotFound: There is no such environment.
    """
    file = resolve(str(environment), driver_api.init).path / TASK_FILE
    if not file.is_file():
        raise ConfigError(
            f"{environment} brings no tasks: its project has no {TASK_FILE}",
            hint="give tasks with --tasks, or as an argument of sample",
        )
    return load_tasks(file)
