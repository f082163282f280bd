"""What a command made of a project, noted in its config.json."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from aenv_ray.errors import ConfigError


def check_writable(config: Path) -> None:
    """Look whether a note can be made, before hours are spent on what it would be about.

    Raises:
        ConfigError: It cannot.
    """
    directory = config.resolve().parent
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{directory} cannot be written to, and the image is noted in {config.name} there",
            hint="let this user write there, or build from a copy",
        )


def note_image(config: Path, reference: str, digest: str) -> None:
    """Put an image among the artifacts of a config.json, in place of an earlier one.

    The file is replaced as a whole, or stays as it is.

    Args:
        config: The file.
        reference: The image's name and tag.
        digest: Its id, or the repository and digest that was pushed.

    Raises:
        ConfigError: The file cannot be read or written any more; nothing was changed.
    """
    config = config.resolve()  # a link to it stays one
    try:
        data = json.loads(config.read_text(encoding="utf-8"))
        others = [a for a in data.get("artifacts") or [] if a.get("type") != "image"]
        made = {"type": "image", "content": reference, "digest": digest}
        data["artifacts"] = [*others, made]
        _replace(config, json.dumps(data, indent=2, ensure_ascii=False) + "\n")
    except (OSError, ValueError, AttributeError) as exc:
        raise ConfigError(
            f"{reference} is built, and cannot be noted in {config}: {exc}",
            hint=f'put it among "artifacts" there: {{"type": "image", "content": "{reference}", '
            f'"digest": "{digest}"}}',
        ) from exc


def _replace(path: Path, text: str) -> None:
    fd, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, path.stat().st_mode & 0o777)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
