"""Makes `shutdown` wait for other threads that use the connection, and refuses new operations.

Any use of Ray after ``ray.shutdown`` starts a new cluster. A thread that is still creating an
instance would do that. Therefore all such threads must have stopped before Ray ends.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, Self, TypeVar

from aenv_ray.errors import FabricUnavailable

P = ParamSpec("P")
T = TypeVar("T")


class ShutdownGate:
    """Counts the operations under way and refuses new ones once closed; reentrant, thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._is_closed = False
        self._why = "this connection to the fabric was shut down", "aenv_ray.init() connects again"

    @property
    def is_closed(self) -> bool:
        """Whether new operations are refused, for good."""
        return self._is_closed

    def check(self) -> None:
        """Raise an error if the gate is closed.

        Raises:
            FabricUnavailable: It is closed.
        """
        if self._is_closed:
            message, hint = self._why
            raise FabricUnavailable(message, hint=hint)

    def fail(self, message: str, hint: str) -> None:
        """Have operations, those under way included, raise this error from now on."""
        with self._changed:
            self._why = message, hint
            self._is_closed = True

    def __enter__(self) -> Self:
        with self._changed:
            self.check()
            self._inside += 1
        return self

    def __exit__(self, *exc: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def close(self, deadline_s: float) -> bool:
        """Refuse new operations and wait until those under way have ended.

        Args:
            deadline_s: Longest wait.

        Returns:
            Whether all have ended.
        """
        with self._changed:
            self._is_closed = True
            return self._changed.wait_for(lambda: not self._inside, deadline_s)


class _Gated(Protocol):
    @property
    def gate(self) -> ShutdownGate: ...


G = TypeVar("G", bound=_Gated)


def gated(method: Callable[Concatenate[G, P], T]) -> Callable[Concatenate[G, P], T]:
    """Run a method inside the gate of its object; once closed, raise FabricUnavailable."""

    @functools.wraps(method)
    def within(self: G, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.gate:
            return method(self, *args, **kwargs)

    return within
