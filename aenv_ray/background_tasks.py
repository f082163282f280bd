"""Tasks that run in the background, or on when their caller is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from aenv_ray.errors import AenvError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_AGAIN_S: Final = 5.0
"""Time for a cancelled task to clean up before it is cancelled again."""


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancel a task and return once it has ended.

    The cancellation is repeated, since Python 3.11 can lose one in `asyncio.wait_for`, which
    redis-py uses, if the awaited operation completes at the same moment (python/cpython#86296).
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_AGAIN_S)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s failed before it was cancelled", task.get_name(), exc_info=error)


def start_shared(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task that works for several callers, in the context of none of them.

    Ray cancels what a cancelled task has started, and finds it by context variables. In the context
    of its first caller, the work for the others would end with that caller.
    """
    return asyncio.get_running_loop().create_task(work, context=contextvars.Context())


async def shielded(request: Coroutine[Any, Any, T]) -> T:
    """Run a create request to its end and return its result.

    If the caller is cancelled, wait for the answer first, then raise `CancelledError`: otherwise
    the server could create the object after the caller's cleanup has deleted it.
    """
    task = asyncio.create_task(request)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await wait_for_end(task)
        raise


async def wait_for_end(future: asyncio.Future[Any]) -> None:
    """Wait for the end of what a cancelled caller has started, however often it is cancelled."""
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):  # the caller raises the first one
            await asyncio.wait([future])
    if not future.cancelled():
        future.exception()  # retrieved, so that asyncio does not log it: the caller is gone


class Tasks:
    """Tasks that run to their end, whether or not anyone waits for them; failures are logged.

    The event loop alone does not keep a task from being garbage-collected.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        """Return how many tasks run."""
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine in a task, which a caller may await through `asyncio.shield`."""
        task = asyncio.get_running_loop().create_task(
            work, name=getattr(work, "__qualname__", None)
        )
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, AenvError):  # says by itself what happened
            logger.warning("%s failed: %s", task.get_name(), error)
        else:
            logger.error("%s failed", task.get_name(), exc_info=error)

    async def settle(self, timeout_s: float) -> None:
        """Wait for the tasks for a limited time, and cancel those that still run."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
            for task in late:
                task.cancel()

    async def aclose(self) -> None:
        """Cancel the tasks and return once they have ended."""
        for task in list(self._tasks):
            await end_task(task)
