"""Projects without code, whose instances are containers of an image that a framework names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from aenv_ray.integrations.agents import write_project


def image_project(image: str, prefix: str, **deploy: Any) -> Path:
    """Write a project whose instances run commands in an image, and return its directory.

    Args:
        image: Name of the image, which the nodes can pull.
        prefix: Beginning of the project's name; the rest is the image's.
        deploy: Further fields of ``deployConfig``.
    """
    own = re.sub(r"[^a-z0-9]+", "-", image.rpartition("/")[2].partition(":")[0].lower())
    container = {"image": image, "door": "commands"}
    config = {
        "name": f"{prefix}-{own.strip('-') or 'image'}",
        "deployConfig": {**deploy, "engine": "docker", "container": container},
    }
    return write_project(config, {}, (), None)
