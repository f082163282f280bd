"""The problems that pydantic found in data, as the text of an error message."""

from __future__ import annotations

from typing import Final

from pydantic import ValidationError

_SHOWN: Final = 5
"""How many problems a message names: a list of many objects can have one for each of them."""
_PREFIX: Final = "Value error, "
"""What pydantic writes before the message of a validator's ValueError."""


def problems_of(exc: ValidationError, *, whole: str = "") -> str:
    """Return the places and messages of the problems, joined by semicolons, without the data.

    Args:
        exc: What pydantic raised.
        whole: Name of the data as a whole, the place of problems that are in no single field; empty
            for none.
    """
    texts = []
    for problem in exc.errors(include_url=False, include_input=False)[:_SHOWN]:
        place = ".".join(map(str, problem["loc"])) or whole
        texts.append(": ".join(filter(None, [place, problem["msg"].removeprefix(_PREFIX)])))
    if rest := exc.error_count() - len(texts):
        texts.append(f"and {rest} more")
    return "; ".join(texts)
