"""Brings a replica's calls to one host in batches, and hands their results out one by one.

The other half of `aenv_ray.actors.calls.call_batching`.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aenv_ray.actors.calls.call_batching import UNKNOWN, Answer, Begin, outcome_of
from aenv_ray.errors import AenvError, CallCancelled

Exchange = Callable[[list[Begin], list[str]], Awaitable[list[Answer]]]

_MOST_CALLS: Final = 64
"""In one task: what one of many slow calls costs when another one ends is bounded by it."""
_MOST_BYTES: Final = 4 * 1024 * 1024
"""Of messages in one task; a larger one goes alone."""
_GAP_S: Final = 0.0002
"""Between two tasks, for each call that waits: so batches are the larger the more there is…"""
_MOST_GAPS: Final = 16
"""…to do, up to this number, and a call that is alone never waits."""


@dataclass(eq=False)
class Carried:
    """A call on its way."""

    key: str
    name: str
    message: bytes
    result: asyncio.Future[bytes]
    """JSON text. Raises AenvError, or what Ray raises when the host is gone."""

    def begin(self) -> Begin:
        """Return it as it travels."""
        return [self.key, self.name, self.message]


class Carrier:
    """The calls of this process to one host. Use it on one event loop.

    Args:
        exchange: Of the host.
        drop: Of the host.

    A host that is restarted is told again what it does not know; every call has an id, so that
    none runs twice.
    """

    def __init__(self, exchange: Exchange, drop: Callable[[list[str]], Any]) -> None:
        self._exchange = exchange
        self._drop = drop
        self._loop = asyncio.get_running_loop()
        self._prefix = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self._calls: dict[str, Carried] = {}
        self._fresh: list[Carried] = []
        self._left: list[str] = []
        self._dropped: list[str] = []
        self._sent_at = 0.0
        self._is_due = False
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, message: bytes, name: str = "") -> Carried:
        """Send a call.

        Args:
            message: See `aenv_ray.actors.calls.wire.CallMessage`.
            name: By which anybody may stop it; empty: nobody can.
        """
        key = f"{self._prefix}-{next(self._numbers)}"
        call = Carried(key, name, message, self._loop.create_future())
        self._calls[key] = call
        self._fresh.append(call)
        self._be_due()
        return call

    def drop(self, call: Carried) -> None:
        """Stop a call: nobody waits for it any more."""
        if self._calls.pop(call.key, None) is None:
            return
        if not call.result.done():
            call.result.set_exception(CallCancelled("the caller went away"))
            call.result.exception()  # most who go away do not look
        if call in self._fresh:
            self._fresh.remove(call)
        else:
            self._dropped.append(call.key)
            self._be_due()

    def forget(self, call: Carried) -> None:
        """Take no further notice of a call; it goes on, if it was not dropped."""
        self._calls.pop(call.key, None)

    def _be_due(self) -> None:
        if not self._is_due:
            self._is_due = True
            gap_s = min(len(self._calls) - 1, _MOST_GAPS) * _GAP_S
            at = self._sent_at + gap_s
            if at <= self._loop.time():
                self._loop.call_soon(self._flush)
            else:
                self._loop.call_at(at, self._flush)

    def _flush(self) -> None:
        self._is_due = False
        self._sent_at = self._loop.time()
        if self._dropped:
            keys, self._dropped = self._dropped, []
            self._drop(keys)
        left = [key for key in self._left if key in self._calls]
        fresh, self._left, self._fresh = self._fresh, [], []
        while fresh or left:
            count = _few(fresh)
            begin, fresh = fresh[:count], fresh[count:]
            follow, left = left[: _MOST_CALLS - count], left[_MOST_CALLS - count :]
            task = self._loop.create_task(self._one(begin, follow))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _one(self, begin: Sequence[Carried], follow: Sequence[str]) -> None:
        keys = [*follow, *(call.key for call in begin)]
        try:
            answers = await self._exchange([call.begin() for call in begin], list(follow))
        except Exception as exc:  # noqa: BLE001  # of Ray: each caller gets it, and judges
            for key in keys:
                self._fail(key, exc)
            return
        unknown = {key for key, kind, _ in answers if kind == UNKNOWN}
        for key, kind, text in answers:
            if key not in unknown:
                self._take(key, kind, text)
        for key in keys:
            if key in unknown and key in self._calls:
                self._fresh.append(self._calls[key])
            elif key in self._calls:
                self._left.append(key)
        if self._left or self._fresh:
            self._be_due()

    def _take(self, key: str, kind: int, text: bytes) -> None:
        outcome = outcome_of(kind, text)
        if isinstance(outcome, AenvError):
            self._fail(key, outcome)
            return
        call = self._calls.pop(key, None)
        if call is not None and not call.result.done():
            call.result.set_result(outcome)

    def _fail(self, key: str, error: Exception) -> None:
        call = self._calls.pop(key, None)
        if call is not None and not call.result.done():
            call.result.set_exception(error)


def _few(fresh: Sequence[Carried]) -> int:
    """Return how many of the calls go with one task."""
    size = 0
    for count, call in enumerate(fresh[:_MOST_CALLS]):
        size += len(call.message)
        if count and size > _MOST_BYTES:
            return count
    return min(len(fresh), _MOST_CALLS)
