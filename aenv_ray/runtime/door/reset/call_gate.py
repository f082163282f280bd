"""Counts the functions that run, and lets none begin during a reset."""

from __future__ import annotations

import threading

from aenv_ray.runtime.door.calls import RunningCall
from aenv_ray.runtime.faults import Fault


class CallGate:
    """Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._running: dict[int, str] = {}
        self._is_closed = False
        self.was_used = False
        """Whether a call may have started something since the start of the instance."""
        self.refusal = ""
        """Why the instance is not usable after a reset; empty if it is."""

    def enter(self, call: RunningCall) -> None:
        """Count a function that is about to run; `leave` follows.

        Raises:
            Fault: ``call_cancelled``: the instance is being reset; the function must not run.
        """
        with self._changed:
            if self._is_closed:
                raise Fault(
                    "call_cancelled",
                    f"{call.name!r} did not run: the instance is being reset",
                    "make calls of the next episode after the reset",
                    tool_name=call.name,
                )
            self._running[id(call)] = call.name

    def leave(self, call: RunningCall) -> None:
        """Note that a function has ended; does nothing if it never entered."""
        with self._changed:
            self._running.pop(id(call), None)
            if self._is_closed:
                self._changed.notify_all()

    def close(self) -> bool:
        """Let no function begin; False if the gate is closed already."""
        with self._changed:
            was_closed, self._is_closed = self._is_closed, True
            return not was_closed

    def open(self) -> None:
        """Let functions begin again."""
        with self._changed:
            self._is_closed = False

    def wait_empty(self, within_s: float) -> list[str]:
        """Wait until no function runs; return the names of those that still do."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running, within_s)
            return sorted(self._running.values())
