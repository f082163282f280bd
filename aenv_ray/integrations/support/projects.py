"""Projects that adapters write."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aenv_ray.config import settings
from aenv_ray.files import write_atomically


def write_project(
    config: Mapping[str, Any],
    files: Mapping[str, str],
    requirements: Sequence[str],
    directory: str | Path | None,
) -> Path:
    """Write an environment, and return its directory.

    Args:
        config: Its ``config.json``.
        files: Texts of further files by their paths in the project.
        requirements: Lines of its ``requirements.txt``.
        directory: Directory to write to; files of the same names are replaced. None: one in the
            data directory, named by the content.
    """
    texts = {
        **files,
        "config.json": json.dumps(config, indent=2) + "\n",
        "requirements.txt": "".join(f"{line}\n" for line in requirements),
    }
    if directory is None:
        content = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()
        directory = settings().data_dir / "agents" / f"{config['name']}-{content[:16]}"
    root = Path(directory)
    for relative, text in texts.items():
        path = root / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text, mode=0o644)
    return root


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
