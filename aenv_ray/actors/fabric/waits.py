"""How the create protocol waits: in an event loop, or by blocking a driver's thread.

The protocol is written once, as coroutines that wait only through a `Waits`. With `BlockingWaits`
the coroutines block instead of suspending, so `run_blocking` can run them without an event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.background_tasks import wait_for_end

if TYPE_CHECKING:
    from ray import ObjectRef

logger = logging.getLogger("aenv_ray")

NOTICE_AFTER_S: Final = 5.0
"""A create that waits for longer than this is logged."""
NOTICE_EVERY_S: Final = 60.0
"""Minimum time between two such log lines, for all creates together."""
_THREADS: Final = 8

T = TypeVar("T")
OnWait = Callable[[float], None]
"""Called every `NOTICE_AFTER_S` with the seconds waited so far."""


class Waits(ABC):
    """What the create protocol needs in order to wait."""

    @abstractmethod
    async def result(
        self, reference: ObjectRef[T], what: str, deadline_s: float, on_wait: OnWait | None = None
    ) -> T:
        """Return the value of a Ray reference.

        Args:
            reference: From a ``.remote(...)`` call.
            what: Names the wait in errors.
            deadline_s: Longest wait.
            on_wait: Called at intervals during a long wait; an implementation may ignore it.

        Raises:
            FabricUnavailable: The actor is gone, or `deadline_s` passed.
            AenvError: What the actor raised.
        """

    @abstractmethod
    async def run(self, function: Callable[[], T], *, is_cleanup: bool = False) -> T:
        """Return the result of a function that blocks.

        If the caller is cancelled, `CancelledError` is raised once the function has ended: what it
        acquires can then be given up. One that has not begun does not run.

        Args:
            function: Called once.
            is_cleanup: It runs even if the caller is cancelled before it has begun.
        """

    @abstractmethod
    def lock(self) -> AbstractAsyncContextManager[Any]:
        """Return a lock that may be held while waiting."""


class AsyncWaits(Waits):
    """Awaits in one event loop; functions that block run in a few threads."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="aenv-create")

    async def result(  # noqa: D102
        self, reference: ObjectRef[T], what: str, deadline_s: float, on_wait: OnWait | None = None
    ) -> T:
        return await ray_api.wait_async(reference, what, deadline_s)

    async def run(self, function: Callable[[], T], *, is_cleanup: bool = False) -> T:  # noqa: D102
        running = self._threads.submit(function)
        answer = asyncio.wrap_future(running)
        try:
            await asyncio.wait([answer])
        except asyncio.CancelledError:
            if is_cleanup or not running.cancel():
                await wait_for_end(answer)
            raise
        return answer.result()

    def lock(self) -> AbstractAsyncContextManager[Any]:  # noqa: D102
        return asyncio.Lock()


class BlockingWaits(Waits):
    """Blocks the calling thread; for `run_blocking`.

    `wait` is called like `Waits.result`, and returns the value.
    """

    def __init__(self, wait: Callable[[Any, str, float, OnWait | None], Any]) -> None:
        self._wait = wait

    async def result(  # noqa: D102
        self, reference: ObjectRef[T], what: str, deadline_s: float, on_wait: OnWait | None = None
    ) -> T:
        value: T = self._wait(reference, what, deadline_s, on_wait)
        return value

    async def run(self, function: Callable[[], T], *, is_cleanup: bool = False) -> T:  # noqa: D102
        del is_cleanup
        return function()

    def lock(self) -> AbstractAsyncContextManager[Any]:  # noqa: D102
        return _ThreadLock()


class _ThreadLock(AbstractAsyncContextManager[None]):
    """A `threading.Lock` for ``async with``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    async def __aenter__(self) -> None:
        self._lock.acquire()

    async def __aexit__(self, *exc: object) -> None:
        self._lock.release()


class WaitNotices:
    """Logs that creates take long: one line for all of them, at most every `NOTICE_EVERY_S`.

    Any thread may use it.

    Args:
        is_silent: Returns whether another line says, or is about to say, why all creates wait.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        is_silent: Callable[[], bool] = lambda: False,
    ) -> None:
        self._clock = clock
        self._is_silent = is_silent
        self._lock = threading.Lock()
        self._since: dict[object, float] = {}
        self._next_at = float("-inf")

    @contextmanager
    def waiting(self, reason: Callable[[], str]) -> Iterator[OnWait]:
        """Count a create while the block runs; yield the callback for its wait.

        `reason` returns what the create waits for; it is called only if a line is logged.
        """
        key = object()
        with self._lock:
            self._since[key] = self._clock()
        try:
            yield lambda _: self._tell(reason)
        finally:
            with self._lock:
                del self._since[key]

    def _tell(self, reason: Callable[[], str]) -> None:
        with self._lock:
            now = self._clock()
            if now < self._next_at or self._is_silent():
                return
            self._next_at = now + NOTICE_EVERY_S
            count, longest_s = len(self._since), now - min(self._since.values())
        creates = "1 create has waited" if count == 1 else f"{count} creates wait, the longest"
        logger.warning("%s for %.0f s: %s", creates, longest_s, reason())
