"""The asyncio tasks that tools have started, which may run on after their calls."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

from aenv_ray.runtime.door.calls import RunningCall, call_of
from aenv_ray.runtime.door.reset.call_gate import CallGate

if TYPE_CHECKING:
    import asyncio

_GRACE_S: Final = 0.5
"""How much longer than on the loop to wait for it: a tool may block it."""


class AgentTasks:
    """The tasks on one event loop that were started by calls of agents, or by such tasks.

    A task inherits the context of the code that starts it, and with it the call. So those that the
    environment starts when it is imported, or in a function, are not among them. Neither are the
    tasks of the calls themselves.

    Timers and servers that a tool has left on the loop inherit the call as well. No task that they
    start runs while a reward does, or in a later episode, unless they call `asyncio.Task` itself,
    as aiohttp does on Python 3.12 and 3.13: those are only found when the others are ended, and not
    at all on Python 3.11, where the context of a task is not public.

    Args:
        gate: Says which calls are late.
    """

    def __init__(self, gate: CallGate) -> None:
        self._gate = gate
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._without_call: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        """Tasks that no call has started. Those of the calls themselves set their call later."""
        self._ended_before = 0
        """Tasks of calls from before this generation of the gate were ended."""
        self._over_before = 0
        """Calls from before this generation belong to an episode that is over."""
        self._is_ending = False

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Note the tasks of a loop that does not run yet."""
        import asyncio  # imported here, to keep sandboxes without async code small

        def create(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
            call = call_of(options.get("context"))
            is_refused = call is not None and self._is_late(call, asyncio.current_task(loop))
            if is_refused:
                options.pop("eager_start", None)
            task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **options)
            if is_refused:
                task.cancel()  # before its first step: none of its code runs
            elif call is None:
                self._without_call.add(task)
            elif call.generation is not None:
                self._tasks.add(task)
            return task

        loop.set_task_factory(create)
        self._loop = loop

    def _is_late(self, call: RunningCall, by: asyncio.Task[Any] | None) -> bool:
        """Whether no task of a call may start now, except by a task that is being ended.

        Args:
            call: The call.
            by: The task that starts it. None: a timer or a server does.
        """
        generation = call.generation
        if generation is None or generation >= self._ended_before:
            return False
        if self._is_ending and by in self._tasks:
            return False
        return generation < self._over_before or self._gate.is_held

    def end(self, within_s: float) -> bool:
        """Cancel the tasks, and wait until they have ended; return whether there were any.

        Call it in another thread than that of the loop, while the gate is closed to the agent.
        Tasks may be left after this time.
        """
        had_tasks, _ = self._end_all(within_s)
        return had_tasks

    def end_episode(self, within_s: float) -> int:
        """As `end`, and let no task of these calls start later; return how many did not end."""
        self._over_before = self._gate.generation
        _, left = self._end_all(within_s)
        return left

    def _end_all(self, within_s: float) -> tuple[bool, int]:
        # First: a task that starts after this is refused, one from before is among the tasks. The
        # loop may be about to add one, so only the loop knows whether there are any.
        self._ended_before = self._gate.generation
        if self._loop is None or self._loop.is_closed():
            return False, 0
        import asyncio

        ending = asyncio.run_coroutine_threadsafe(self._end(self._loop, within_s), self._loop)
        try:
            return ending.result(within_s + _GRACE_S)
        except TimeoutError:  # a tool blocks the loop
            ending.cancel()
            return True, max(1, len(self._tasks))

    async def _end(self, loop: asyncio.AbstractEventLoop, within_s: float) -> tuple[bool, int]:
        import asyncio

        ends_at = loop.time() + within_s
        had_tasks, self._is_ending = False, True
        try:
            # A task may start others when it is cancelled.
            while left := self._running(loop):
                had_tasks = True
                for task in left:
                    task.cancel()
                await asyncio.wait(left, timeout=max(0.0, ends_at - loop.time()))
                if loop.time() >= ends_at:
                    still = self._running(loop)
                    for task in still - left:  # started meanwhile, and not cancelled yet
                        task.cancel()
                    return True, len(still)
            return had_tasks, 0
        finally:
            self._is_ending = False

    def _running(self, loop: asyncio.AbstractEventLoop) -> set[asyncio.Task[Any]]:
        """Return the tasks that have not ended."""
        import asyncio

        for task in asyncio.all_tasks(loop):
            if task not in self._without_call and _is_of_agent(task):
                self._tasks.add(task)  # it may be unknown: `asyncio.Task` does not call `create`
        return {task for task in self._tasks if not task.done()}


def _is_of_agent(task: asyncio.Task[Any]) -> bool:
    """Whether the context of a task has a call of an agent; False where it cannot be known."""
    get_context = getattr(task, "get_context", None)  # from Python 3.12 on
    call = None if get_context is None else call_of(get_context())
    return call is not None and call.generation is not None
