"""Values as files can store them: agents and their tools may write text that UTF-8 cannot carry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import to_json

_TOO_DEEP: Final = "[nested too deeply to be recorded]"
_MOST_NESTED: Final = 150
"""Pydantic reads no JSON that is nested more than 200 times, and a record adds some."""


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
