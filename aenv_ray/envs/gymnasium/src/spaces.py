"""Actions and observations of Gymnasium's spaces as JSON, and images apart from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy
from gymnasium import spaces

IMAGE_SIDE: Final = 16
"""Fewest rows and columns of an image; smaller arrays are grids of symbols, as MiniGrid's."""


class ActionInvalid(ValueError):
    """An action is not in the action space; the message says what is."""


def action_of(space: spaces.Space[Any], value: Any) -> Any:
    """Return the element of an action space that JSON data denote.

    Raises:
        ActionInvalid: They denote none.
    """
    try:
        action = _element(space, value)
    except (TypeError, ValueError, KeyError, OverflowError) as exc:
        raise ActionInvalid(
            f"{_short(value)} is not an action: {exc}; {how_to_write(space)}"
        ) from None
    if not space.contains(action):
        raise ActionInvalid(f"{_short(value)} is not in the action space; {how_to_write(space)}")
    return action


def _element(space: spaces.Space[Any], value: Any) -> Any:
    if isinstance(space, spaces.Discrete):
        return space.dtype.type(_whole(value))
    if isinstance(space, spaces.Tuple):
        parts = _list(value, len(space.spaces))
        return tuple(_element(s, v) for s, v in zip(space.spaces, parts, strict=True))
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping) or value.keys() != space.spaces.keys():
            raise ValueError(f"expected an object with {', '.join(space.spaces)}")
        return {name: _element(s, value[name]) for name, s in space.spaces.items()}
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        for item in numpy.array(value, dtype=object).ravel():
            _whole(item)
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        array = numpy.array(value, dtype=numpy.float64)
        if not numpy.isfinite(array).all():
            raise ValueError("a number is infinite or NaN")
        return array.astype(space.dtype)
    return space.from_jsonable([value])[0]


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{_short(value)} is not a whole number")
    return value


def _list(value: Any, length: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise ValueError(f"expected a list of {length}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def how_to_write(space: spaces.Space[Any]) -> str:
    """Return in words which JSON data denote an element of a space."""
    if isinstance(space, spaces.Discrete):
        first = int(space.start)
        return f"give a whole number from {first} to {first + int(space.n) - 1}"
    if isinstance(space, spaces.Box):
        bounds = f"from {_bound(space.low)} to {_bound(space.high)}"
        return f"give numbers {bounds}, as lists of shape {list(space.shape)}"
    if isinstance(space, spaces.MultiDiscrete):
        first, last = space.start.tolist(), (space.start + space.nvec - 1).tolist()
        return f"give lists of whole numbers from {first} to {last}"
    if isinstance(space, spaces.MultiBinary):
        return f"give lists of 0 and 1 of shape {list(space.shape or ())}"
    if isinstance(space, spaces.Tuple):
        return f"give a list: {'; '.join(how_to_write(part) for part in space.spaces)}"
    if isinstance(space, spaces.Dict):
        parts = (f"{name}: {how_to_write(part)}" for name, part in space.spaces.items())
        return f"give an object: {'; '.join(parts)}"
    return f"give an element of {space}"


def _bound(array: Any) -> Any:
    values = numpy.unique(array)
    found = values.tolist()[0] if len(values) == 1 else array.tolist()
    return found if not isinstance(found, float) or math.isfinite(found) else f"{found}"


def plain(value: Any, images: list[Any] | None = None, *, is_batch: bool = False) -> Any:
    """Return an observation or an info as JSON data.

    Args:
        value: Arrays, numbers and texts in tuples, lists and mappings.
        images: Arrays that are images are appended to it, and replaced with a mark; None: they are
            numbers like others.
        is_batch: The arrays have a first axis for the environments of a vector.
    """
    if images is not None and not is_batch and is_image(value):
        images.append(value)
        return f"[image {len(images)}, {value.shape[1]} x {value.shape[0]}]"
    if isinstance(value, numpy.ndarray):
        if images is not None and (is_batch or value.ndim > 3):
            return [plain(one, images) for one in value]
        return plain(value.tolist(), images)
    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): plain(item, images, is_batch=is_batch) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item, images, is_batch=is_batch) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def is_image(value: Any, least_side: int = IMAGE_SIDE) -> bool:
    """Return whether a value is an array of bytes in the shape of an image."""
    if not isinstance(value, numpy.ndarray) or value.dtype != numpy.uint8:
        return False
    has_channels = value.ndim == 3 and value.shape[2] in {1, 3, 4}
    return (has_channels or value.ndim == 2) and min(value.shape[:2]) >= least_side
