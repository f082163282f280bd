"""Makes values storable in files: text of agents and tools may not be encodable as UTF-8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import to_json

_TOO_DEEP: Final = "[nested too deeply to be recorded]"
_MOST_NESTED: Final = 150
"""Pydantic reads no JSON with more than 200 levels of nesting, and a record adds some levels."""


def storable_text(text: str) -> str:
    """Return text with a replacement character for each lone surrogate.

    JSON can contain lone surrogates as escapes; UTF-8 cannot.
    """
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def storable(value: Any) -> Any:
    """Return JSON data that can be written as UTF-8.

    Text is changed as by `storable_text`. If data is nested too deeply, a note replaces all of it;
    in place of an object, the note is its only value.
    """
    try:
        written = to_json(value)
    except ValueError:
        return _repaired(value)
    may_be_deep = written.count(b"[") + written.count(b"{") > _MOST_NESTED
    return _repaired(value) if may_be_deep else value


def _repaired(value: Any) -> Any:
    try:
        return _cleaned(value)
    except RecursionError:
        return {"": _TOO_DEEP} if isinstance(value, Mapping) else _TOO_DEEP


def _cleaned(value: Any, left: int = _MOST_NESTED) -> Any:
    if isinstance(value, str):
        return storable_text(value)
    if not isinstance(value, Mapping | list | tuple):
        return value
    if not left:
        raise RecursionError
    if isinstance(value, Mapping):
        return {_cleaned(key): _cleaned(item, left - 1) for key, item in value.items()}
    return [_cleaned(item, left - 1) for item in value]
