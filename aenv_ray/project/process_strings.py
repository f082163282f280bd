"""Limits of process arguments and environment variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

from aenv_ray.errors import ConfigError

MAX_TEXT_BYTES: Final = 128 * 1024 - 1
"""Linux's limit for one argument or ``NAME=value``: MAX_ARG_STRLEN without the NUL."""
MAX_TOTAL_BYTES: Final = 512 * 1024
"""Limit for all arguments, or all variables of one source; below Linux's usual total of 2 MiB."""

_LARGE_HINT: Final = "write large values to a file in the instance or in the project"

Variables = TypeVar("Variables", bound=dict[str, str])


def check_text(value: str, what: str) -> int:
    """Return the size of an argument or variable in bytes; `what` names it in errors.

    Raises:
        ConfigError: It has a NUL or a lone surrogate, or is too long.
    """
    if "\0" in value:
        raise ConfigError(
            f"{what} has a NUL character, which arguments and variables cannot have",
            hint="remove it, or write binary data to a file",
        )
    try:
        size = len(value.encode())
    except UnicodeEncodeError as exc:
        raise ConfigError(
            f"{what} has a lone surrogate at position {exc.start}, which cannot be encoded",
            hint="decode the text with errors='replace', or remove the character",
        ) from None
    if size > MAX_TEXT_BYTES:
        raise ConfigError(
            f"{what} is {size:,} bytes, more than the limit of {MAX_TEXT_BYTES:,} for one argument "
            "or variable",
            hint=_LARGE_HINT,
        )
    return size


def check_total(sizes: Iterable[int], what: str) -> None:
    """Check the total size of arguments or variables.

    Raises:
        ConfigError: It is above `MAX_TOTAL_BYTES`.
    """
    total = sum(sizes)
    if total > MAX_TOTAL_BYTES:
        raise ConfigError(
            f"{what} are {total:,} bytes in total, more than the limit of {MAX_TOTAL_BYTES:,}",
            hint=_LARGE_HINT,
        )


def checked_variables(variables: Variables, *, what: str) -> Variables:
    """Return environment variables after checking them; errors never quote a value.

    Raises:
        ConfigError: A name is empty or has a ``=``, a name or value is invalid, or they are too
            large.
    """
    sizes = []
    for name, value in variables.items():
        check_text(name, f"a key of {what}")
        if not name or "=" in name:
            raise ConfigError(
                f"{what}[{name!r}]: invalid variable name",
                hint="a name has at least one character and no '='",
            )
        check_text(value, f"{what}[{name!r}]")
        sizes.append(check_text(f"{name}={value}", f"{what}[{name!r}] with its name"))
    check_total(sizes, what)
    return variables
