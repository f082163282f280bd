"""The memory of call ids that makes a repeated call safe (design D6, invariant 1)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

Waiter = Callable[[bytes], object]

REMEMBERED_IDS: Final = 65_536
"""Ids whose repetition is refused or answered: half a minute of them at 2,000 calls a second. A
repetition comes when a host was restarted, within seconds."""
REMEMBERED_BYTES: Final = 32 * 1024 * 1024
"""Outcomes kept to answer a repetition; the oldest go first."""


class Outcomes:
    """What became of recent calls, by call id.

    An id passes through: unknown → pending (with waiters) → known outcome → forgotten outcome. Only
    an unknown id may run.
    """

    def __init__(self, max_ids: int = REMEMBERED_IDS, max_bytes: int = REMEMBERED_BYTES) -> None:
        self._max_ids = max_ids
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._pending: dict[str, list[Waiter]] = {}
        self._done: OrderedDict[str, bytes | None] = OrderedDict()
        self._with_bytes: OrderedDict[str, int] = OrderedDict()
        self._bytes = 0

    def begin(self, call_id: str, waiter: Waiter, lost: bytes) -> bool:
        """Say whether the call is new and must run now.

        Args:
            call_id: The caller's id.
            waiter: Told the outcome, once: later, or at once when it is known.
            lost: What the waiter is told when the call ran but its outcome was dropped.
        """
        with self._lock:
            if call_id in self._pending:
                self._pending[call_id].append(waiter)
                return False
            if call_id not in self._done:
                self._pending[call_id] = [waiter]
                return True
            outcome = self._done[call_id]
        waiter(lost if outcome is None else outcome)
        return False

    def finish(self, call_id: str, outcome: bytes) -> bool:
        """Record the outcome and tell every waiter.

        Returns:
            False when the call already had an outcome: the first one stays.
        """
        with self._lock:
            waiters = self._pending.pop(call_id, None)
            if waiters is None:
                return False
            self._done[call_id] = outcome
            self._with_bytes[call_id] = len(outcome)
            self._bytes += len(outcome)
            # The newest outcome is kept whatever its size: its caller may be about to repeat.
            while self._bytes > self._max_bytes and len(self._with_bytes) > 1:
                oldest, size = self._with_bytes.popitem(last=False)
                self._done[oldest] = None
                self._bytes -= size
            while len(self._done) > self._max_ids:
                oldest, _ = self._done.popitem(last=False)
                self._bytes -= self._with_bytes.pop(oldest, 0)
        for waiter in waiters:
            waiter(outcome)
        return True

    @property
    def pending(self) -> int:
        """How many calls are under way."""
        return len(self._pending)
