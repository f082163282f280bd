"""Copy this Python for use in another image: ``python -m …python_carrier DIRECTORY``.

An init container of this package's image runs it and leaves the Python in a volume, as
``DIRECTORY/python``, for images without a suitable one (`aenv_ray.engines.images.node_python`).
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from aenv_ray.engines.images import runtime_kit


def carry(directory: Path) -> None:
    """Copy this Python into an existing directory; blocks for seconds.

    Raises:
        SandboxStartFailed: This Python cannot be copied.
    """
    kit = asyncio.run(runtime_kit.carried(directory))
    (directory / "python").symlink_to(Path(kit.name, "python"))


if __name__ == "__main__":
    carry(Path(sys.argv[1]))
