"""A gate: work passes through it until it is closed, and closing waits for the work inside.

Ray starts a new cluster by itself for whoever uses it after `ray.shutdown`. A thread that still
creates an instance then would do just that; behind a gate it is out before Ray ends.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, Self, TypeVar

from aenv_ray.errors import FabricUnavailable

P = ParamSpec("P")
T = TypeVar("T")


class Gate:
    """Lets work in until it is closed. Any thread may use it; a thread may enter again inside."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._is_closed = False

    def check(self) -> None:
        """Do nothing while it is open.

        Raises:
            FabricUnavailable: It was closed.
        """
        if self._is_closed:
            raise FabricUnavailable(
                "this connection to the fabric was shut down",
                hint="aenv_ray.init() makes a new one",
            )

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
        """Let nothing in any more, and wait until all that is inside has left.

        Args:
            deadline_s: Seconds to wait at most.

        Returns:
            Whether all has left.
        """
        with self._changed:
            self._is_closed = True
            return self._changed.wait_for(lambda: not self._inside, deadline_s)


class _Gated(Protocol):
    @property
    def gate(self) -> Gate: ...


G = TypeVar("G", bound=_Gated)


def gated(method: Callable[Concatenate[G, P], T]) -> Callable[Concatenate[G, P], T]:
    """Have a method run inside its object's gate; it raises `FabricUnavailable` once closed."""

    @functools.wraps(method)
    def within(self: G, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.gate:
            return method(self, *args, **kwargs)

    return within
