"""``aenv down``: the end of what ``aenv up`` started, and of nothing else."""

from __future__ import annotations

import contextlib
import sys

from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import Output
from aenv_ray.cli.terminal.output import show


def down(output: Output = None) -> None:
    """Take down what `aenv up` brought up, with its instances.

    What the hub keeps stays on disk. Works on what is half up, too.

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
            console.say("taking down gateway, hub and instances …")
            take_down(fabric)
    ended = {"ended": fabric is not None, "url": fabric.url if fabric else None}
    show(ended, output, "down")
