"""Options that many commands have, and what they lead to: a gateway, a reference, a question."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.output import Format
from aenv_ray.errors import ConfigError

if TYPE_CHECKING:
    from aenv_ray.client.gateway import Gateway
    from aenv_ray.local_fabric import LocalFabric

FormatAlias = Annotated[
    Format | None, typer.Option("--format", "-f", help="Same as -o, for AEnvironment's users.")
]
Output = Annotated[
    Format | None,
    typer.Option("--output", "-o", help="Default: the config file's, else table."),
]
AsData = Annotated[
    Format | None, typer.Option("--output", "-o", help="json or yaml. Default: text, as it is.")
]
EnvironmentHere = Annotated[
    str | None,
    typer.Argument(metavar="[NAME[@VERSION]]", help="Default: that of ./config.json."),
]
SystemUrl = Annotated[
    str | None,
    typer.Option("--system-url", help="Gateway. Default: AENV_SYSTEM_URL, config file, aenv up."),
]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", help="Token. Default: AENV_API_KEY, config file, aenv up."),
]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", min=0.1, help="Seconds for one answer. Default: config file, 30."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
WorkDir = Annotated[Path, typer.Option("--work-dir", "-w", help="The project's directory.")]


def gateway(
    system_url: str | None = None, api_key: str | None = None, timeout_s: float | None = None
) -> Gateway:
    """Return the gateway that options, environment, config file or ``aenv up`` name, in this order.

    A token of the file or of ``aenv up`` goes nowhere but to the gateway that it is for.

    Raises:
        ConfigError: None of them names one, or one is malformed.
    """
    from aenv_ray import local_fabric
    from aenv_ray.cli.terminal import config_file
    from aenv_ray.client.gateway import Gateway
    from aenv_ray.client.gateway_http import GatewayHttp, parse_url
    from aenv_ray.config import settings

    file = config_file.find()
    values = file.values
    named = system_url or settings().system_url or values.gateway
    local = local_fabric.read(settings().data_dir)
    if named is None and local is None:
        raise ConfigError(
            "no gateway is known",
            hint="bring one up here with: aenv up; or name one with --system-url, AENV_SYSTEM_URL "
            "or: aenv config set system_url URL",
        )
    url = parse_url(named or _url_of(local))
    is_local = local is not None and parse_url(local.url) == url
    if named is not None and named == values.gateway and config_file.is_of_directory(file.path):
        console.say(f"gateway {url}, named by {file.path}")
    tokens = [api_key, settings().api_key, values.hub_config.api_key]
    if is_local and local is not None:  # the file's token was given for the file's gateway
        tokens[2:] = [local.token]
    http = GatewayHttp(
        url, next(filter(None, tokens), None), timeout_s=timeout_s or values.hub_config.timeout
    )
    return Gateway(http)


def knows_gateway(system_url: str | None) -> bool:
    """Return whether `gateway` would find one."""
    from aenv_ray import local_fabric
    from aenv_ray.cli.terminal import config_file
    from aenv_ray.config import settings

    named = system_url or settings().system_url or config_file.find().values.gateway
    return named is not None or local_fabric.read(settings().data_dir) is not None


def _url_of(local: LocalFabric | None) -> str:
    return local.url if local is not None else ""


def reference(name: str, version: str | None) -> tuple[str, str | None]:
    """Return name and version of ``NAME`` or ``NAME@VERSION`` and a ``--version`` option.

    Raises:
        ConfigError: Malformed, or two versions that differ.
    """
    from aenv_ray import ids

    bare, written = ids.split_reference(name)
    if version is None:
        return bare, written
    ids.split_reference(f"{bare}@{version}")
    if written not in (None, version):
        raise ConfigError(f"{name} and --version {version} name different versions")
    return bare, version


def reference_here(noun: str) -> str:
    """Return the environment that the ``config.json`` of this directory names.

    Args:
        noun: What is made of it, whose command the hint names.

    Raises:
        ConfigError: There is none, or it is malformed.
    """
    from aenv_ray.project import project

    if not Path(project.CONFIG_NAME).is_file():
        raise ConfigError(
            "name an environment: there is no config.json here",
            hint=f"aenv {noun} create NAME@VERSION; aenv list shows what there is",
        )
    return project.read_config(Path(project.CONFIG_NAME)).reference


def variables(items: Iterable[str], option: str, *, what: str = "KEY=VALUE") -> dict[str, str]:
    """Return ``KEY=VALUE`` options as a mapping; a later one wins.

    Raises:
        typer.BadParameter: One has no key, or no ``=``.
    """
    found = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not key or not equals:
            # Not shown: it may be a secret whose name was forgotten.
            raise typer.BadParameter(f"write it as {what}", param_hint=option)
        found[key] = value
    return found


def confirm(question: str, yes: bool) -> None:
    """Ask before something that cannot be undone.

    Raises:
        typer.Abort: The answer is no, or nobody is there to answer.
    """
    if yes:
        return
    if not os.isatty(0):
        raise ConfigError(f"{question} Nobody is here to answer", hint="say so with --yes")
    if not typer.confirm(question, err=True):
        raise typer.Abort
