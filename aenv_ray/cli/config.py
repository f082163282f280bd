"""``aenv config``: the settings of the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import FormatOption, OutputOption, YesOption, confirm
from aenv_ray.cli.terminal.output import Format, show, show_done
from aenv_ray.errors import ConfigError

config = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True,
    help="Show and change the settings of the command line.\n\n"
    "The first existing file is used: ~/.aenv/cli_config.json,\n"
    "./.aenv/cli_config.json, /etc/aenv/cli_config.json.\n\n"
    "Example:\n  aenv config set system_url https://gateway.example.com",
)  # fmt: skip

ShowSecretsOption = Annotated[
    bool, typer.Option("--show-secrets", help="Do not mask tokens and passwords.")
]


@config.command("show")
def show_all(
    key: Annotated[str | None, typer.Option("--key", "-k", help="Only this setting.")] = None,
    show_secrets: ShowSecretsOption = False,
    output: OutputOption = None,
    format_: FormatOption = None,
) -> None:
    """Show all settings, including defaults.

    Example:
      aenv config show -o json
      aenv config show --key hub_config
    """
    from aenv_ray.cli.terminal import config_file

    file = config_file.find()
    data = file.effective if key is None else {key: file.value(key)}
    shown = data if show_secrets else config_file.masked(data)
    show(shown, output or format_, dict(config_file.leaves(shown)))


@config.command()
def get(
    key: Annotated[str, typer.Argument(metavar="KEY", help="For example hub_config.timeout.")],
    show_secrets: ShowSecretsOption = False,
    output: OutputOption = None,
) -> None:
    """Print one setting; exits with 3 if it does not exist.

    Example:
      aenv config get system_url
    """
    from aenv_ray.cli.terminal import config_file

    value = config_file.find().value(key)
    if not show_secrets:
        value = config_file.masked(value, key)
    plain = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    show(value, output, plain)


@config.command("set")
def set_(
    key: Annotated[str, typer.Argument(metavar="KEY", help="For example hub_config.timeout.")],
    value: Annotated[str, typer.Argument(metavar="VALUE", help="JSON or text.")],
    output: OutputOption = None,
) -> None:
    """Change one setting.

    Example:
      aenv config set owner alice
      aenv config set hub_config.timeout 60
    """
    from aenv_ray.cli.terminal import config_file

    file = config_file.find()
    file.write(file.with_value(key, value))
    console.say(f"set {key} in {file.path}")
    value_now = config_file.masked(config_file.find().value(key), key)
    show_done({"key": key, "value": value_now, "path": str(file.path)}, output)


@config.command()
def init(
    path: Annotated[
        Path | None, typer.Option("--path", help="Default: ~/.aenv/cli_config.json.")
    ] = None,
    output: OutputOption = None,
) -> None:
    """Create a config file with the defaults and print its path.

    Example:
      aenv config init
    """
    from aenv_ray.cli.terminal import config_file
    from aenv_ray.cli.terminal.config_file import ConfigFile

    target = path or config_file.search_paths()[0]
    if target.exists():
        raise ConfigError(f"{target} exists already", hint="start over with: aenv config reset")
    ConfigFile(target, {}).write(config_file.defaults())
    _show_path(target, output)


@config.command()
def reset(
    force: Annotated[bool, typer.Option("--force", help="Same as --yes.")] = False,
    yes: YesOption = False,
    output: OutputOption = None,
) -> None:
    """Reset all settings to the defaults; the old file is backed up.

    Example:
      aenv config reset --yes
    """
    from aenv_ray.cli.terminal import config_file
    from aenv_ray.cli.terminal.config_file import ConfigFile
    from aenv_ray.local_fabric import write_private

    path = config_file.path_in_use()
    confirm(f"Reset {path} to the defaults?", yes or force)
    if path.is_file():
        backup = path.with_name(f"{path.name}.bak")
        write_private(backup, path.read_text(encoding="utf-8", errors="replace"))
        console.say(f"the old file was saved as {backup}")
    ConfigFile(path, {}).write(config_file.defaults())
    console.say(f"reset {path}")
    show_done({"path": str(path)}, output)


@config.command()
def load(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON file with settings.")],
    output: OutputOption = None,
) -> None:
    """Import the settings of a file; other settings are unchanged.

    Example:
      aenv config load team.json
    """
    from aenv_ray.cli.terminal import config_file

    more = config_file.read(file)
    current = config_file.find()
    current.write(config_file.merged(current.data, more))
    console.say(f"loaded {file} into {current.path}")
    show_done({"path": str(current.path)}, output)


@config.command()
def export(
    output: Annotated[
        Path, typer.Option("--output", help="File to write, or - for standard output.")
    ] = Path("cli_config_export.json"),
    show_secrets: ShowSecretsOption = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    form: Annotated[
        Format | None,
        typer.Option("--format", "-f", "-o", help="Format of what is printed."),
    ] = None,
) -> None:
    """Write all settings to a file for `aenv config load`.

    Tokens and passwords are left out unless --show-secrets is given.

    Example:
      aenv config export --output team.json
    """
    from aenv_ray.cli.terminal import config_file
    from aenv_ray.local_fabric import write_private

    data = config_file.find().effective
    if not show_secrets:
        data = config_file.without_secrets(data)
    if str(output) == "-":
        show(data, Format.JSON if form in {None, Format.TABLE} else form)
        return
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    if output.exists() and not force:
        raise ConfigError(f"{output} exists already", hint="overwrite it with --force")
    write_private(output, text)
    _show_path(output, form)


@config.command("path")
def path_(output: OutputOption = None) -> None:
    """Print the path of the config file.

    Example:
      aenv config path
    """
    from aenv_ray.cli.terminal import config_file

    path = config_file.path_in_use()
    if not path.is_file():
        console.say("the file does not exist yet; create it with: aenv config init")
    _show_path(path, output)


def _show_path(path: Path, output: Format | None) -> None:
    """Print a path; as data only if -o asks for it, since scripts read the plain path."""
    if output in (None, Format.TABLE):
        print(path.absolute())
    else:
        show({"path": str(path.absolute())}, output)
