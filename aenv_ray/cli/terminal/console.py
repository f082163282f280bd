"""Messages for people, on standard error: standard output is for data."""

from __future__ import annotations

import os
import sys

_RED, _BLUE, _BOLD, _OFF = "\033[1;31m", "\033[36m", "\033[1m", "\033[0m"


def say(text: str = "") -> None:
    """Write a line and flush it."""
    sys.stderr.write(f"{text}\n")  # one write: a signal cannot separate text and newline
    sys.stderr.flush()


def error(message: str, hint: str | None = None) -> None:
    """Write ``error: …`` and, if there is one, ``hint: …``."""
    say(f"{_styled('error:', _RED)} {message}")
    if hint:
        say(f"{_styled('hint:', _BLUE)} {hint}")


def strong(text: str) -> str:
    """Return `text` in bold if standard error shows colours, else unchanged."""
    return _styled(text, _BOLD)


def has_colour() -> bool:
    """Return whether messages are coloured."""
    return wants_colour() and sys.stderr.isatty()


def wants_colour() -> bool:
    """Return whether the user allows colours (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _styled(text: str, code: str) -> str:
    return f"{code}{text}{_OFF}" if has_colour() else text
