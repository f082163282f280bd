"""How an image serves an instance: decided from its content and the project's config.

Pure functions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from aenv_ray.errors import ConfigError, SandboxStartFailed
from aenv_ray.policy import is_not_root
from aenv_ray.project.config import DeployConfig, NetworkMode

PUBLIC_PORT: Final = "8081/tcp"
PUBLIC_SERVER: Final = ("python3", "-m", "aenv.main", "/app/src", "--port", "8081")
"""What AEnvironment starts in an image that has its package but no command for it."""
SHARED: Final = "/shared"
"""Where an instance's container and its sidecar share files, as in AEnvironment."""
_INSTANCE_ID: Final = re.compile(r"[\w.-]+__[\w.-]+-[0-9]+", re.ASCII)
"""An instance id of SWE-bench: owner, repository and number of a pull request."""


class Serving(StrEnum):
    """What answers the calls of an instance in a container."""

    RUNTIME = "runtime"
    """Our runtime, on the image's Python, with the project's code."""
    PUBLIC = "public"
    """The image's own server on port 8081, as in AEnvironment; our runtime forwards calls to it."""
    COMMANDS = "commands"
    """Our runtime without the project's code: commands and files only."""


@dataclass(frozen=True)
class ImageContent:
    """What an image contains, as far as it decides about `Serving`."""

    reference: str
    python: tuple[int, int] | None
    """Version of its ``python3``; None if none starts."""
    has_fitting_python: bool
    """Our runtime runs on it."""
    has_shell: bool
    has_aenvironment: bool
    """AEnvironment's package is installed for its Python."""
    carries_runtime: bool
    """It was built by ``aenv build`` with this version of the runtime."""
    command: tuple[str, ...]
    """Its entrypoint and command."""
    ports: frozenset[str]
    """Exposed ports, for example ``8081/tcp``."""

    @property
    def lack(self) -> str:
        """Why our runtime does not run on its Python, in words."""
        version = ".".join(map(str, self.python or ()))
        found = f"Python {version}" if version else "no python3 that starts"
        return f"image {self.reference} has {found}, and tools need 3.11 or newer"

    @property
    def has_server(self) -> bool:
        """Whether anything indicates that it serves AEnvironment's public door."""
        return (
            self.has_aenvironment
            or PUBLIC_PORT in self.ports
            or any("aenv.main" in word for word in self.command)
        )


def choose(deploy: DeployConfig, content: ImageContent, *, has_code: bool) -> tuple[Serving, str]:
    """Return what answers calls, and why there are no tools ("" if there are).

    Raises:
        SandboxStartFailed: The image can run nothing, or not what the project asks for.
    """
    asked = Serving(deploy.container.door) if deploy.container.door else None
    if asked is Serving.RUNTIME or (not asked and content.carries_runtime):
        if not content.has_fitting_python:
            raise SandboxStartFailed(
                content.lack,
                hint="base the image on a newer Python, or remove deployConfig.container.door",
            )
        return Serving.RUNTIME, ""
    if not asked and has_code and content.has_fitting_python:
        return Serving.RUNTIME, ""
    if asked is Serving.PUBLIC or (not asked and content.has_server):
        return Serving.PUBLIC, ""
    if not asked and not has_code and content.has_fitting_python:
        raise SandboxStartFailed(
            "the project has no Python files to load",
            hint='add code, or set deployConfig.container.door to "commands"',
        )
    if not content.has_shell:
        raise SandboxStartFailed(
            f"{content.lack}; it has no /bin/sh either",
            hint="use an image with Python 3.11 or newer, or at least a shell",
        )
    lack = "" if asked else content.lack
    return Serving.COMMANDS, no_tools_reason(lack, has_code=has_code)


def no_tools_reason(lack: str, *, has_code: bool) -> str:
    """Return why there are commands and files only; `lack` says why the runtime does not run."""
    if not has_code:
        return "the project has no code; it has commands and files only"
    if not lack:
        return "the project asks for commands and files only"
    return f"{lack}; commands and files work"


def server_command(content: ImageContent, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Return what starts an image's own server."""
    if PUBLIC_PORT in content.ports or any("aenv.main" in word for word in content.command):
        return (*content.command, *arguments)
    return (*PUBLIC_SERVER, *arguments)


def has_code(project_dir: Path) -> bool:
    """Return whether a project has Python files."""
    root = project_dir / "src" if (project_dir / "src").is_dir() else project_dir
    return next(root.glob("*.py"), None) is not None or next(root.glob("*/*.py"), None) is not None


def network_mode(reference: str, deploy: DeployConfig, serving: Serving) -> NetworkMode:
    """Return the network of an instance.

    The default is the node's network. It is the internet if the node's network would expose the
    image's server on the node, or its sidecar to other sandboxes.

    Raises:
        ConfigError: The project asks for the node's network in such a case.
    """
    why = ""
    if serving is Serving.PUBLIC:
        why = "its image serves port 8081, which would be a port of the node"
    elif deploy.is_dual:
        why = "container and sidecar have a private network"
    if not why:
        return deploy.network or NetworkMode.HOST
    if deploy.network is NetworkMode.HOST:
        raise ConfigError(
            f'{reference} cannot have network "host": {why}',
            hint='set deployConfig.network to "internet" or "none"',
        )
    return deploy.network or NetworkMode.INTERNET


def changeable_python(deploy: DeployConfig, serving: Serving, user: str) -> str | None:
    """Return, for `Isolation.missing`, that commands can change what rewards run on; None if not.

    Args:
        deploy: The ``deployConfig`` of the project.
        serving: What answers the calls of the instance.
        user: The user of its main container.
    """
    if serving is not Serving.RUNTIME or deploy.container.read_only_root or is_not_root(user):
        return None
    return (
        f"user: it runs as {user}, so its commands may change the image's Python, on which its "
        "rewards run; set deployConfig.container.readOnlyRoot or another user"
    )


def sidecar_image(reference: str, deploy: DeployConfig, datasource: str) -> str:
    """Return the image of a sidecar.

    Args:
        reference: The reference of the project, for messages.
        deploy: The ``deployConfig`` of the project; without ``imagePrefix``, `datasource` is a full
            image reference.
        datasource: An instance id, if the project says which images belong to them; a tag if the
            prefix is a repository; else what completes the prefix.

    Raises:
        ConfigError: There is no datasource.
    """
    if not datasource:
        raise ConfigError(
            f"{reference} has a sidecar, but the instance has no datasource to name its image",
            hint='create(..., datasource="TAG"), or a full image reference without '
            "deployConfig.imagePrefix",
        )
    if deploy.instance_id_image and _INSTANCE_ID.fullmatch(datasource):
        name = datasource.lower().replace("__", "_1776_")
        return deploy.instance_id_image.replace("{id}", name)
    prefix = deploy.image_prefix or ""
    ends_open = prefix.endswith("/") or ":" in prefix.rpartition("/")[2]
    return f"{prefix}{datasource}" if not prefix or ends_open else f"{prefix}:{datasource}"
