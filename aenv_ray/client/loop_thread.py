"""Blocking forms of async classes, and an event loop in a background thread for them."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
AsyncT = TypeVar("AsyncT")
AsyncT_co = TypeVar("AsyncT_co", covariant=True)

logger = logging.getLogger("aenv_ray")

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

    def wait(
        self, awaitable: Awaitable[T], give_back: Callable[[T], Awaitable[None]] | None = None
    ) -> T:
        """Return the result of an awaitable; blocks. Ctrl-C in the caller's thread cancels it.

        Args:
            awaitable: Runs on the loop.
            give_back: Called on the loop with a result that Ctrl-C keeps from the caller.
        """
        kept: list[T] = []
        try:
            return _waited(self.submit(_kept(awaitable, kept)))
        except BaseException:
            self._give_back(kept, give_back)
            raise

    async def run(
        self, awaitable: Awaitable[T], give_back: Callable[[T], Awaitable[None]] | None = None
    ) -> T:
        """Return the result of an awaitable; cancelling this cancels it.

        Args:
            awaitable: Runs on the loop.
            give_back: Called on the loop with a result that this, being cancelled, does not return:
                it was ready, and on its way to the caller's loop.
        """
        kept: list[T] = []
        try:
            return await asyncio.wrap_future(self.submit(_kept(awaitable, kept)))
        except BaseException:
            self._give_back(kept, give_back)
            raise

    def _give_back(self, kept: list[T], give_back: Callable[[T], Awaitable[None]] | None) -> None:
        """Call `give_back` after the awaitable, whose cancellation the loop was told of before."""
        if give_back is not None and not self.is_closed:
            self.submit(_each(kept, give_back))

    def close(self) -> None:
        """Cancel what still runs, and end the loop and the thread."""
        self.wait(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._loop.close()


class BlockingForm(Protocol[AsyncT_co]):
    """A class whose methods are those of an async class, by `blocking`."""

    def submit(self, call: Callable[[AsyncT_co], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start a call of the async object; cancelling the future cancels it."""


def blocking(
    method: Callable[Concatenate[AsyncT, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingForm[AsyncT], P], T]:
    """Return a method of a `BlockingForm` that calls a coroutine method of its async class."""

    @functools.wraps(method)
    def call(self: BlockingForm[AsyncT], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return _waited(self.submit(lambda one: method(one, *args, **kwargs)))

    return call


def _waited(future: Future[T]) -> T:
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_JOIN_S)


async def _kept(awaitable: Awaitable[T], kept: list[T]) -> T:
    kept.append(await awaitable)
    return kept[0]


async def _each(kept: list[T], give_back: Callable[[T], Awaitable[None]]) -> None:
    for result in kept:
        try:
            await give_back(result)
        except Exception:
            logger.exception("the result of a cancelled call could not be given back")


async def _result(awaitable: Awaitable[T]) -> T:
    return await awaitable
