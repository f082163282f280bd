"""Results without a pickler: what Ray makes of a `WireResult`, at a fifth of the cost.

Ray pickles every object that is no plain data by a pickler written in Python, made anew for each.
For a call's result, which is one reference to a function and one bytes object, that was a quarter
of all Python time of a busy host. The caller gets the same object and unpickles it as any other.

This uses names that Ray keeps to itself, of the one minor version that we are pinned to; the tests
of calls fail when a version does without them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, Final

from aenv_ray.actors.calls.wire import WireResult

_METADATA: Final = b"PYTHON"
"""Ray's word for a value that holds pickled objects."""


def write_results_directly(context: Any) -> None:
    """Let a serialization context of Ray's write each `WireResult` by itself.

    Args:
        context: This process's, for its job. Other values it serializes as before.
    """
    context.serialize = _writer(context.serialize)


def _writer(others: Callable[[Any], Any]) -> Callable[[Any], Any]:
    from ray import _raylet

    raylet: Any = _raylet
    # A value that is nothing but the first of the pickled objects.
    reference = raylet.MessagePackSerializer.dumps(object(), lambda _: 0)

    def serialize(value: Any) -> Any:
        if type(value) is not WireResult:
            return others(value)
        pickled = pickle.dumps([value], protocol=5)
        objects = raylet.Pickle5SerializedObject(_METADATA, pickled, raylet.Pickle5Writer(), [])
        return raylet.MessagePackSerializedObject(_METADATA, reference, [], objects)

    return serialize
