"""``aenv token``: tokens for the gateway."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import (
    GatewayOptions,
    OutputOption,
    YesOption,
    confirm,
    with_gateway,
)
from aenv_ray.cli.terminal.output import Columns, moment, show, show_rows

token = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True,
    help="Create, list and revoke tokens for the gateway.\n\n"
    "Example:\n  aenv token list",
)  # fmt: skip

_COLUMNS: Final[Columns] = {
    "ID": lambda t: t["id"],
    "ROLE": lambda t: t.get("role"),
    "OWNER": lambda t: t.get("owner"),
    "INSTANCE": lambda t: t.get("instance_id"),
    "CREATED": lambda t: moment(t.get("created_at")),
    "EXPIRES": lambda t: moment(t.get("expires_at")),
    "NOTE": lambda t: t.get("note"),
}


@token.command()
@with_gateway
def create(
    gateway: GatewayOptions,
    role: Annotated[
        str | None,
        typer.Option(
            "--role",
            "-r",
            help="admin, publisher, user or agent. Default: agent with --instance, else user.",
        ),
    ] = None,
    owner: Annotated[
        str | None, typer.Option("--owner", help="Default: config file, else your user name.")
    ] = None,
    instance: Annotated[
        str | None, typer.Option("--instance", help="For an agent: the instance that it may use.")
    ] = None,
    ttl: Annotated[
        str | None,
        typer.Option("--ttl", "-t", help="Lifetime, for example 8h or 7d. Default: no end."),
    ] = None,
    note: Annotated[str | None, typer.Option("--note", help="Shown in listings.")] = None,
    output: OutputOption = None,
) -> None:
    """Create a token and print it; it cannot be shown again.

    A user may use environments and has instances; a publisher may also publish;
    an agent may only list and call the tools of one instance; an admin may do
    everything.

    Example:
      aenv token create --role publisher --owner alice --ttl 30d
      aenv token create --role agent --instance mini-terminal-abc12345
    """
    from aenv_ray.cli.local import local_ray
    from aenv_ray.cli.terminal import config_file

    role = role or ("agent" if instance else "user")
    if owner is None and not (role == "agent" and instance):
        owner = config_file.find().values.owner or local_ray.user()
    made = gateway.connect().create_token(
        role=role, owner=owner, instance_id=instance, ttl=ttl, note=note
    )
    console.say(f"created {made.role or role} token {made.id}; it cannot be shown again")
    show(made.shown(), output, made.token or "")


@token.command("list")
@with_gateway
def list_(gateway: GatewayOptions, output: OutputOption = None) -> None:
    """List tokens, without their secrets.

    Example:
      aenv token list
    """
    rows = [one.shown() for one in gateway.connect().tokens()]
    show_rows(rows, output, _COLUMNS, empty="no tokens")


@token.command()
@with_gateway
def revoke(
    gateway: GatewayOptions,
    token_id: Annotated[str, typer.Argument(metavar="ID", help="Token id, see: aenv token list.")],
    yes: YesOption = False,
    output: OutputOption = None,
) -> None:
    """Revoke a token; fails if it does not exist.

    The agent tokens that it created are revoked, too.

    Example:
      aenv token revoke 0123456789abcdef --yes
    """
    client = gateway.connect()
    confirm(f"Revoke token {token_id}?", yes)
    was_there = client.revoke_token(token_id)
    if not was_there:
        console.error(f"no such token {token_id}", "see: aenv token list")
        raise typer.Exit(1)
    console.say(f"revoked {token_id}")
    show({"id": token_id, "revoked": True}, output, token_id)
