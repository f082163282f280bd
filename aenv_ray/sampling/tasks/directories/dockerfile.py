"""What a Dockerfile copies from its build context."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from typing import Final

_CONTINUED: Final = re.compile(r"\\[ \t]*\n(?:[ \t]*#[^\n]*\n)*")
_COPY: Final = re.compile(r"^[ \t]*(?:COPY|ADD)[ \t]+(.+)", re.IGNORECASE | re.MULTILINE)
_FLAG: Final = re.compile(r"--(\S+)\s+")


def copied(text: str) -> Iterator[str]:
    """Yield the sources of the instructions that copy from the build context, relative to it.

    Args:
        text: The Dockerfile. An instruction that cannot be read yields nothing: its build fails.
    """
    for match in _COPY.finditer(_CONTINUED.sub(" ", text)):
        rest = match[1].strip()
        flags = []
        while flag := _FLAG.match(rest):
            flags.append(flag[1])
            rest = rest[flag.end() :]
        if any(flag.startswith("from=") for flag in flags):
            continue
        for source in _words(rest)[:-1]:
            yield posixpath.normpath(source.lstrip("/") or ".")


def _words(rest: str) -> list[str]:
    if not rest.startswith("["):
        return [word.strip("\"'") for word in rest.split()]
    try:
        return list(map(str, json.loads(rest)))
    except ValueError:
        return []
