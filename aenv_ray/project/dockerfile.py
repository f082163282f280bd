"""What a Dockerfile puts into the image from its build context."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from aenv_ray.project.project import Project

_COMMENT: Final = re.compile(r"^[ \t]*#.*\n?", re.MULTILINE)
"""A line that neither ends an instruction nor continues on the next line."""
_CONTINUED: Final = re.compile(r"\\[ \t]*\n")
_COPY: Final = re.compile(r"^[ \t]*(?:COPY|ADD)[ \t]+(.+)", re.IGNORECASE | re.MULTILINE)
_FLAG: Final = re.compile(r"--(\S+)\s+")
_WHOLE_CONTEXT: Final = (".", "*")
EXPOSED_HINT: Final = (
    "copy only what the code needs besides its own files, which are mounted, such as "
    "requirements.txt"
)


class CopiedPath(NamedTuple):
    """What an instruction copies from the build context."""

    instruction: str
    """In one line."""
    source: str
    """Relative to the context, which is ``.``; may be a pattern."""


def copied_paths(text: str) -> Iterator[CopiedPath]:
    """Yield the sources of the instructions that copy from the build context.

    Args:
        text: The Dockerfile. An instruction that cannot be read yields nothing: its build fails.
    """
    for match in _COPY.finditer(_CONTINUED.sub(" ", _COMMENT.sub("", text))):
        instruction, rest = match[0].strip(), match[1].strip()
        start = 0
        flags = []
        while flag := _FLAG.match(rest, start):
            flags.append(flag[1])
            start = flag.end()
        if any(flag.startswith("from=") for flag in flags):
            continue
        for source in _words(rest[start:])[:-1]:
            # The context is the root: neither "/" nor ".." leads out of it.
            yield CopiedPath(instruction, posixpath.normpath(f"/{source}").lstrip("/") or ".")


def _words(rest: str) -> list[str]:
    if not rest.startswith("["):
        return [word.strip("\"'") for word in rest.split()]
    try:
        return list(map(str, json.loads(rest)))
    except (ValueError, RecursionError):
        return []


def exposes_source(project: Project) -> str | None:
    """Return why agents can read files that `hideSource` hides; None if the image has none of them.

    The engines hide the mounted project, and do not know which files of an image are copies of it.
    """
    if not project.config.deploy.hide_source:
        return None
    name = project.config.build.dockerfile
    try:
        text = (project.path / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None  # the project has none
    for instruction, source in copied_paths(text):
        if source in _WHOLE_CONTEXT:
            return (
                f"{name} copies the project into the image, where hideSource does not hide it: "
                f"{instruction}"
            )
    return None
