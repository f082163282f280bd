"""Tasks in the format of Terminal-Bench 1.

``task.yaml``, ``Dockerfile`` and perhaps ``docker-compose.yaml``, ``solution.sh`` or
``solution.yaml``, ``run-tests.sh`` and ``tests/``; see
https://www.tbench.ai/docs/task-overview.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from aenv_ray.errors import ConfigError
from aenv_ray.project.dockerfile import copied_paths
from aenv_ray.sampling.tasks.directories import compose, fields
from aenv_ray.sampling.tasks.directories.fields import GRACE_S, FormatOptions
from aenv_ray.trajectories.schema import Call, InstanceNeeds, Task, ToolCall

FILE: Final = "task.yaml"
TESTS: Final = "/tests"
"""Where the tests are in the container."""
_SERVICE: Final = {"T_BENCH_TEST_DIR": TESTS, "T_BENCH_CONTAINER_LOGS_PATH": "/logs"}
_HIDDEN: Final = ("task.yaml", "solution.sh", "solution.yaml", "run-tests.sh", "tests")
"""What the image does not get, so that the agent cannot read it, unless its Dockerfile names it."""
_PARSER: Final = "pytest"
_BLOCKED_S: Final = 900.0
"""Longest wait for a blocking command of a solution that names none."""


class _Description(BaseModel):
    model_config = ConfigDict(extra="ignore")

    instruction: str = ""
    descriptions: list[dict[str, Any]] = Field(default_factory=list)
    parser_name: str = _PARSER
    max_agent_timeout_sec: float = Field(default=360.0, gt=0)
    max_test_timeout_sec: float = Field(default=60.0, gt=0)
    run_tests_in_same_shell: bool = False


class _Command(BaseModel):
    model_config = ConfigDict(extra="ignore")

    command: str
    min_timeout_sec: float = 0.0
    max_timeout_sec: float = _BLOCKED_S
    block: bool = False
    append_enter: bool = True


class _Solution(BaseModel):
    commands: list[_Command]


def load(directory: Path, task_id: str, options: FormatOptions) -> Task:
    """Read a task.

    Raises:
        ConfigError: It is malformed; the message names the file and the field.
    """
    description = fields.from_yaml(directory / FILE, _Description)
    service = _service(directory)
    lacks = list(service.lacks)
    if description.parser_name != _PARSER:
        lacks.append(f"the parser {description.parser_name!r} of test results")
    if description.run_tests_in_same_shell:
        lacks.append("its tests in the shell of the agent")
    tests = directory / "tests"
    script = fields.expect(directory / "run-tests.sh")
    lacks += fields.lacks_of_script(script)
    solutions = [directory / "solution.sh", directory / "solution.yaml"]
    lacks += fields.lacks_of_network(options, [script, tests, *solutions])
    paths = [str(directory / "run-tests.sh"), *([str(tests)] if tests.is_dir() else [])]
    variables = {**service.environment, "TEST_DIR": TESTS}
    return Task(
        id=task_id,
        instruction=_instruction(directory, description),
        unsupported=f"the task needs {'; '.join(lacks)}" if lacks else None,
        timeout_s=description.max_agent_timeout_sec,
        datasource=service.image,
        instance=InstanceNeeds(
            build=service.build(ignored=_ignored(service)),
            network=None if options.may_use_internet else "none",
        ),
        setup=service.start(variables),
        reward=Call(
            arguments={
                "script": "run-tests.sh",
                "verdict_by": "pytest",
                "timeout_s": description.max_test_timeout_sec,
                "variables": variables,
            },
            archives={"tests": tuple(paths)},
            timeout_s=description.max_test_timeout_sec + GRACE_S,
        ),
        reference=_solution(directory),
    )


def _service(directory: Path) -> compose.Service:
    """Return the container of a task: of its compose file, else of its Dockerfile."""
    path = compose.find(directory)
    if path is not None:
        return compose.load(path, _SERVICE)
    fields.expect(directory / "Dockerfile")
    return compose.Service(context=directory)


def _ignored(service: compose.Service) -> tuple[str, ...]:
    """Return patterns of what the image does not get.

    Some tasks copy tests or their solution by name: the image cannot be built without these files.
    """
    path = None if service.context is None else service.context / service.dockerfile
    if path is None or not path.is_file():
        return _HIDDEN
    named = dict.fromkeys(source for _, source in copied_paths(fields.text_of(path)))
    return *_HIDDEN, *(f"!{one}" for one in named if one.partition("/")[0] in _HIDDEN)


def _instruction(directory: Path, description: _Description) -> str:
    """Return the instruction; older tasks have several, of which ``base`` is the usual one.

    Raises:
        ConfigError: There is none.
    """
    if description.instruction:
        return description.instruction
    texts = {str(one.get("key")): one.get("description") for one in description.descriptions}
    found = texts.get("base") or next(iter(texts.values()), None)
    if not isinstance(found, str) or not found:
        raise ConfigError(
            f"{directory / FILE}: instruction: the field is missing",
            hint="write what the agent is to do in it",
        )
    return found


def _solution(directory: Path) -> tuple[ToolCall, ...]:
    """Return the calls that play the task's own solution; none if it has none."""
    script = directory / "solution.sh"
    if script.is_file():
        upload = ToolCall(
            tool="upload", arguments={"path": "/oracle"}, archives={"archive": (str(script),)}
        )
        run = {"command": "bash /oracle/solution.sh", "timeout_s": _BLOCKED_S}
        return upload, ToolCall(
            tool="execute_command", arguments=run, timeout_s=_BLOCKED_S + GRACE_S
        )
    path = directory / "solution.yaml"
    if not path.is_file():
        return ()
    data = fields.yaml_of(path, fields.text_of(path))
    found = fields.checked(path, {"commands": data} if isinstance(data, list) else data, _Solution)
    return tuple(map(_keystrokes, found.commands))


def _keystrokes(one: _Command) -> ToolCall:
    wait_s = one.max_timeout_sec if one.block else one.min_timeout_sec
    keys = [one.command, "Enter"] if one.append_enter else [one.command]
    return ToolCall(
        tool="keystrokes",
        arguments={"keys": keys, "wait_s": wait_s, "until_idle": one.block},
        timeout_s=wait_s + GRACE_S,
    )
