"""``aenv hub``: the hub behind the gateway."""

from __future__ import annotations

import typer

from aenv_ray.cli.terminal.options import ApiKey, Output, SystemUrl, Timeout, gateway
from aenv_ray.cli.terminal.output import show

hub = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True,
    help="Show the hub, which stores environments, leases and tokens.\n\n"
    "Example:\n  aenv hub status",
)  # fmt: skip


@hub.callback()
def _noun() -> None:
    """Make this a group although it has a single command."""


@hub.command()
def status(
    output: Output = None,
    system_url: SystemUrl = None,
    api_key: ApiKey = None,
    timeout: Timeout = None,
) -> None:
    """Show the hub's contents, storage and start time.

    Example:
      aenv hub status -o json
    """
    with gateway(system_url, api_key, timeout) as door:
        show(door.hub(), output)
