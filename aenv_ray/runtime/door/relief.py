"""Looks after the thread that both reads a connection and runs its quick calls."""

from __future__ import annotations

import _thread
import contextlib
import time
from typing import Final, Protocol

from aenv_ray.runtime.system.threads import start_thread

RELIEF_S: Final = 0.02
"""How often the leader is looked at while it runs calls; a stuck one is relieved within two."""
_IDLE_ROUNDS: Final = 30


class Led(Protocol):
    """A connection with a leader."""

    inline_since: float | None
    """When the leader began the call that it runs itself; None while it reads."""

    @property
    def is_closed(self) -> bool:
        """Whether the peer is gone."""

    def relieve(self, since: float) -> None:
        """Put another thread in the place of a leader that still runs the call begun then."""


class Relief:
    """Looks at a leader that runs calls itself, and relieves it when one takes too long.

    Its thread sleeps while nothing is run inline, so an idle instance costs nothing.

    Args:
        connection: Whose leader it is.
    """

    def __init__(self, connection: Led) -> None:
        self._connection = connection
        self._parked = _thread.allocate_lock()
        self._parked.acquire()
        self._is_awake = False
        self._has_thread = False

    def wake(self) -> None:
        """Have the leader looked at from now on; called by the leader only."""
        if self._is_awake:
            return
        self._is_awake = True
        if self._has_thread:
            with contextlib.suppress(RuntimeError):  # it was about to park, and sees us by itself
                self._parked.release()
        else:
            try:
                start_thread(self._run)
            except RuntimeError:  # the sandbox's limits allow no thread now; the next call tries
                self._is_awake = False
            else:
                self._has_thread = True

    def _run(self) -> None:
        connection = self._connection
        idle_rounds = 0
        while not connection.is_closed:
            time.sleep(RELIEF_S)
            since = connection.inline_since
            if since is None:
                idle_rounds += 1
            else:
                idle_rounds = 0
                if time.monotonic() - since > RELIEF_S:
                    connection.relieve(since)
            if idle_rounds > _IDLE_ROUNDS:
                idle_rounds = 0
                self._is_awake = False
                if connection.inline_since is None:  # else a call began before it could wake us
                    self._parked.acquire()
                self._is_awake = True
