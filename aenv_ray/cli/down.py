"""``aenv down``: end what ``aenv up`` started, and nothing else."""

from __future__ import annotations

import contextlib
import sys

from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import Output
from aenv_ray.cli.terminal.output import show


def down(output: Output = None) -> None:
    """End what `aenv up` started, with its instances.

    The hub's data stays on disk. Also works if `aenv up` failed halfway.

    Example:
      aenv down
    """
    from aenv_ray import local_fabric
    from aenv_ray.cli.up import locked, take_down
    from aenv_ray.config import settings

    data_dir = settings().data_dir
    with locked(data_dir), contextlib.redirect_stdout(sys.stderr):
        fabric = local_fabric.read(data_dir)
        if fabric is None:
            console.say("nothing is up")
        else:
            console.say("ending gateway, hub and instances …")
            take_down(fabric)
    ended = {"ended": fabric is not None, "url": fabric.url if fabric else None}
    show(ended, output, "down")
