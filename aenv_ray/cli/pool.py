"""``aenv pool``: warm pools."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from aenv_ray.cli.terminal.options import Output, GatewayOptions, with_gateway
from aenv_ray.cli.terminal.output import Columns, show, show_rows

pool = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True,
    help="Keep sandboxes ready, so that creates take milliseconds.\n\n"
    "Example:\n  aenv pool set mini-terminal 8",
)  # fmt: skip

_COLUMNS: Final[Columns] = {
    "ENVIRONMENT": lambda p: p["environment"],
    "WANTED": lambda p: p["count"],
    "READY": lambda p: p["ready"],
}


@pool.command("list")
@with_gateway
def list_(
    gateway: GatewayOptions,
    output: Output = None,
) -> None:
    """List the warm pools.

    Example:
      aenv pool list
    """
    show_rows(
        gateway.connect().pools(), output, _COLUMNS, empty="no pools; create one with: aenv pool set"
    )


@pool.command("set")
@with_gateway
def set_(
    gateway: GatewayOptions,
    environment: Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="The environment.")],
    count: Annotated[int, typer.Argument(metavar="COUNT", min=0, help="0 removes the pool.")],
    output: Output = None,
) -> None:
    """Keep COUNT sandboxes of an environment ready.

    Example:
      aenv pool set mini-terminal 8
      aenv pool set mini-terminal 0
    """
    data = gateway.connect().set_pool(environment, count)
    show(data, output)
