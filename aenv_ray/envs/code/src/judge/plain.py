"""Values between the judge and a solution, as bytes.

A decoded value consists of new objects of builtin types and a few of the standard library, so a
solution cannot pass an object with methods of its own, such as one that equals everything. Other
objects stay in the solution's process, and are represented by a number.
"""

from __future__ import annotations

import builtins
import struct
from collections.abc import Callable
from typing import Any

_CONSTANTS = {None: b"0", True: b"1", False: b"2"}
_CONSTANT_OF = {tag: value for value, tag in _CONSTANTS.items()}
_SEQUENCES = {b"l": list, b"t": tuple, b"S": set, b"Z": frozenset}
_TAGS = {kind: tag for tag, kind in _SEQUENCES.items()}
_DATE_PARTS = {
    "date": ("year", "month", "day"),
    "datetime": ("year", "month", "day", "hour", "minute", "second", "microsecond"),
    "time": ("hour", "minute", "second", "microsecond"),
    "timedelta": ("days", "seconds", "microseconds"),
}


class Malformed(Exception):
    """The bytes are not an encoded value."""


def encode(value: Any, number_of: Callable[[Any], int]) -> bytes:
    """Return a value as bytes.

    Args:
        value: Instances of subclasses are encoded as instances of the builtin type.
        number_of: Returns the number of an object that is not plain data.

    Raises:
        RecursionError: The value contains itself, or is nested too deeply.
    """
    parts: list[bytes] = []
    _encode(value, number_of, parts.append)
    return b"".join(parts)


def _encode(value: Any, number_of: Callable[[Any], int], put: Callable[[bytes], None]) -> None:
    if value is None or value is True or value is False:
        put(_CONSTANTS[value])
    elif isinstance(value, int):
        whole = int(value)
        _put_bytes(put, b"i", whole.to_bytes(whole.bit_length() // 8 + 1, "big", signed=True))
    elif isinstance(value, float):
        put(b"f" + struct.pack("d", value))
    elif isinstance(value, complex):
        put(b"j" + struct.pack("dd", value.real, value.imag))
    elif isinstance(value, str):
        _put_bytes(put, b"s", str.encode(value, "utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray):
        _put_bytes(put, b"b" if isinstance(value, bytes) else b"a", bytes(value))
    elif isinstance(value, list | tuple | set | frozenset):
        kind = next(kind for kind in _TAGS if isinstance(value, kind))
        put(_TAGS[kind] + struct.pack("I", len(value)))
        for item in value:
            _encode(item, number_of, put)
    elif isinstance(value, dict):
        put(b"d" + struct.pack("I", len(value)))
        for key, item in value.items():
            _encode(key, number_of, put)
            _encode(item, number_of, put)
    else:
        _encode_other(value, number_of, put)


def _encode_other(
    value: Any, number_of: Callable[[Any], int], put: Callable[[bytes], None]
) -> None:
    kind = type(value)
    module, name = kind.__module__, kind.__name__
    parts: tuple[Any, ...] | None = None
    if kind is range:
        name, parts = "range", (value.start, value.stop, value.step)
    elif module == "collections" and name == "deque":
        parts = (list(value), value.maxlen)
    elif module == "decimal" and name == "Decimal":
        parts = (str(value),)
    elif module == "fractions" and name == "Fraction":
        parts = (value.numerator, value.denominator)
    elif module == "datetime" and name in _DATE_PARTS and getattr(value, "tzinfo", None) is None:
        parts = tuple(getattr(value, part) for part in _DATE_PARTS[name])
    elif kind is type and value is getattr(builtins, value.__name__, None):
        name, parts = "type", (value.__name__,)
    elif module == "builtins" and name in {"dict_keys", "dict_items"}:
        parts = (list(value),)
    elif module.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        _encode(value.tolist(), number_of, put)
        return
    if parts is None:
        put(b"o" + struct.pack("Q", number_of(value)))
    else:
        put(b"x")
        _encode((name, *parts), number_of, put)


def _put_bytes(put: Callable[[bytes], None], tag: bytes, data: bytes) -> None:
    put(tag + struct.pack("I", len(data)))
    put(data)


def decode(data: bytes, object_of: Callable[[int], Any]) -> Any:
    """Return the value of `encode`.

    Args:
        data: The bytes, which may come from anyone.
        object_of: Returns what stands for the object with a number.

    Raises:
        Malformed: It is not the encoding of a value.
        RecursionError: It is nested too deeply.
    """
    try:
        value, end = _decode(data, 0, object_of)
    except (
        struct.error,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
    ) as exc:
        raise Malformed(str(exc)) from None
    if end != len(data):
        raise Malformed("there is more than one value")
    return value


def _decode(data: bytes, at: int, object_of: Callable[[int], Any]) -> tuple[Any, int]:
    tag = data[at : at + 1]
    at += 1
    if tag in _CONSTANT_OF:
        return _CONSTANT_OF[tag], at
    if tag in {b"f", b"j"}:
        numbers = struct.unpack_from("d" if tag == b"f" else "dd", data, at)
        return (numbers[0] if tag == b"f" else complex(*numbers)), at + 8 * len(numbers)
    if tag == b"o":
        return object_of(struct.unpack_from("Q", data, at)[0]), at + 8
    if tag == b"x":
        parts, at = _decode(data, at, object_of)
        return _other(*parts), at
    (size,) = struct.unpack_from("I", data, at)
    at += 4
    if tag in _SEQUENCES or tag == b"d":
        items = []
        for _ in range(2 * size if tag == b"d" else size):
            item, at = _decode(data, at, object_of)
            items.append(item)
        if tag == b"d":
            return dict(zip(items[::2], items[1::2], strict=True)), at
        return _SEQUENCES[tag](items), at
    content = data[at : at + size]
    if len(content) != size:
        raise Malformed("it ends early")
    return _OF_BYTES[tag](content), at + size


_OF_BYTES: dict[bytes, Callable[[bytes], Any]] = {
    b"i": lambda content: int.from_bytes(content, "big", signed=True),
    b"s": lambda content: content.decode("utf-8", "surrogatepass"),
    b"b": bytes,
    b"a": bytearray,
}


def _other(name: str, *parts: Any) -> Any:
    if name == "range":
        return range(*parts)
    if name == "deque":
        from collections import deque

        return deque(*parts)
    if name == "Decimal":
        from decimal import Decimal

        return Decimal(*parts)
    if name == "Fraction":
        from fractions import Fraction

        return Fraction(*parts)
    if name == "type" and isinstance(found := getattr(builtins, *parts), type):
        return found
    if name == "dict_keys":
        return dict.fromkeys(*parts).keys()
    if name == "dict_items":
        return dict(*parts).items()
    if name in _DATE_PARTS:
        import datetime

        return getattr(datetime, name)(*parts)
    raise Malformed(f"there is no type {name!r}")
