"""Options shared by many commands, and the values derived from them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, TypeVar

import typer

from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.output import Format
from aenv_ray.errors import ConfigError

if TYPE_CHECKING:
    from aenv_ray.client.gateway import Gateway
    from aenv_ray.project.project import Project

P = ParamSpec("P")
T = TypeVar("T")

FormatOption = Annotated[
    Format | None, typer.Option("--format", "-f", help="Same as -o, as in AEnvironment.")
]
OutputOption = Annotated[
    Format | None,
    typer.Option("--output", "-o", help="Default: config file, else table."),
]
DataFormatOption = Annotated[
    Format | None, typer.Option("--output", "-o", help="json or yaml. Default: plain text.")
]
EnvironmentArgument = Annotated[
    str | None,
    typer.Argument(metavar="[NAME[@VERSION]]", help="Default: the environment of ./config.json."),
]


def _named(text: str | None) -> str | None:
    from aenv_ray.project import project

    return text if text is None else project.named_on_command_line(text)


SampledArgument = Annotated[
    str,
    typer.Argument(
        metavar="ENVIRONMENT", help="NAME@VERSION, NAME, or a project directory.", callback=_named
    ),
]
RecordedEnvironmentOption = Annotated[
    str | None,
    typer.Option(
        "--environment",
        help="NAME@VERSION or a project directory. Default: that of the episodes.",
        callback=_named,
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
ProjectArgument = Annotated[
    Path, typer.Argument(metavar="PATH", help="Project directory, or a built-in environment.")
]
WorkDirOption = Annotated[
    Path, typer.Option("--work-dir", "-w", help="Directory that PATH is relative to.")
]
ReferenceArgument = Annotated[
    str, typer.Argument(metavar="NAME[@VERSION]", help="The environment.")
]
VersionOption = Annotated[
    str | None, typer.Option("--version", "-v", help="Default: that of NAME, else the highest.")
]
VariablesOption = Annotated[
    list[str] | None, typer.Option("--env", "-e", metavar="KEY=VALUE", help="Variable, repeatable.")
]
EngineOption = Annotated[
    str | None,
    typer.Option("--engine", help="process, docker or kubernetes. Default: by project or node."),
]


def directory_of(work_dir: Path, path: Path) -> Path:
    """Return the directory of a project, or of the built-in environment of that name.

    Raises:
        ConfigError: The built-in lacks files that the user provides.
    """
    from aenv_ray.project import project

    named = project.named_on_command_line(str(path), work_dir)
    return project.resolve(named).path if named in project.builtins() else work_dir / path


def project_of(work_dir: Path, path: Path) -> Project:
    """Return the project in a directory, or the built-in environment of that name.

    Raises:
        EnvironmentNotFound: There is neither.
        ConfigError: The project is malformed, or the built-in lacks files that the user provides.
    """
    from aenv_ray.project import project

    return project.load(directory_of(work_dir, path))


def gateway(
    system_url: str | None = None, api_key: str | None = None, timeout_s: float | None = None
) -> Gateway:
    """Return the gateway that options, environment, config file or ``aenv up`` name, in this order.

    A token from the config file or ``aenv up`` is sent only to the gateway it belongs to.

    Raises:
        ConfigError: No gateway is configured, or its address is invalid.
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
    address = named or (local.url if local is not None else None)
    if address is None:
        raise ConfigError(
            "no gateway is configured",
            hint="start a local one with: aenv up; or name one with --system-url, AENV_SYSTEM_URL "
            "or: aenv config set system_url URL",
        )
    url = parse_url(address)
    is_local = local is not None and parse_url(local.url) == url
    if named is not None and named == values.gateway and config_file.is_of_directory(file.path):
        console.say(f"using gateway {url} from {file.path}")
    tokens = [api_key, settings().api_key, values.hub_config.api_key]
    if is_local and local is not None:  # the file's token belongs to the file's gateway
        tokens[2:] = [local.token]
    http = GatewayHttp(
        url, next(filter(None, tokens), None), timeout_s=timeout_s or values.hub_config.timeout
    )
    return Gateway(http)


