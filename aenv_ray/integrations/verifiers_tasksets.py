"""Tasksets of verifiers as environments: `taskset_env` writes a project whose tools are theirs.

    environment = taskset_env("wiki-search", name="wiki-search", requirements=["wiki-search"])
    episodes = aenv_ray.sample(environment, policy=policy)

verifiers runs in the sandbox, with its own toolsets, users, judges and rewards; the agent of its
episode is the caller of the tools. It need not be installed here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from aenv_ray import ids
from aenv_ray.errors import ConfigError
from aenv_ray.integrations.support.projects import write_project

VERIFIERS: Final = "verifiers>=0.4,<0.5"
TASKS: Final = 1000
_SOURCE: Final = Path(__file__).parent / "verifiers_project" / "src"


def taskset_env(
    taskset: str | Path,
    *,
    name: str,
    version: str = "1.0.0",
    config: Mapping[str, Any] | None = None,
    agent: str = "",
    task_count: int = TASKS,
    requirements: Sequence[str] = (),
    network: Literal["none", "host"] = "host",
    environment_variables: Mapping[str, str] | None = None,
    directory: str | Path | None = None,
) -> Path:
    """Write an environment with the tools, tasks and rewards of a taskset, and return its path.

    Each instance plays one episode. Its tools are those of the taskset's toolsets, and ``answer``,
    which submits the answer of the task, or sends a message to a simulated user or a game and
    returns the reply. The reward ends the episode; it is that of the trace in verifiers.

    Args:
        taskset: Id of a taskset whose package is in `requirements` or comes with verifiers, or a
            Python file with one.
        name: Name of the environment.
        version: Version of the environment.
        config: The ``env`` of verifiers without the taskset's id, for example
            ``{"taskset": {"split": "test"}, "user": {"model": "…"}}``.
        agent: Which of the environment's agents the caller is. "": the only one.
        task_count: Number of tasks to list of a taskset without an end.
        requirements: Packages that the taskset needs, besides verifiers.
        network: As ``deployConfig.network``; ``none`` suits tasksets that need no other machine.
        environment_variables: Variables of all instances. Give keys to `create` instead, which
            keeps them out of the project.
        directory: Directory to write to; files of the same names are replaced. None: one in the
            data directory, named by the content.

    Raises:
        ConfigError: The name, the file or the configuration is wrong.
    """
    ids.split_reference(f"{name}@{version}")
    files = {f"src/{path.name}": path.read_text(encoding="utf-8") for path in _sources()}
    taskset_id = str(taskset)
    if isinstance(taskset, Path) or taskset.endswith(".py"):
        path = Path(taskset)
        if not path.is_file() or not path.stem.isidentifier() or f"src/{path.name}" in files:
            raise ConfigError(
                f"{path} cannot be used as a taskset: it does not exist, its name is not a Python "
                "identifier, or the project has another file of that name",
                hint="give the path of a Python file such as my_taskset.py, or the id of a taskset",
            )
        files[f"src/{path.name}"] = path.read_text(encoding="utf-8")
        taskset_id = path.stem
    env: dict[str, Any] = dict(config or {})
    env["taskset"] = {**env.get("taskset", {}), "id": taskset_id}
    try:
        given = json.dumps({"env": env, "agent": agent, "task_count": task_count}, indent=2)
    except TypeError as exc:
        raise ConfigError(
            f"the config cannot be written as JSON: {exc}",
            hint="give numbers, texts, lists and dicts",
        ) from None
    files["src/taskset.json"] = given + "\n"
    deploy = {"network": network, "environmentVariables": dict(environment_variables or {})}
    project = {"name": name, "version": version, "deployConfig": deploy}
    return write_project(project, files, (VERIFIERS, *requirements), directory)


def _sources() -> list[Path]:
    return sorted(_SOURCE.glob("*.py"))
