"""Records what a command built in the project's config.json."""

from __future__ import annotations

import json
import os
from pathlib import Path

from aenv_ray.errors import ConfigError
from aenv_ray.files import write_atomically


def check_writable(config: Path) -> None:
    """Check that `record_image` will be able to write, before a long build.

    Raises:
        ConfigError: The directory of the file is read-only.
    """
    directory = config.resolve().parent
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{directory} is not writable, and the image is recorded in {config.name} there",
            hint="make it writable, or build from a copy",
        )


def record_image(config: Path, reference: str, digest: str) -> None:
    """Record an image in the artifacts of a config.json, in place of an earlier one.

    Args:
        config: The file; replaced atomically, with its permissions.
        reference: The image's name and tag.
        digest: The image's id, or its name by digest in the registry.

    Raises:
        ConfigError: The file cannot be read or written any more; it is unchanged.
    """
    config = config.resolve()  # a symbolic link stays one
    try:
        data = json.loads(config.read_text(encoding="utf-8"))
        others = [a for a in data.get("artifacts") or [] if a.get("type") != "image"]
        built = {"type": "image", "content": reference, "digest": digest}
        data["artifacts"] = [*others, built]
        text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
        write_atomically(config, text, mode=config.stat().st_mode & 0o777, durable=True)
    except (OSError, ValueError, AttributeError) as exc:
        raise ConfigError(
            f"{reference} was built, but cannot be recorded in {config}: {exc}",
            hint=f'add it to "artifacts" there: {{"type": "image", "content": "{reference}", '
            f'"digest": "{digest}"}}',
        ) from exc
