"""Values as files can store them: agents and their tools may write text that UTF-8 cannot carry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import to_json

_TOO_DEEP: Final = "[nested too deeply to be recorded]"


def storable_text(text: str) -> str:
    """Return text with a replacement character for each lone surrogate, which JSON can escape."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def storable(value: Any) -> Any:
    """Return JSON data that can be written as UTF-8.

    Text is changed as by `storable_text`. Data that is nested too deeply is replaced by a note, at
    its top level or in the object there.
    """
    try:
        to_json(value)
    except ValueError:
        return _repaired(value)
    return value


def _repaired(value: Any) -> Any:
    try:
        return _cleaned(value)
    except RecursionError:
        return {"": _TOO_DEEP} if isinstance(value, Mapping) else _TOO_DEEP


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return storable_text(value)
    if isinstance(value, Mapping):
        return {_cleaned(key): _cleaned(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(item) for item in value]
    return value
