"""Calls whose callers ask for news while they run, and may stop them by a name from elsewhere.

A caller that shows progress asks again and again with the same token, and gets the reports since it
last asked, at the end the result. All state of a call is here, at its host: whoever asks next, or
cancels, may be another process than the one that began it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from aenv_ray.actors.calls.wire import WireResult
from aenv_ray.engines.base import OnProgress
from aenv_ray.errors import CallCancelled

Report = tuple[float, float | None, str | None]
Reports = list[Report]
Begin = Callable[[OnProgress], Coroutine[Any, Any, WireResult]]

BACKLOG: Final = 1000
"""Reports that wait for a slow caller; the oldest go first, as later ones replace them."""
UNCLAIMED_S: Final = 60.0
"""How long a result waits for a caller that may come back; then it is dropped."""


class FollowedCalls:
    """The calls of one host that somebody follows."""

    def __init__(self) -> None:
        self._running: dict[str, _Followed] = {}

    async def next(self, token: str, name: str, begin: Begin) -> bytes | Reports:
        """Wait for news of a call, beginning it when nobody has.

        Args:
            token: The caller's, unique: the same one goes on with the same call.
            name: By which `cancel` stops it; empty: it cannot.
            begin: Makes the call, told where reports go. After a restart of the host it is made
                anew; the call's own id keeps it from running twice.

        Returns:
            Reports since the last time, at least one, or the result's JSON text, once.

        Raises:
            AenvError: As the call.
            CallCancelled: `cancel` stopped it.

        Cancelling stops the call.
        """
        call = self._running.get(token)
        if call is None:
            call = self._running[token] = _Followed(name, begin)
            call.task.add_done_callback(lambda _: self._expire(token))
        try:
            await call.news.wait()
        except asyncio.CancelledError:
            call.task.cancel()
            raise
        if call.reports:
            return call.take()
        self._running.pop(token, None)
        return call.result()

    def cancel(self, name: str) -> bool:
        """Stop the calls of a name; False when none runs."""
        named = [c for c in self._running.values() if c.name == name and not c.task.done()]
        for call in named:
            call.task.cancel()
        return bool(named)

    def _expire(self, token: str) -> None:
        asyncio.get_running_loop().call_later(UNCLAIMED_S, self._running.pop, token, None)


class _Followed:
    """One call that runs."""

    def __init__(self, name: str, begin: Begin) -> None:
        self.name = name
        self.reports: Reports = []
        self.news = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(begin(self._report))
        self.task.add_done_callback(self._end)

    def _report(self, progress: float, total: float | None, message: str | None) -> None:
        self.reports.append((progress, total, message))
        if len(self.reports) > BACKLOG:
            del self.reports[0]
        self.news.set()

    def _end(self, task: asyncio.Task[WireResult]) -> None:
        if not task.cancelled():
            task.exception()  # somebody may never ask for it
        self.news.set()

    def take(self) -> Reports:
        """Return the reports that nobody has had."""
        taken, self.reports = self.reports, []
        if not self.task.done():
            self.news.clear()
        return taken

    def result(self) -> bytes:
        """Return the result's JSON text.

        Raises:
            AenvError: As the call.
            CallCancelled: It was stopped.
        """
        if self.task.cancelled():
            raise CallCancelled("the caller cancelled the call", hint="its tool was told to stop")
        return self.task.result().json
