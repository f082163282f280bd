"""The asyncio tasks that tools have started, which may run on after their calls."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from aenv_ray.runtime.door.calls import call_of

if TYPE_CHECKING:
    import asyncio


class AgentTasks:
    """The tasks on one event loop that were started by calls of agents, or by such tasks.

    A task inherits the context of the code that starts it, and with it the call. So those that the
    environment starts when it is imported, or in a function, are not among them. Neither are the
    tasks of the calls themselves.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Note the tasks of a loop that does not run yet."""
        import asyncio  # imported here, to keep sandboxes without async code small

        def create(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
            task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **options)
            call = call_of(options.get("context"))
            if call is not None and call.generation is not None:
                self._tasks.add(task)
            return task

        loop.set_task_factory(create)
        self._loop = loop

    def end(self, within_s: float) -> bool:
        """Cancel the tasks, and wait until they have ended; return whether there were any.

        Call it in another thread than that of the loop. Tasks may be left after this time.
        """
        if self._loop is None or all(task.done() for task in self._tasks):
            return False
        import asyncio

        ending = asyncio.run_coroutine_threadsafe(self._end(self._loop, within_s), self._loop)
        try:
            ending.result(within_s)
        except TimeoutError:  # a tool blocks the loop, or a task does not end
            ending.cancel()
        return True

    async def _end(self, loop: asyncio.AbstractEventLoop, within_s: float) -> None:
        import asyncio

        ends_at = loop.time() + within_s
        # A task may start others when it is cancelled.
        while left := [task for task in self._tasks if not task.done()]:
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=max(0.0, ends_at - loop.time()))
            if loop.time() >= ends_at:
                return
