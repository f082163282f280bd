"""How an image serves an instance: decided from what is in it and what the project says.

Nothing here speaks with anybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from aenv_ray.errors import ConfigError, SandboxStartFailed
from aenv_ray.project.config import DeployConfig, NetworkMode

PUBLIC_PORT: Final = "8081/tcp"
PUBLIC_SERVER: Final = ("python3", "-m", "aenv.main", "/app/src", "--port", "8081")
"""What AEnvironment itself starts in an image that has its package and names no command of it."""
SHARED: Final = "/shared"
"""Where an instance's container and its sidecar share files, as in AEnvironment."""


class Serving(StrEnum):
    """Who answers the calls of an instance in a container."""

    RUNTIME = "runtime"
    """Our runtime, which the image's Python runs with the project's code."""
    PUBLIC = "public"
    """The image's own server on port 8081, as in AEnvironment; our runtime asks it."""
    COMMANDS = "commands"
    """Our runtime without any code of the project: commands and files only."""


@dataclass(frozen=True)
class ImageContent:
    """What an image has that matters here."""

    reference: str
    python: tuple[int, int] | None
    """Version of its ``python3``; None where none starts."""
    has_fitting_python: bool
    """One that our runtime runs on."""
    has_shell: bool
    has_aenvironment: bool
    """AEnvironment's package is installed for its Python."""
    carries_runtime: bool
    """It was made by ``aenv build``."""
    command: tuple[str, ...]
    """Its entrypoint and command."""
    ports: frozenset[str]
    """What it exposes, for example ``8081/tcp``."""

    @property
    def lack(self) -> str:
        """What keeps our runtime from running on its Python, in words."""
        version = ".".join(map(str, self.python or ()))
        found = f"Python {version}" if version else "no python3 that starts"
        return f"image {self.reference} has {found}, and tools need 3.11 or newer"

    @property
    def has_server(self) -> bool:
        """Whether it says in any way that it serves AEnvironment's public door."""
        return (
            self.has_aenvironment
            or PUBLIC_PORT in self.ports
            or any("aenv.main" in word for word in self.command)
        )


def choose(deploy: DeployConfig, content: ImageContent, *, has_code: bool) -> tuple[Serving, str]:
    """Return who answers calls, and why it has no tools where it has none.

    Args:
        deploy: The project's.
        content: Of its image.
        has_code: The project has Python files.

    Raises:
        SandboxStartFailed: The image cannot run anything, or not what was asked for.
    """
    asked = Serving(deploy.container.door) if deploy.container.door else None
    if asked is Serving.RUNTIME or (not asked and content.carries_runtime):
        if not content.has_fitting_python:
            raise SandboxStartFailed(
                content.lack,
                hint="base the image on a newer Python, or leave deployConfig.container.door",
            )
        return Serving.RUNTIME, ""
    if not asked and has_code and content.has_fitting_python:
        return Serving.RUNTIME, ""
    if asked is Serving.PUBLIC or (not asked and content.has_server):
        return Serving.PUBLIC, ""
    if not asked and not has_code and content.has_fitting_python:
        raise SandboxStartFailed(
            "the project has no Python files to load",
            hint='give it code, or ask with deployConfig.container.door: "commands"',
        )
    if not content.has_shell:
        raise SandboxStartFailed(
            f"{content.lack}; it has no /bin/sh either",
            hint="use an image with Python 3.11 or newer, or at least a shell",
        )
    if not has_code:
        return Serving.COMMANDS, "the project has no code; it has commands and files only"
    if asked:
        return Serving.COMMANDS, "the project asks for commands and files only"
    return Serving.COMMANDS, f"{content.lack}; commands and files work"


def server_command(content: ImageContent, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Return what starts an image's own server.

    Args:
        content: The image's.
        arguments: Of the instance; in AEnvironment they go to the entrypoint.
    """
    if PUBLIC_PORT in content.ports or any("aenv.main" in word for word in content.command):
        return (*content.command, *arguments)
    return (*PUBLIC_SERVER, *arguments)


def has_code(project_dir: Path) -> bool:
    """Whether a project has Python files of its own."""
    root = project_dir / "src" if (project_dir / "src").is_dir() else project_dir
    return next(root.glob("*.py"), None) is not None or next(root.glob("*/*.py"), None) is not None


def network_mode(reference: str, deploy: DeployConfig, serving: Serving) -> NetworkMode:
    """Return which network an instance gets.

    A project that names none gets the node's, except where that would give its ports to the node,
    or its second container to everybody: then it gets the internet.

    Raises:
        ConfigError: It asks for the node's network where it cannot have it.
    """
    why = ""
    if serving is Serving.PUBLIC:
        why = "its image serves port 8081, which would be the node's"
    elif deploy.is_dual:
        why = "its two containers have a network of their own"
    if not why:
        return deploy.network or NetworkMode.HOST
    if deploy.network is NetworkMode.HOST:
        raise ConfigError(
            f'{reference} cannot have network "host": {why}',
            hint='set deployConfig.network to "internet" or "none"',
        )
    return deploy.network or NetworkMode.INTERNET


def sidecar_image(reference: str, deploy: DeployConfig, datasource: str) -> str:
    """Return the image of a second container.

    Args:
        reference: The project's, for messages.
        deploy: The project's; without ``imagePrefix``, `datasource` is a full image path.
        datasource: A tag for a prefix that ends with a repository, with or without a colon; what
            follows for one that ends within a name or a tag.

    Raises:
        ConfigError: There is no datasource.
    """
    if not datasource:
        raise ConfigError(
            f"{reference} has a second container, and the instance has no datasource to name it",
            hint='give one: create(..., datasource="TAG"), or a full image path without '
            "deployConfig.imagePrefix",
        )
    prefix = deploy.image_prefix or ""
    ends_open = prefix.endswith("/") or ":" in prefix.rpartition("/")[2]
    return f"{prefix}{datasource}" if not prefix or ends_open else f"{prefix}:{datasource}"
