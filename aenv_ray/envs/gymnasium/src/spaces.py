"""Actions and observations of Gymnasium's spaces as JSON, and images apart from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

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
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return _array(space.dtype, value)
    if isinstance(space, spaces.Sequence):
        parts = [action_of(space.feature_space, part) for part in _list(value)]
        return _stacked(space.feature_space, parts) if space.stack else tuple(parts)
    if isinstance(space, spaces.OneOf):
        choice, chosen = _list(value, 2)
        if not 0 <= _whole(choice) < len(space.spaces):
            raise ValueError(f"there is no space {choice}")
        return numpy.int64(choice), _element(space.spaces[choice], chosen)
    if isinstance(space, spaces.Graph):
        return _graph(space, value)
    return space.from_jsonable([value])[0]


def actions_of(space: spaces.Space[Any], values: Any, count: int) -> Any:
    """Return the action of a vector, in the form of its batched space.

    Args:
        space: Of one environment.
        values: A list with an action for each environment.
        count: How many environments there are.

    Raises:
        ActionInvalid: An action is not in the space.
    """
    try:
        parts = _list(values, count)
    except ValueError as exc:
        raise ActionInvalid(
            f"{_short(values)} is not an action: {exc}; {how_to_write_all(space, count)}"
        ) from None
    return _stacked(space, [action_of(space, part) for part in parts])


def _stacked(space: spaces.Space[Any], parts: Sequence[Any]) -> Any:
    return concatenate(space, parts, create_empty_array(space, len(parts)))


def _array(dtype: Any, value: Any) -> Any:
    """Return an array of numbers that its type holds unchanged, but for the precision of floats."""
    items = numpy.array(value, dtype=object)
    if numpy.issubdtype(dtype, numpy.floating):
        for item in items.ravel():
            if isinstance(item, bool) or not isinstance(item, int | float):
                raise ValueError(f"{_short(item)} is not a number")
        with numpy.errstate(over="ignore"):  # it becomes infinite
            array = items.astype(dtype)
        if not numpy.isfinite(array).all():
            raise ValueError("a number is infinite, NaN or too large")
        return array
    is_bit = numpy.issubdtype(dtype, numpy.bool_)
    least, most = (0, 1) if is_bit else (numpy.iinfo(dtype).min, numpy.iinfo(dtype).max)
    for item in items.ravel():
        if not least <= _whole(item) <= most:
            raise ValueError(f"{item} is not from {least} to {most}")
    return items.astype(dtype)


def _graph(space: spaces.Graph, value: Any) -> spaces.GraphInstance:
    if not isinstance(value, Mapping) or value.keys() - {"nodes", "edges", "edge_links"}:
        raise ValueError("expected an object with nodes, edges and edge_links")
    nodes = [action_of(space.node_space, node) for node in _list(value["nodes"])]
    edges, links = value.get("edges"), value.get("edge_links")
    if edges is not None and space.edge_space is not None:
        found = [action_of(space.edge_space, edge) for edge in _list(edges)]
        edges = numpy.array(found, dtype=space.edge_space.dtype)
    if links is not None:
        links = _array(numpy.dtype(numpy.int32), links).reshape(-1, 2)
    return spaces.GraphInstance(numpy.array(nodes, dtype=space.node_space.dtype), edges, links)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{_short(value)} is not a whole number")
    return value


def _list(value: Any, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise ValueError("expected a list" if length is None else f"expected a list of {length}")
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
    if isinstance(space, spaces.Sequence):
        return f"give a list of any length, for each item: {how_to_write(space.feature_space)}"
    if isinstance(space, spaces.OneOf):
        parts = (f"[{n}, …]: {how_to_write(part)}" for n, part in enumerate(space.spaces))
        return f"give the number of a space and its element: {'; '.join(parts)}"
    if isinstance(space, spaces.Text):
        lengths = f"{space.min_length} to {space.max_length}"
        return f"give a text of {lengths} of the characters {''.join(sorted(space.character_set))}"
    if isinstance(space, spaces.Graph):
        edge = "null" if space.edge_space is None else how_to_write(space.edge_space)
        return (
            f"give an object: nodes: a list, for each: {how_to_write(space.node_space)}; "
            f"edges: null or a list, for each: {edge}; edge_links: null, or for each edge the "
            "numbers of its two nodes"
        )
    return f"give an element of {space}"


def how_to_write_all(space: spaces.Space[Any], count: int) -> str:
    """Return in words which JSON data denote the action of a vector of environments."""
    return f"give a list of {count} actions, for each: {how_to_write(space)}"


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
