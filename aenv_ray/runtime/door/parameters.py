"""What the parameters of a call say, whichever function it is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from aenv_ray.runtime.door.calls import DEFAULT_TIMEOUT_S
from aenv_ray.runtime.faults import Fault

LONGEST_TIMEOUT_S: Final = 86_400.0
"""A longer timeout counts as this one."""


def name_of(params: Mapping[str, Any]) -> str:
    """Return the name of the tool or function that is called.

    Raises:
        Fault: ``tool_input_invalid``: there is none.
    """
    name = params.get("name")
    if not isinstance(name, str) or not name:
        raise Fault("tool_input_invalid", "the call names no tool or function")
    return name


def timeout_of(meta: Mapping[str, Any]) -> float:
    """Return the timeout in seconds that ``_meta`` asks for, or the usual one.

    Raises:
        Fault: ``tool_input_invalid``: it is no number above zero.
    """
    value = meta.get("aenv/timeout_s")
    if value is None:
        return DEFAULT_TIMEOUT_S
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise Fault("tool_input_invalid", f"timeout {value!r} is not a number of seconds above 0")
    return min(float(value), LONGEST_TIMEOUT_S)
