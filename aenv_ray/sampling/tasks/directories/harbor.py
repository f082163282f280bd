"""Tasks in the format of Harbor, in which Terminal-Bench 2 is published.

``task.toml``, ``instruction.md``, ``environment/``, ``solution/solve.sh`` and ``tests/test.sh``;
see https://www.harborframework.com/docs/tasks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from aenv_ray.errors import ConfigError
from aenv_ray.sampling.tasks.directories import compose, fields
from aenv_ray.sampling.tasks.directories.fields import GRACE_S, FormatOptions
from aenv_ray.trajectories.schema import Call, InstanceNeeds, Task, ToolCall

FILE: Final = "task.toml"
_SERVICE: Final = {"TEST_DIR": "/tests", "CPUS": "1", "MEMORY": "2G"}
_TEMPLATE: Final = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)
_NETWORK: Final = ("allowed_hosts", "allowed_domains", "network_policy")
_ROOT: Final = (None, "", "root", "0", 0)
_MIB: Final = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024}


class _Section(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Phase(_Section):
    network_mode: Literal["public", "no-network", "allowlist"] | None = None


class _Verifier(_Phase):
    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    environment_mode: Literal["shared", "separate"] | None = None
    """None: separate if it has an `environment`."""
    environment: dict[str, Any] | None = None
    collect: list[Any] = Field(default_factory=list)
    user: str | int | None = None


class _Agent(_Phase):
    timeout_sec: float | None = Field(default=None, gt=0)
    user: str | int | None = None


class _Environment(_Phase):
    build_timeout_sec: float = Field(default=600.0, gt=0)
    docker_image: str | None = None
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    memory: str | None = None
    gpus: int = 0
    allow_internet: bool | None = None
    healthcheck: Any = None
    workdir: str | None = None
    mcp_servers: list[Any] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    os: str = "linux"

    @property
    def mode(self) -> str:
        """The network mode; in older tasks `allow_internet` says it."""
        return self.network_mode or ("no-network" if self.allow_internet is False else "public")

    @property
    def names_its_network(self) -> bool:
        """False: it has the internet by default."""
        return self.network_mode is not None or self.allow_internet is not None


class _Solution(_Section):
    env: dict[str, str] = Field(default_factory=dict)


class _Description(_Section):
    verifier: _Verifier = Field(default_factory=_Verifier)
    agent: _Agent = Field(default_factory=_Agent)
    environment: _Environment = Field(default_factory=_Environment)
    solution: _Solution = Field(default_factory=_Solution)
    steps: list[Any] = Field(default_factory=list)


def load(directory: Path, task_id: str, options: FormatOptions) -> Task:
    """Read a task.

    Raises:
        ConfigError: It is malformed; the message names the file and the field.
    """
    found = fields.from_toml(directory / FILE, _Description)
    wanted = found.environment
    lacks = [*_lacks(found, options), *_lacks_of_sections(found)]
    if found.steps:  # instructions and tests are in the directories of the steps
        return Task(id=task_id, reward=None, unsupported=f"the task needs {'; '.join(lacks)}")
    instruction = fields.text_of(directory / "instruction.md")
    service = _service(directory, wanted)
    lacks += service.lacks
    lacks += fields.lacks_of_script(fields.expect(directory / "tests" / "test.sh"))
    if wanted.mode == "public" and not wanted.names_its_network:
        lacks += fields.lacks_of_network(options, [directory / "tests", directory / "solution"])
    is_online = wanted.mode == "public" and options.may_use_internet
    variables = {**_resolved(wanted.env), **service.environment}
    return Task(
        id=task_id,
        instruction=instruction,
        unsupported=f"the task needs {'; '.join(lacks)}" if lacks else None,
        timeout_s=found.agent.timeout_sec,
        datasource=service.image,
        instance=InstanceNeeds(
            build=service.build(timeout_s=wanted.build_timeout_sec),
            cpu=None if wanted.cpus is None else f"{wanted.cpus:g}",
            memory=_memory(directory, wanted),
            network=None if is_online else "none",
        ),
        setup=service.start(variables),
        reward=Call(
            arguments={
                "script": "test.sh",
                "verdict_by": "file",
                "timeout_s": found.verifier.timeout_sec,
                "variables": {**variables, **_resolved(found.verifier.env)},
            },
            archives={"tests": (str(directory / "tests"),)},
            timeout_s=found.verifier.timeout_sec + GRACE_S,
        ),
        reference=_solution(directory, found),
    )


def _service(directory: Path, wanted: _Environment) -> compose.Service:
    """Return the container of a task.

    Harbor merges a task's compose file into one of its own, whose service ``main`` is the task's
    image. A file that names only ``main`` and no image adds to that.
    """
    path = compose.find(directory / "environment")
    own = compose.Service(image=wanted.docker_image or "")
    if not wanted.docker_image:
        if path is None:
            fields.expect(directory / "environment" / "Dockerfile")
        own = compose.Service(context=directory / "environment")
    found = own if path is None else compose.load(path, _SERVICE, own)
    return replace(found, directory=wanted.workdir or found.directory)


def _lacks(found: _Description, options: FormatOptions) -> Iterator[str]:
    wanted = found.environment
    if wanted.gpus:
        yield f"{wanted.gpus} GPU{'s' if wanted.gpus > 1 else ''}"
    if wanted.mode == "public" and wanted.names_its_network and not options.may_use_internet:
        yield "the internet, which AENV_ALLOW_NETWORKS does not allow"
    if wanted.mcp_servers:
        yield "MCP servers"
    if found.steps:
        yield "several steps"
    if wanted.os.lower() != "linux":
        yield f"the operating system {wanted.os}"
    if found.verifier.environment_mode == "separate" or found.verifier.environment is not None:
        yield "a separate container for its tests"
    if found.verifier.collect:
        yield "commands that collect files before its tests"


def _lacks_of_sections(found: _Description) -> Iterator[str]:
    wanted = found.environment
    for name, section in (("agent", found.agent), ("verifier", found.verifier)):
        if section.user not in _ROOT:
            yield f"the user {section.user} for its {name}"
    if wanted.healthcheck:
        yield "a health check"
    for name in ("environment", "agent", "verifier"):
        phase: _Phase = getattr(found, name)
        extra = phase.model_extra or {}
        yield from (f"{name}.{key}" for key in _NETWORK if extra.get(key))
        mode = phase.network_mode
        if mode == "allowlist":
            yield f"{name}.network_mode {mode}"
        elif mode not in (None, wanted.mode):
            yield f"{name}.network_mode {mode}, which is not that of its environment"
    for env in (wanted.env, found.verifier.env, found.solution.env):
        for match in filter(None, map(_TEMPLATE.fullmatch, env.values())):
            if match[2] is None:
                yield f"the variable {match[1]}"


def _resolved(env: Mapping[str, str]) -> dict[str, str]:
    """Return variables with the defaults of templates; those without one are lacks."""
    return {
        name: _TEMPLATE.sub(r"\2", value) if _TEMPLATE.fullmatch(value) else value
        for name, value in env.items()
    }


def _memory(directory: Path, wanted: _Environment) -> str | None:
    """Return the memory limit; ``memory`` is the name of older tasks.

    Raises:
        ConfigError: It is malformed.
    """
    if wanted.memory_mb is not None:
        return f"{wanted.memory_mb}Mi"
    if wanted.memory is None:
        return None
    text = wanted.memory.strip().upper().removesuffix("B").removesuffix("I")
    try:
        return f"{round(float(text[:-1]) * _MIB[text[-1:]])}Mi"
    except (KeyError, ValueError):
        raise ConfigError(
            f"{directory / FILE}: environment.memory: {wanted.memory!r} is not a size such as 2G",
            hint="write a number and K, M, G or T",
        ) from None


def _solution(directory: Path, found: _Description) -> tuple[ToolCall, ...]:
    """Return the calls that play the task's own solution; none if it has none."""
    root = directory / "solution"
    if not (root / "solve.sh").is_file():
        return ()
    limit_s = found.agent.timeout_sec or 600.0
    upload = ToolCall(
        tool="upload", arguments={"path": "/solution"}, archives={"archive": (str(root),)}
    )
    run = {"command": "bash /solution/solve.sh", "timeout_s": limit_s}
    if found.solution.env:
        run["variables"] = _resolved(found.solution.env)
    return upload, ToolCall(tool="execute_command", arguments=run, timeout_s=limit_s + GRACE_S)
