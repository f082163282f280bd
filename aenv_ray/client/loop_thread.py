"""An event loop in a background thread, for code that blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Final, TypeVar

T = TypeVar("T")

_JOIN_S: Final = 5.0


class LoopThread:
    """Runs coroutines for other threads until it is closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """Whether `close` has ended the loop."""
        return self._loop.is_closed()

    def submit(self, awaitable: Awaitable[T]) -> Future[T]:
        """Start an awaitable on the loop; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(_result(awaitable), self._loop)

    def wait(self, awaitable: Awaitable[T]) -> T:
        """Return the result of an awaitable; blocks. Ctrl-C in the caller's thread cancels it."""
        future = self.submit(awaitable)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what still runs, and end the loop and the thread."""
        self.wait(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_JOIN_S)


async def _result(awaitable: Awaitable[T]) -> T:
    return await awaitable
