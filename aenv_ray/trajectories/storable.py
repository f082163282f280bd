"""Makes values storable in files: text of agents and tools may not be encodable as UTF-8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import from_json, to_json

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


def shown(value: Any) -> str:
    """Return the repr of a value, whatever its ``__repr__`` does."""
    try:
        return storable_text(repr(value))
    except Exception:  # noqa: BLE001  # its __repr__ raised, or it is nested too deeply
        return f"an object of {type(value).__name__} that cannot be shown"


def storable(value: Any) -> Any:
    """Return data that can be written as JSON in UTF-8.

    Text is changed as by `storable_text`, and values that JSON lacks are replaced by their repr. If
    data is nested too deeply, a note replaces all of it; in place of an object, the note is its
    only value.
    """
    try:
        written = to_json(value)
    except ValueError:
        return _repaired(value)
    return _repaired(value) if may_be_deep(written) else value


def may_be_deep(written: bytes) -> bool:
    """Whether JSON has so many brackets that it may be nested too deeply to be read again."""
    return written.count(b"[") + written.count(b"{") > _MOST_NESTED


def _repaired(value: Any) -> Any:
    try:
        return _cleaned(value)
    except RecursionError:
        return {"": _TOO_DEEP} if isinstance(value, Mapping) else _TOO_DEEP


def _cleaned(value: Any, left: int = _MOST_NESTED) -> Any:
    if isinstance(value, str):
        return storable_text(value)
    if not isinstance(value, Mapping | list | tuple):
        return _scalar(value)
    if not left:
        raise RecursionError
    if isinstance(value, Mapping):
        return {_key(key): _cleaned(item, left - 1) for key, item in value.items()}
    return [_cleaned(item, left - 1) for item in value]


def _key(key: Any) -> str:
    """Return what JSON makes of a key."""
    if isinstance(key, str):
        return storable_text(key)
    try:
        (text,) = from_json(to_json({key: None}))
    except ValueError:
        return shown(key)
    return str(text)


def _scalar(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    try:
        return from_json(to_json(value))
    except ValueError:
        return shown(value)
