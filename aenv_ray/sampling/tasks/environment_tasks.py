"""The tasks that an environment brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from aenv_ray.actors.fabric import driver_api
from aenv_ray.actors.fabric.references import resolve_environment
from aenv_ray.client.sync import SyncEnvironment
from aenv_ray.errors import ConfigError, FunctionFailed, ToolNotFound
from aenv_ray.sampling.tasks.archives import check_files
from aenv_ray.sampling.tasks.feed import load_tasks, task_directories
from aenv_ray.trajectories.schema import Task

TASK_FILE: Final = "tasks.jsonl"


def environment_tasks(
    environment: str | Path, environment_variables: Mapping[str, str] | None = None
) -> list[Task]:
    """Return the tasks that an environment brings.

    They are in the file ``tasks.jsonl`` of its project. If there is none, an instance is asked for
    those of the function that is decorated with ``@register_tasks``.

    Args:
        environment: Path, or ``name@version``.
        environment_variables: Variables of that instance, which the function may read.

    They are its publisher's, so they cannot name files of this machine (invariant 13).

    Raises:
        ConfigError: The environment brings no tasks, or one of them is invalid.
        FunctionFailed: Its function raised.
        EnvironmentNotFound: The environment is unknown.
    """
    project = resolve_environment(str(environment), driver_api.init)
    file = project.path / TASK_FILE
    if file.is_file():
        return _checked(load_tasks(file), environment)
    if project.config.deploy.is_dual:  # each of its tasks names the image of an instance
        raise ConfigError(
            f"{environment} brings no tasks: its project has no {TASK_FILE}",
            hint="give tasks with --tasks, or as an argument of sample",
        )
    variables = dict(environment_variables or {})
    with SyncEnvironment(str(environment), environment_variables=variables) as instance:
        try:
            return _checked(load_tasks(instance.list_tasks()), environment)
        except ToolNotFound:
            raise ConfigError(
                f"{environment} brings no tasks: it has no {TASK_FILE}, and no function with "
                "@register_tasks",
                hint="give tasks with --tasks, or as an argument of sample",
            ) from None
        except FunctionFailed as exc:
            raise FunctionFailed(
                f"the tasks of {environment} cannot be listed: {exc.message}",
                hint="check the variables that its function reads, see --env and the "
                "environment's README",
            ) from exc


def _checked(tasks: list[Task], environment: str | Path) -> list[Task]:
    hint = "look at the tasks; if you trust them, copy them to a file of yours for --tasks"
    check_files(tasks, f"the tasks of {environment}", hint=hint)
    return tasks


def tasks_of(
    environment: str,
    source: str | None,
    fields: Mapping[str, str],
    environment_variables: Mapping[str, str],
) -> Sequence[Task]:
    """Return the tasks of a source, by default the environment's own.

    Args:
        environment: Path, or ``name@version``.
        source: File, directory or data set, see `TaskSource`. None: the environment's tasks.
        fields: Columns of fields, as in `load_tasks`.
        environment_variables: As in `environment_tasks`.

    Raises:
        ConfigError: There are no tasks, or they are malformed.
        AenvError: The environment does not exist.
    """
    found: Sequence[Task]
    if source is None:
        found = environment_tasks(environment, environment_variables)
    else:
        found = task_directories(source) or load_tasks(source, fields)
    if not found:
        raise ConfigError(
            f"{source or environment} has no tasks",
            hint="give a file or directory of tasks, or an environment that has tasks",
        )
    return found