class GatewayOptions:
    """The options that name a gateway; `with_gateway` passes them to a command.

    Args:
        clients: Closes the clients when the command ends.
        system_url: As for `gateway`, like the others.
        api_key: A token.
        timeout: Seconds for one response.
    """

    def __init__(
        self,
        clients: contextlib.ExitStack,
        *,
        system_url: Annotated[
            str | None,
            typer.Option(help="Gateway. Default: AENV_SYSTEM_URL, config file, aenv up."),
        ] = None,
        api_key: Annotated[
            str | None, typer.Option(help="Token. Default: AENV_API_KEY, config file, aenv up.")
        ] = None,
        timeout: Annotated[
            float | None,
            typer.Option(min=0.1, help="Seconds for one response. Default: config file, 30."),
        ] = None,
    ) -> None:
        self._clients = clients
        self._system_url = system_url
        self._api_key = api_key
        self._timeout_s = timeout

    def connect(self, timeout_s: float | None = None) -> Gateway:
        """Return a client of the gateway; it is closed when the command ends.

        Args:
            timeout_s: For one response, if the command has another ``--timeout``.

        Raises:
            ConfigError: As for `gateway`.
        """
        client = gateway(self._system_url, self._api_key, timeout_s or self._timeout_s)
        return self._clients.enter_context(client)

    def is_known(self) -> bool:
        """Return whether `connect` would find a gateway."""
        return knows_gateway(self._system_url)


def with_gateway(command: Callable[Concatenate[GatewayOptions, P], None]) -> Callable[P, None]:
    """Add the options of `GatewayOptions` to a command; see `with_options`."""

    @contextlib.contextmanager
    def opened(**given: Any) -> Iterator[GatewayOptions]:
        with contextlib.ExitStack() as clients:
            yield GatewayOptions(clients, **given)

    return _extended(command, GatewayOptions, opened)


def with_options(
    group: Callable[..., T],
) -> Callable[[Callable[Concatenate[T, P], None]], Callable[P, None]]:
    """Return a decorator that adds a group of options to a command, after its own.

    Args:
        group: A class whose keyword arguments are the options. The command receives an instance, as
            its first argument. An option that it has itself is not added.
    """

    def extend(command: Callable[Concatenate[T, P], None]) -> Callable[P, None]:
        return _extended(command, group, lambda **given: contextlib.nullcontext(group(**given)))

    return extend


def _extended(
    command: Callable[Concatenate[T, P], None],
    group: Callable[..., T],
    make: Callable[..., AbstractContextManager[T]],
) -> Callable[P, None]:
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    names = {one.name for one in own}
    added = [
        one
        for one in inspect.signature(group, eval_str=True).parameters.values()
        if one.kind is one.KEYWORD_ONLY and one.name not in names
    ]

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        given: dict[str, Any] = {one.name: kwargs.pop(one.name) for one in added}
        with make(**given) as values:
            command(values, *args, **kwargs)

    # Typer reads both.
    wrapped.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {one.name: one.annotation for one in (*own, *added)}
    return wrapped


def knows_gateway(system_url: str | None) -> bool:
    """Return whether `gateway` would find one."""
    from aenv_ray import local_fabric
    from aenv_ray.cli.terminal import config_file
    from aenv_ray.config import settings

    named = system_url or settings().system_url or config_file.find().values.gateway
    return named is not None or local_fabric.read(settings().data_dir) is not None


def reference(name: str, version: str | None) -> tuple[str, str | None]:
    """Return name and version from ``NAME`` or ``NAME@VERSION`` and a ``--version`` option.

    Raises:
        ConfigError: One is invalid, or the versions differ.
    """
    from aenv_ray import ids

    bare, written = ids.split_reference(name)
    if version is None:
        return bare, written
    ids.split_reference(f"{bare}@{version}")
    if written not in (None, version):
        raise ConfigError(
            f"{name} and --version {version} name different versions", hint="give the version once"
        )
    return bare, version


def reference_here(noun: str) -> str:
    """Return the environment of the ``config.json`` in the working directory.

    Raises:
        ConfigError: The file is missing or invalid.
    """
    from aenv_ray.project import project

    if not Path(project.CONFIG_NAME).is_file():
        raise ConfigError(
            "no environment given, and the working directory has no config.json",
            hint=f"run: aenv {noun} create NAME@VERSION; list environments with: aenv list",
        )
    return project.read_config(Path(project.CONFIG_NAME)).reference


def variables(items: Iterable[str], option: str, *, what: str = "KEY=VALUE") -> dict[str, str]:
    """Return ``KEY=VALUE`` options as a mapping; later ones win.

    Raises:
        typer.BadParameter: One has no key or no ``=``.
    """
    found = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not key or not equals:
            # The text is not shown: it may be a secret without its name.
            raise typer.BadParameter(f"expected {what}", param_hint=option)
        found[key] = value
    return found


def confirm(question: str, yes: bool) -> None:
    """Ask for confirmation.

    Raises:
        typer.Abort: The answer is no.
        ConfigError: There is no terminal to ask on.
    """
    if yes:
        return
    if not os.isatty(0):
        raise ConfigError(f"{question} There is no terminal to ask on", hint="confirm with --yes")
    if not typer.confirm(question, err=True):
        raise typer.Abort
