"""The memory of call ids, which makes it safe to repeat a call (invariant 1)."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

Waiter = Callable[[bytes], object]

REMEMBERED_IDS: Final = 65_536
"""Number of finished ids that are remembered and never run again: at 2,000 calls per second, those
of half a minute."""
REMEMBERED_BYTES: Final = 32 * 1024 * 1024
"""Total size of stored outcomes; the oldest are dropped first."""
REMEMBERED_S: Final = 300.0
"""How long an outcome is stored. A call is repeated after its host was restarted, which takes about
a minute, or after the head of the cluster was restarted, which takes a minute and a half."""
_SWEEP_S: Final = 60.0
"""Outcomes that expire within this time are dropped together, for one wake-up of `expire`."""


def key_of(method: str, call_id: object) -> str:
    """Return the key of a call: its method and the id that its caller chose.

    The method is part of it, so that an agent, which may only call tools, can neither get nor take
    the outcome of a trainer's reward by naming its id.
    """
    return f"{method} {call_id}"


class Outcomes:
    """The outcomes of recent calls, by key, see `key_of`. Thread-safe.

    A key is unknown, then pending (with waiters), then finished with a stored outcome, then
    finished without it, and finally forgotten. Only an unknown id may run. A call that is refused
    before it runs is forgotten at once.

    Args:
        max_ids: Finished ids to remember.
        max_bytes: Total size of stored outcomes.
        max_age_s: How long an outcome is stored.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        max_ids: int = REMEMBERED_IDS,
        max_bytes: int = REMEMBERED_BYTES,
        max_age_s: float = REMEMBERED_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_ids = max_ids
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._lock = threading.Lock()
        self._pending: dict[str, list[Waiter]] = {}
        self._finished: OrderedDict[str, bytes | None] = OrderedDict()
        self._stored: deque[tuple[float, str, int]] = deque()
        """When it was stored, id and size, oldest first: the tail end of `_finished`."""
        self._bytes = 0

    def begin(self, call_id: str, waiter: Waiter, lost: bytes) -> bool:
        """Return whether the call is new and must run now.

        Args:
            call_id: The caller's id.
            waiter: Called with the outcome, once: later, or at once when it is stored.
            lost: Passed to the waiter when the call ran but its outcome was dropped.
        """
        with self._lock:
            if call_id in self._pending:
                self._pending[call_id].append(waiter)
                return False
            if call_id not in self._finished:
                self._pending[call_id] = [waiter]
                return True
            outcome = self._finished[call_id]
        waiter(lost if outcome is None else outcome)
        return False

    def finish(self, call_id: str, outcome: bytes) -> bool:
        """Store the outcome and call every waiter with it.

        Returns:
            False when the call already had an outcome: the first one stays.
        """
        with self._lock:
            waiters = self._pending.pop(call_id, None)
            if waiters is None:
                return False
            stored = self._stored
            self._finished[call_id] = outcome
            stored.append((self._clock(), call_id, len(outcome)))
            self._bytes += len(outcome)
            # The newest outcome is stored whatever its size: its caller may be about to repeat.
            while self._bytes > self._max_bytes and len(stored) > 1:
                self._drop_oldest()
            while len(self._finished) > self._max_ids:
                if stored[0][1] == next(iter(self._finished)):
                    self._drop_oldest()
                self._finished.popitem(last=False)
        for waiter in waiters:
            waiter(outcome)
        return True

    def refuse(self, call_id: str, outcome: bytes) -> bool:
        """Call every waiter with the outcome of a call that never ran, and forget its id.

        Returns:
            False when the call already had an outcome: the first one stays.
        """
        with self._lock:
            waiters = self._pending.pop(call_id, None)
        for waiter in waiters or ():
            waiter(outcome)
        return waiters is not None

    def is_pending(self, call_id: str) -> bool:
        """Whether a call is under way."""
        return call_id in self._pending

    def drop_all(self) -> None:
        """Drop all stored outcomes; their ids still never run again."""
        with self._lock:
            while self._stored:
                self._drop_oldest()

    def expire(self) -> float:
        """Drop outcomes that are too old; their ids still never run again.

        Returns:
            When to call this again, on the clock; infinity while no outcome is stored.
        """
        with self._lock:
            oldest_allowed = self._clock() - self._max_age_s
            while self._stored and self._stored[0][0] <= oldest_allowed:
                self._drop_oldest()
            if not self._stored:
                return float("inf")
            return self._stored[0][0] + self._max_age_s + _SWEEP_S

    def _drop_oldest(self) -> None:
        _, call_id, size = self._stored.popleft()
        self._finished[call_id] = None
        self._bytes -= size

    @property
    def pending(self) -> int:
        """How many calls are under way."""
        return len(self._pending)
