"""Text that a process can be given: its arguments and environment variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

from aenv_ray.errors import ConfigError

MAX_TEXT_BYTES: Final = 128 * 1024 - 1
"""Linux gives a process no longer argument or ``NAME=value`` (MAX_ARG_STRLEN, with its NUL)."""
MAX_TOTAL_BYTES: Final = 512 * 1024
"""All arguments, or all variables of one source: together they stay below Linux's usual 2 MiB."""

_LARGE_HINT: Final = "write what is large to a file of the instance, or into the project"

Variables = TypeVar("Variables", bound=dict[str, str])


def check_text(value: str, what: str) -> int:
    """Return the size in bytes of a text that a process can be given; `what` names it in errors.

    Raises:
        ConfigError: It holds a NUL or a lone surrogate, or is too long.
    """
    if "\0" in value:
        raise ConfigError(f"{what} holds a NUL character, which no process can be given")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as exc:
        raise ConfigError(
            f"{what} holds a lone surrogate at position {exc.start}, which is no character",
            hint="decode the text with errors='replace', or leave the character out",
        ) from None
    if size > MAX_TEXT_BYTES:
        raise ConfigError(
            f"{what} is {size:,} bytes, more than the {MAX_TEXT_BYTES:,} that a process can be "
            "given in one text",
            hint=_LARGE_HINT,
        )
    return size


def check_total(sizes: Iterable[int], what: str) -> None:
    """Refuse texts that are too large together.

    Raises:
        ConfigError: They are.
    """
    total = sum(sizes)
    if total > MAX_TOTAL_BYTES:
        raise ConfigError(
            f"{what} are {total:,} bytes together, more than the {MAX_TOTAL_BYTES:,} allowed",
            hint=_LARGE_HINT,
        )


def checked_variables(variables: Variables, *, what: str) -> Variables:
    """Return environment variables that a process can be given; no error holds a value of theirs.

    Raises:
        ConfigError: A name is empty or has a ``=``, a name or value is no text for a process, or
            they are too large.
    """
    sizes = []
    for name, value in variables.items():
        check_text(name, f"a key of {what}")
        if not name or "=" in name:
            raise ConfigError(f"{what}[{name!r}] is no name of a variable")
        check_text(value, f"{what}[{name!r}]")
        sizes.append(check_text(f"{name}={value}", f"{what}[{name!r}] with its name"))
    check_total(sizes, what)
    return variables
