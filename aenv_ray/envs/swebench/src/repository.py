"""What an agent does in the repository of its task: commands, views and edits in the sidecar."""

from __future__ import annotations

import shlex
from typing import Final

from grading import ACTIVATE

from aenv_ray.runtime import sidecar

SHOWN_CHARACTERS: Final = 30_000
"""Longest output that a tool returns; the middle of a longer one is left out."""
LISTED: Final = 200
"""Maximum number of entries of a directory that are listed."""


def shown(text: str) -> str:
    """Return text with the middle left out if it is too long."""
    left_out = len(text) - SHOWN_CHARACTERS
    if left_out <= 0:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]}\n[… {left_out} characters left out …]\n{text[-half:]}"


def run(command: str, directory: str, timeout_s: float) -> tuple[int, str]:
    """Run a command with bash in a directory of the sidecar; return exit code and output.

    Raises:
        TimeoutError: It took longer than `timeout_s`.
    """
    text = f"exec 2>&1\n{ACTIVATE}\ncd {shlex.quote(directory)} || exit 1\n{command}"
    result = sidecar.exec(["bash", "-c", text], timeout_s=timeout_s)
    return result.exit_code, result.text()


def numbered(text: str, start: int, end: int | None) -> str:
    """Return lines of a text with their numbers.

    Raises:
        ValueError: The range is not within the text.
    """
    lines = text.split("\n")
    if lines and not lines[-1]:
        lines.pop()
    last = len(lines) if end is None else min(end, len(lines))
    if start < 1 or (lines and start > len(lines)) or last < start - 1:
        raise ValueError(f"lines {start} to {end} of a file with {len(lines)} lines")
    return "".join(f"{n:6}\t{lines[n - 1]}\n" for n in range(start, last + 1))


def replaced(text: str, old: str, new: str, path: str) -> str:
    """Return a text with its only occurrence of `old` replaced.

    Raises:
        ValueError: `old` is empty, or occurs not once.
    """
    count = text.count(old) if old else 0
    if count != 1:
        what = "is empty" if not old else f"occurs {count} times"
        raise ValueError(f"the old text {what} in {path}; give text that occurs once")
    return text.replace(old, new)
