"""What the commands say to people, on standard error, so that standard output stays data."""

from __future__ import annotations

import os
import sys

_RED, _BLUE, _BOLD, _OFF = "\033[1;31m", "\033[36m", "\033[1m", "\033[0m"


def say(text: str = "") -> None:
    """Write a line for people; flushed, because a server may run for hours after it."""
    sys.stderr.write(f"{text}\n")  # at once: a signal would come between text and end of line
    sys.stderr.flush()


def error(message: str, hint: str | None = None) -> None:
    """Write ``error: …`` and, when there is a way out, ``hint: …``."""
    say(f"{_styled('error:', _RED)} {message}")
    if hint:
        say(f"{_styled('hint:', _BLUE)} {hint}")


def strong(text: str) -> str:
    """Return `text` in bold where standard error shows colours, else unchanged."""
    return _styled(text, _BOLD)


def has_colour() -> bool:
    """Return whether standard error is a terminal that wants colour."""
    return wants_colour() and sys.stderr.isatty()


def wants_colour() -> bool:
    """Return whether the user lets terminals show colour (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _styled(text: str, code: str) -> str:
    return f"{code}{text}{_OFF}" if has_colour() else text
