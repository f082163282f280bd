"""Compose files of one service, as far as they describe a task's container."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, field_validator

from aenv_ray.errors import ConfigError
from aenv_ray.sampling.tasks.directories.fields import checked, text_of, yaml_of
from aenv_ray.trajectories.schema import Call, ImageBuild

FILE: Final = "docker-compose.yaml"
_VARIABLE: Final = re.compile(
    r"\$(?:\$|\{(?P<name>\w+)(?:(?P<kind>:?[-?+])(?P<rest>[^}]*))?\}|(?P<bare>\w+))"
)
_WAITS: Final = re.compile(
    r"(exec )?(/usr)?(/bin/)?"
    r"(sleep (infinity|inf|\d+\w?)|tail -[fF] /dev/null|cat|(ba|da)?sh( -[il]+)*)"
    r"|while (true|:|\[ 1 \]); ?do sleep \S+; ?done"
)
_IGNORED: Final = frozenset(
    {
        *("build", "image", "command", "environment", "working_dir", "container_name", "volumes"),
        *("healthcheck", "init", "restart", "stdin_open", "tty", "hostname", "labels", "ports"),
        *("pull_policy", "platform", "expose", "stop_grace_period", "profiles", "deploy"),
        *("cpus", "mem_limit", "memswap_limit", "shm_size", "ulimits", "logging", "networks"),
    }
)
"""Keys of a service that are honoured, or that do not matter for one container."""


class _Build(BaseModel):
    model_config = ConfigDict(extra="ignore")

    context: str = "."
    dockerfile: str = "Dockerfile"
    dockerfile_inline: str | None = None
    target: str | None = None
    args: dict[str, str] = Field(default_factory=dict)

    @field_validator("args", mode="before")
    @classmethod
    def _mapping(cls, value: Any) -> Any:
        return _mapping_of(value)


class _ComposeService(BaseModel):
    model_config = ConfigDict(extra="allow")

    image: str | None = None
    build: _Build | None = None
    command: str | list[str] | None = None
    environment: dict[str, str] = Field(default_factory=dict)
    working_dir: str | None = None

    @field_validator("build", mode="before")
    @classmethod
    def _build_of(cls, value: Any) -> Any:
        return {"context": value} if isinstance(value, str) else value

    @field_validator("environment", mode="before")
    @classmethod
    def _environment_of(cls, value: Any) -> Any:
        return _mapping_of(value)


class _Compose(BaseModel):
    model_config = ConfigDict(extra="ignore")

    services: dict[str, _ComposeService] = Field(min_length=1)


@dataclass(frozen=True)
class Service:
    """The container of a task."""

    image: str = ""
    """"": it is built."""
    context: Path | None = None
    """None: the image is not built."""
    dockerfile: str = "Dockerfile"
    build_arguments: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    directory: str = ""
    """"": that of the image."""
    lacks: tuple[str, ...] = ()
    """What the service needs that a sandbox does not give."""

    def build(
        self, *, ignored: tuple[str, ...] = (), timeout_s: float = 600.0
    ) -> ImageBuild | None:
        """Return how its image is built, see `ImageBuild`; None if it is not."""
        if self.context is None:
            return None
        return ImageBuild(
            context=str(self.context),
            dockerfile=self.dockerfile,
            arguments=self.build_arguments,
            ignored=ignored,
            timeout_s=timeout_s,
        )

    def start(self, variables: Mapping[str, str]) -> Call:
        """Return the setup of its task, with these variables."""
        return Call(
            function="start_task",
            arguments={"variables": dict(variables), "directory": self.directory},
        )


def find(directory: Path) -> Path | None:
    """Return the compose file of a directory; None if there is none."""
    path = directory / FILE
    return path if path.is_file() else None


def load(path: Path, variables: Mapping[str, str], base: Service | None = None) -> Service:
    """Return the service of a compose file.

    Args:
        path: The file.
        variables: Those that the benchmark's harness sets. Others are empty, as in Compose.
        base: Its image is that of a service that names none.

    Raises:
        ConfigError: It is malformed; the message names the field.
    """
    data = _substituted(path, yaml_of(path, text_of(path)), variables)
    found = checked(path, data, _Compose)
    if len(found.services) > 1:
        return Service(lacks=(f"several services ({', '.join(sorted(found.services))})",))
    ((name, service),) = found.services.items()
    return replace(
        _image(path, name, service, base),
        environment=service.environment,
        directory=service.working_dir or "",
        lacks=tuple(_lacks(service)),
    )


def _image(path: Path, name: str, service: _ComposeService, base: Service | None) -> Service:
    build = service.build
    if build is not None:
        context = (path.parent / build.context).resolve()
        if not (context / build.dockerfile).resolve().is_relative_to(path.parent.resolve()):
            raise ConfigError(
                f"{path}: services.{name}.build: outside of the task's directory",
                hint="move the build context into the task's directory",
            )
        return Service(context=context, dockerfile=build.dockerfile, build_arguments=build.args)
    if service.image:
        return Service(image=service.image)
    if base is None:
        raise ConfigError(
            f"{path}: services.{name}: neither image nor build",
            hint="give the service an image or a build",
        )
    return base


def _lacks(service: _ComposeService) -> Iterator[str]:
    extra = service.model_extra or {}
    if not _only_waits(service.command):
        yield "the command of its compose file, which would not run during its tests"
    for key in sorted(extra.keys() - _IGNORED):
        if extra[key]:
            yield f"{key} of its compose file"
    for volume in extra.get("volumes") or ():
        source = volume.get("source", "") if isinstance(volume, dict) else str(volume)
        if source.partition(":")[0].strip():  # those of the harness have an empty source here
            yield f"the volume {source}"
    for key in ("dockerfile_inline", "target"):
        if service.build is not None and getattr(service.build, key):
            yield f"build.{key} of its compose file"
    devices = (((extra.get("deploy") or {}).get("resources") or {}).get("reservations") or {}).get(
        "devices"
    )
    if devices:
        yield "a device, such as a GPU"


def _only_waits(command: str | list[str] | None) -> bool:
    """Return whether a command only keeps the container alive, as the sandbox does by itself."""
    words = shlex.split(command) if isinstance(command, str) else list(command or ())
    if len(words) == 3 and re.fullmatch(r"(/bin/)?(ba|da)?sh -\w*c", " ".join(words[:2])):
        words = words[2:]
    return not words or _WAITS.fullmatch(" ".join(words)) is not None


def _mapping_of(value: Any) -> Any:
    """Return ``["A=1", "B"]`` or a mapping as a mapping of strings."""
    if isinstance(value, list):
        return dict(str(item).partition("=")[::2] for item in value)
    if isinstance(value, dict):
        return {key: "" if item is None else _scalar(item) for key, item in value.items()}
    return {} if value is None else value


def _scalar(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, list | dict) else str(value)


def _substituted(path: Path, data: Any, variables: Mapping[str, str]) -> Any:
    """Replace variables in the values of a file, as Compose does.

    Raises:
        ConfigError: One that the file requires is missing.
    """

    def value(match: re.Match[str]) -> str:
        name = match["name"] or match["bare"]
        if name is None:
            return "$"
        found, kind, rest = variables.get(name), match["kind"] or "", match["rest"] or ""
        is_set = found is not None and (bool(found) or not kind.startswith(":"))
        if kind.endswith("+"):
            return rest if is_set else ""
        if is_set:
            return found or ""
        if kind.endswith("?"):
            raise ConfigError(
                f"{path}: the variable {name} is required, and not known: {rest}",
                hint="write the value into the compose file",
            )
        return rest if kind.endswith("-") else ""

    if isinstance(data, Mapping):
        return {key: _substituted(path, item, variables) for key, item in data.items()}
    if isinstance(data, list):
        return [_substituted(path, item, variables) for item in data]
    return _VARIABLE.sub(value, data) if isinstance(data, str) else data
