"""Encodes the outcomes of calls as the bytes of a JSON-RPC ``result`` or ``error`` member."""

from __future__ import annotations

import contextlib
import errno
import math
import traceback
from typing import Any, Final

from aenv_ray.runtime.api.registry import Registered
from aenv_ray.runtime.api.results import (
    RESULT_LIMIT_BYTES,
    completion_result,
    error_result,
    prompt_result,
    resource_result,
    to_json,
    tool_result,
)
from aenv_ray.runtime.door.calls import RunningCall
from aenv_ray.runtime.faults import Fault

EncodedOutcome = bytes
"""The member ``result`` or ``error`` of a JSON-RPC response."""


def result_outcome(payload: bytes) -> EncodedOutcome:
    """Return the outcome with a result, given as JSON."""
    return b'"result":' + payload


def fault_outcome(fault: Fault) -> EncodedOutcome:
    """Return the outcome of a refused or stopped call."""
    return b'"error":' + to_json(fault.rpc_error())


LOST: Final = fault_outcome(
    Fault(
        "call_outcome_unknown",
        "the call ran, but its result is no longer stored",
        "results are stored for 5 minutes, up to 32 MiB and until a reset; nothing ran again",
    )
)
"""For a repeated id whose outcome was dropped."""


def returned(entry: Registered, value: Any) -> EncodedOutcome:
    """Return the outcome for a function's return value."""
    try:
        if entry.kind == "tool":
            return result_outcome(to_json(tool_result(value)))
        if entry.kind == "health":
            return result_outcome(to_json({"data": _health(value)}))
        if entry.kind == "reward":
            _check_reward(entry.name, value)
        if entry.kind == "resource":
            value = resource_result(entry.name, entry.mime_type, value)
        elif entry.kind == "prompt":
            value = prompt_result(entry.description or entry.signature.description, value)
        elif entry.kind == "completion":
            value = completion_result(value)
        payload = to_json(value)
    except Exception as exc:  # noqa: BLE001  # __iter__ or a serializer of the value may raise
        if entry.kind == "tool":
            text = f"{entry.name} returned a value that cannot be sent: {exc}"
            return result_outcome(to_json(error_result(text, type(exc).__name__)))
        return fault_outcome(
            Fault("function_failed", f"{entry.kind} {entry.name!r}: {exc}", tool_name=entry.name)
        )
    if len(payload) > RESULT_LIMIT_BYTES and entry.kind != "builtin":
        return fault_outcome(
            Fault(
                "function_failed",
                f"{entry.kind} {entry.name!r} returned {len(payload)} bytes, over the limit of "
                f"{RESULT_LIMIT_BYTES}",
                "return less, or write it to a file and read the file",
                tool_name=entry.name,
            )
        )
    if entry.kind in {"resource", "prompt", "completion"}:
        return result_outcome(payload)
    if entry.kind == "empty":
        return result_outcome(b"{}")
    return result_outcome(b'{"data":' + payload + b"}")


def _check_reward(name: str, value: Any) -> None:
    numbers = value.values() if isinstance(value, dict) else [value]
    for number in numbers:
        if isinstance(number, float) and not math.isfinite(number):
            raise ValueError(f"{name} returned {number}, which is not a finite reward")


def _health(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {"status": "healthy", **value}
    if value is None or value is True:
        return {"status": "healthy"}
    return {"status": "unhealthy", "message": str(value)}


def raised(entry: Registered, exc: BaseException) -> EncodedOutcome:
    """Return the outcome for an exception: a result for a tool, otherwise an error."""
    if isinstance(exc, Fault):
        return fault_outcome(_of_running_code(entry, exc))
    text = words(exc)
    trace = _trace(exc)
    with contextlib.suppress(Exception):  # the tool may have closed its log
        print(trace, flush=True)  # noqa: T201  # stdout is the instance's log
    if entry.kind == "tool":
        return result_outcome(to_json(error_result(text, type(exc).__name__)))
    if entry.kind == "health":
        return result_outcome(to_json({"data": {"status": "unhealthy", "message": text}}))
    what = "function" if entry.kind == "builtin" else entry.kind
    exhausted = _exhausted(exc)
    if exhausted is not None:
        return fault_outcome(
            Fault(
                "sandbox_exhausted",
                f"{what} {entry.name!r} raised {text}",
                f"the sandbox has no {exhausted} left",
                tool_name=entry.name,
                died_of=exhausted,
            )
        )
    return fault_outcome(
        Fault(
            "function_failed",
            f"{what} {entry.name!r} raised {text}",
            tool_name=entry.name,
            traceback=trace[-4000:],
        )
    )


_REFUSALS: Final = frozenset({"tool_not_found", "tool_input_invalid"})


def _of_running_code(entry: Registered, fault: Fault) -> Fault:
    """Return a fault that does not claim that a function or reward was refused before it ran.

    A refusal means that the caller is wrong, which voids an episode. Code that runs may get one
    from an inner instance, because of arguments that an agent has chosen.
    """
    is_refusal = fault.code in _REFUSALS and not entry.is_forwarded
    if not is_refusal or entry.kind not in ("function", "reward"):
        return fault
    text = f"{entry.kind} {entry.name!r} raised {fault.code}: {fault.message}"
    return Fault("function_failed", text, fault.hint, tool_name=entry.name)


_EXHAUSTED: Final = {
    errno.EAGAIN: "processes",
    errno.EMFILE: "processes",
    errno.ENFILE: "processes",
    errno.ENOMEM: "memory",
    errno.ENOSPC: "disk",
    errno.EDQUOT: "disk",
}
"""The limit of the sandbox that an error number tells of, as the caller's error tree names it."""
_MAX_CAUSES: Final = 16


def _exhausted(exc: BaseException | None) -> str | None:
    """Return the limit of the sandbox that an exception, or one that caused it, tells of."""
    for _ in range(_MAX_CAUSES):
        if exc is None:
            return None
        if isinstance(exc, MemoryError):
            return "memory"
        if isinstance(exc, OSError) and exc.errno in _EXHAUSTED:
            return _EXHAUSTED[exc.errno]
        if isinstance(exc, RuntimeError) and "can't start new thread" in str(exc):
            return "processes"
        exc = exc.__cause__ or exc.__context__
    return None


def words(exc: BaseException) -> str:
    """Return type and message of an exception, or only the type if the message fails."""
    try:
        return f"{type(exc).__name__}: {exc}"
    except Exception:  # noqa: BLE001  # a tool's exception class may do anything
        return type(exc).__name__


def _trace(exc: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(exc))
    except Exception:  # noqa: BLE001  # a tool's exception class may do anything
        return words(exc)


def stopped(call: RunningCall, entry: Registered, timeout_s: float | None) -> EncodedOutcome:
    """Return the outcome for a function that was stopped while it ran."""
    if call.stop_reason == "timeout":
        after = f" after {timeout_s:g} s" if timeout_s else ""
        return fault_outcome(
            Fault("tool_timeout", f"{entry.name!r} was stopped{after}", tool_name=entry.name)
        )
    return fault_outcome(
        Fault("call_cancelled", f"{entry.name!r} was cancelled", tool_name=entry.name)
    )


def never_ran(call: RunningCall) -> Fault:
    """Return the fault of a call whose deadline passed while it waited for a thread."""
    return Fault(
        "tool_timeout",
        f"{call.name!r} did not run: too many other calls ran until its deadline",
        "make fewer calls at once, or give them longer timeouts",
        tool_name=call.name,
    )
