"""``aenv instance``: what is done with instances that run."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from aenv_ray.errors import FabricUnavailable

if TYPE_CHECKING:
    from aenv_ray.actors.fabric import Fabric

instance = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True,
    help="Look at instances that run.\n\nExample:\n  aenv instance logs mini-terminal-abc12345",
)  # fmt: skip


@instance.callback()
def _noun() -> None:
    """Keep the noun a group, however few commands it has."""


@instance.command()
def logs(
    instance_id: Annotated[str, typer.Argument(metavar="ID", help="The instance's id.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until it ends, or Ctrl-C.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, help="Last lines only. Default: all kept.")
    ] = None,
) -> None:
    """Print what an instance printed.

    It is looked for on the Ray that RAY_ADDRESS names, or that runs on this
    machine.

    Example:
      aenv instance logs mini-terminal-abc12345
      aenv instance logs mini-terminal-abc12345 -f --tail 10
    """
    from aenv_ray.actors import entrance, ray_api

    # Ray prints its warnings on standard output, which is for the log.
    with contextlib.redirect_stdout(sys.stderr):
        connection = _join()
    try:
        pieces = connection.get(instance_id).logs.remote(tail, follow)
        try:
            for piece in pieces:
                sys.stdout.write(connection.wait(piece, f"the log of {instance_id}"))
                sys.stdout.flush()
        finally:
            ray_api.cancel(pieces)
    finally:
        entrance.shutdown()


def _join() -> Fabric:
    """Connect to the Ray that runs; starting one would find no instances."""
    from aenv_ray.actors import entrance
    from aenv_ray.config import settings

    address = settings().ray_address
    try:
        return entrance.init(address or "auto")
    except FabricUnavailable as exc:
        if address is not None:
            raise
        raise FabricUnavailable(
            "no Ray runs on this machine", hint="name the cluster with RAY_ADDRESS"
        ) from exc
