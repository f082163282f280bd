"""Carry this Python to another image: ``python -m …python_carrier DIRECTORY``.

An init container of this package's image runs it, and leaves in a volume the Python on which the
runtime serves images that have none (`aenv_ray.engines.images.node_python`), as
``DIRECTORY/python``.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from aenv_ray.engines.images import runtime_kit as docker_kit


def carry(directory: Path) -> None:
    """Make the Python in a directory that exists; blocks for seconds.

    Raises:
        SandboxStartFailed: This Python cannot be carried.
    """
    kit = asyncio.run(docker_kit.carried(directory))
    (directory / "python").symlink_to(Path(kit.name, "python"))


if __name__ == "__main__":
    carry(Path(sys.argv[1]))
