"""Serialize actor results without Ray's pickler, at a fifth of the cost.

Ray pickles each object that is not plain data with a pickler written in Python, created anew for
each object. For the result of a call, which is a reference to one function and one bytes object,
that took a quarter of all Python time of a busy host. The receiver gets the same object and
unpickles it like any other.

This relies on private names of Ray; the tests of calls fail if a Ray version lacks them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, Final

_METADATA: Final = b"PYTHON"
"""Ray's marker of a value that contains pickled objects."""


def write_directly(context: Any, kind: type) -> None:
    """Make a serialization context of Ray write the instances of one class directly.

    Args:
        context: The result of `ray_api.serialization_context`.
        kind: Exactly this class, without subclasses. Other values are serialized as before.
    """
    context.serialize = _writer(context.serialize, kind)


def _writer(serialize_others: Callable[[Any], Any], kind: type) -> Callable[[Any], Any]:
    from ray import _raylet

    raylet: Any = _raylet
    # A value that consists of the first pickled object alone.
    reference = raylet.MessagePackSerializer.dumps(object(), lambda _: 0)

    def serialize(value: Any) -> Any:
        if type(value) is not kind:
            return serialize_others(value)
        pickled = pickle.dumps([value], protocol=5)
        objects = raylet.Pickle5SerializedObject(_METADATA, pickled, raylet.Pickle5Writer(), [])
        return raylet.MessagePackSerializedObject(_METADATA, reference, [], objects)

    return serialize
