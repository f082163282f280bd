"""``aenv list, search, get, release, delete, grant, pool``: published environments."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import (
    FormatOption,
    GatewayOptions,
    OutputOption,
    ReferenceArgument,
    VersionOption,
    YesOption,
    confirm,
    reference,
    with_gateway,
)
from aenv_ray.cli.terminal.output import (
    Columns,
    Format,
    moment,
    pairs,
    printable,
    show,
    show_rows,
    size,
)
from aenv_ray.errors import ConfigError

if TYPE_CHECKING:
    from aenv_ray.client.gateway_records import EnvironmentAnswer

RowLimitOption = Annotated[
    int, typer.Option("--limit", "-l", min=1, help="Maximum number of rows.")
]
OffsetOption = Annotated[int, typer.Option("--offset", min=0, help="Rows to skip.")]
TagOption = Annotated[str | None, typer.Option("--tag", "--tags", help="Only with this tag.")]

_COLUMNS: Final[Columns] = {
    "NAME": lambda e: e["name"],
    "VERSION": lambda e: e["version"],
    "STATUS": lambda e: e["status_name"],
    "TAGS": lambda e: e.get("tags"),
    "DESCRIPTION": lambda e: e.get("description"),
    "CREATED": lambda e: moment(e.get("created_at")),
}


@with_gateway
def list_(
    gateway: GatewayOptions,
    name: Annotated[str | None, typer.Option("--name", "-n", help="Only this environment.")] = None,
    tag: TagOption = None,
    status: Annotated[
        str | None,
        typer.Option("--status", metavar="STATUS", help="Only this status, for example Ready."),
    ] = None,
    latest: Annotated[
        bool, typer.Option("--latest", help="Only the highest version of each environment.")
    ] = False,
    limit: RowLimitOption = 100,
    offset: OffsetOption = 0,
    output: OutputOption = None,
    format_: FormatOption = None,
) -> None:
    """List the published environments.

    Sorted by name, then by descending version.

    Example:
      aenv list --latest --tag linux
      aenv list -o json
    """
    filters = {"name": name, "tag": tag, "status": status, "latest": "true" if latest else None}
    found = gateway.connect().environments(limit, offset=offset, **filters)
    _show_found(found, output or format_, "no environments; publish one with: aenv push")


@with_gateway
def search(
    gateway: GatewayOptions,
    words: Annotated[
        list[str], typer.Argument(metavar="WORD...", help="Each must occur in name, text or tags.")
    ],
    tag: TagOption = None,
    every_version: Annotated[
        bool, typer.Option("--all", "-a", help="All versions, not only the highest.")
    ] = False,
    limit: RowLimitOption = 100,
    offset: OffsetOption = 0,
    output: OutputOption = None,
) -> None:
    """Search the published environments.

    Searches names, descriptions and tags, ignoring case.

    Example:
      aenv search terminal bash
    """
    filters = {"text": " ".join(words), "tag": tag, "latest": None if every_version else "true"}
    found = gateway.connect().environments(limit, offset=offset, **filters)
    _show_found(found, output, "nothing found")


@with_gateway
def get(
    gateway: GatewayOptions,
    name: ReferenceArgument,
    version: VersionOption = None,
    versions: Annotated[
        bool, typer.Option("--versions", help="List all versions, the highest first.")
    ] = False,
    functions: Annotated[
        bool, typer.Option("--functions", help="Only its tools, functions and rewards.")
    ] = False,
    output: OutputOption = None,
    format_: FormatOption = None,
) -> None:
    """Show a published environment.

    Prints text on a terminal, else JSON.

    Example:
      aenv get todo
      aenv get todo@1.0.0 --functions
    """
    bare, version = reference(name, version)
    form = output or format_
    if form is None and not sys.stdout.isatty():
        form = Format.JSON
    client = gateway.connect()
    if versions:
        _show_found(client.versions(bare), form, f"no versions of {bare}")
        return
    found = client.environment(bare, version)
    registered = found.functions or client.functions(found.name, found.version)
    if functions:
        show_rows(registered, form, _FUNCTION_COLUMNS, empty="no tools, functions or rewards")
    else:
        show(_data(found) | {"functions": registered}, form, _lines(found, registered))


_FUNCTION_COLUMNS: Final[Columns] = {
    "KIND": lambda f: f.get("kind"),
    "NAME": lambda f: f.get("name"),
    "ARGUMENTS": lambda f: list((f.get("input_schema") or {}).get("properties") or {}),
    "DESCRIPTION": lambda f: f.get("description"),
}


@with_gateway
def release(
    gateway: GatewayOptions,
    name: ReferenceArgument,
    version: VersionOption = None,
    output: OutputOption = None,
) -> None:
    """Set the status of a version to Released, for good.

    Example:
      aenv release todo@1.0.0
    """
    bare, version = reference(name, version)
    client = gateway.connect()
    version = version or client.environment(bare).version
    client.release_environment(bare, version)
    found = client.environment(bare, version)
    show(_data(found), output, f"{found.reference} {found.status_word}")


@with_gateway
def delete(
    gateway: GatewayOptions,
    name: ReferenceArgument,
    version: VersionOption = None,
    yes: YesOption = False,
    output: OutputOption = None,
) -> None:
    """Delete a published version that is not in use.

    Its version number cannot be used for other content afterwards.

    Example:
      aenv delete todo@1.0.0 --yes
    """
    bare, version = reference(name, version)
    if version is None:
        raise ConfigError(f"no version given for {name}", hint=f"write {bare}@VERSION")
    client = gateway.connect()
    confirm(f"Delete {bare}@{version} permanently?", yes)
    client.delete_environment(bare, version)
    console.say(f"deleted {bare}@{version}")
    show({"name": bare, "version": version, "deleted": True}, output, f"{bare}@{version}")


def _show_found(found: list[EnvironmentAnswer], form: Format | None, empty: str) -> None:
    show_rows([_data(one) for one in found], form, _COLUMNS, empty=empty)


def _data(found: EnvironmentAnswer) -> dict[str, Any]:
    return found.shown() | {"status_name": found.status_word}


def _lines(found: EnvironmentAnswer, registered: list[dict[str, Any]]) -> str:
    """Return a version as text: facts, then its tools, functions and rewards."""
    facts = pairs(
        {
            "environment": found.reference,
            "status": found.status_word,
            "description": found.description,
            "tags": found.tags,
            "owner": found.owner,
            "created": moment(found.created_at),
            "digest": found.digest[:12],
            "archive": size(found.archive_bytes) if found.archive else "none",
        }
    )
    named = {
        f"{one.get('kind')} {one.get('name')}": printable(str(one.get("description") or ""))
        .partition("\n")[0]
        for one in registered
    }  # fmt: skip
    width = max(map(len, named), default=0)
    return "\n".join(
        [facts, *(f"{name:<{width}}  {text}".rstrip() for name, text in named.items())]
    )


# --- who may use a name ---------------------------------------------------------------------------

_RIGHTS: Final = ("use", "publish", "none")
_GRANT_COLUMNS: Final[Columns] = {
    "NAME": lambda g: g["name"],
    "OWNER": lambda g: g["owner"],
    "RIGHT": lambda g: g["right"],
}


@with_gateway
def grant(
    gateway: GatewayOptions,
    name: Annotated[str, typer.Argument(help="Name of an environment that you own.")],
    owner: Annotated[
        str | None, typer.Argument(help="Who gets the right; * for everybody. Omit to list.")
    ] = None,
    right: Annotated[
        str | None,
        typer.Argument(metavar="use|publish|none", help="The right; none revokes the grant."),
    ] = None,
    output: OutputOption = None,
) -> None:
    """Let other owners use or publish an environment.

    A name belongs to its first publisher, and nobody else sees it without a
    grant. Without OWNER, the grants are listed.

    Example:
      aenv grant helper bob use
      aenv grant helper '*' use
      aenv grant helper bob none
      aenv grant helper
    """
    if (owner is None) != (right is None) or right not in (None, *_RIGHTS):
        raise typer.BadParameter(
            f"give an owner and a right: use, publish or none; such as: aenv grant {name} bob use"
        )
    client = gateway.connect()
    if owner is None or right is None:
        found = client.name(name)
    else:
        found = client.grant(name, owner, None if right == "none" else right)
    rows = [{"name": name, "owner": found.owner, "right": "owner"}]
    rows += [
        {"name": name, "owner": holder, "right": given}
        for holder, given in sorted(found.grants.items())
    ]
    show_rows(rows, output, _GRANT_COLUMNS, empty="no grants")


# --- warm pools -----------------------------------------------------------------------------------

pool = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True,
    help="Keep sandboxes ready, so that creates take milliseconds.\n\n"
    "Example:\n  aenv pool set mini-terminal 8",

)  # fmt: skip

_POOL_COLUMNS: Final[Columns] = {
    "ENVIRONMENT": lambda p: p["environment"],
    "WANTED": lambda p: p["count"],
    "READY": lambda p: p["ready"],
}


@pool.command("list")
@with_gateway
def list_pools(gateway: GatewayOptions, output: OutputOption = None) -> None:
    """List the warm pools.

    Example:
      aenv pool list
    """
    rows = [one.shown() for one in gateway.connect().pools()]
    show_rows(rows, output, _POOL_COLUMNS, empty="no pools; create one with: aenv pool set")


@pool.command("set")
@with_gateway
def set_pool(
    gateway: GatewayOptions,
    environment: ReferenceArgument,
    count: Annotated[int, typer.Argument(metavar="COUNT", min=0, help="0 removes the pool.")],
    output: OutputOption = None,
) -> None:
    """Keep COUNT sandboxes of an environment ready.

    Example:
      aenv pool set mini-terminal 8
      aenv pool set mini-terminal 0
    """
    show(gateway.connect().set_pool(environment, count).shown(), output)
