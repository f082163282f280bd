"""``aenv grant``: who else may use or publish an environment."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from aenv_ray.cli.terminal.options import Output, GatewayOptions, with_gateway
from aenv_ray.cli.terminal.output import Columns, show_rows
from aenv_ray.errors import ConfigError

_RIGHTS: Final = ("use", "publish", "none")
_COLUMNS: Final[Columns] = {
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
        str | None, typer.Argument(metavar="use|publish|none", help="none revokes.")
    ] = None,
    output: Output = None,
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
        raise ConfigError(
            "aenv grant needs an owner and a right: use, publish or none",
            hint=f"for example: aenv grant {name} bob use",
        )
    client = gateway.connect()
    if owner is None or right is None:
        found = client.name(name)
    else:
        found = client.grant(name, owner, None if right == "none" else right)
    rows = [{"name": name, "owner": found["owner"], "right": "owner"}]
    rows += [
        {"name": name, "owner": holder, "right": given}
        for holder, given in sorted(found["grants"].items())
    ]
    show_rows(rows, output, _COLUMNS, empty="no grants")
