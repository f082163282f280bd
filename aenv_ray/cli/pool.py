"""``aenv pool``: warm pools."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from aenv_ray.cli.terminal.options import ApiKey, Output, SystemUrl, Timeout, gateway
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
def list_(
    output: Output = None,
    system_url: SystemUrl = None,
    api_key: ApiKey = None,
    timeout: Timeout = None,
) -> None:
    """List the warm pools.

    Example:
      aenv pool list
    """
    with gateway(system_url, api_key, timeout) as client:
        show_rows(
            client.pools(), output, _COLUMNS, empty="no pools; create one with: aenv pool set"
        )


@pool.command("set")
def set_(
    environment: Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="The environment.")],
    count: Annotated[int, typer.Argument(metavar="COUNT", min=0, help="0 removes the pool.")],
    output: Output = None,
    system_url: SystemUrl = None,
    api_key: ApiKey = None,
    timeout: Timeout = None,
) -> None:
    """Keep COUNT sandboxes of an environment ready.

    Example:
      aenv pool set mini-terminal 8
      aenv pool set mini-terminal 0
    """
    with gateway(system_url, api_key, timeout) as client:
        data = client.set_pool(environment, count)
    show(data, output)
