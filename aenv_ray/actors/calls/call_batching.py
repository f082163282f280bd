"""Calls that come to a host many at a time, and whose results leave it as they are there.

A task of a Ray actor costs more than a tool call does. A caller with many calls under way brings
those that it has in one task, which returns as soon as one of them has ended, with all that have.
What is left it follows by later tasks, each together with its newest calls; so a slow call holds up
no other. All state of a call is here, at its host, under a key that its caller chose.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import pydantic_core

from aenv_ray.actors.calls.wire import WireResult
from aenv_ray.errors import AenvError, CallCancelled, InternalError, from_wire, to_wire

logger = logging.getLogger(__name__)

Begin = list[Any]
"""``[key, name, message]`` of a call: by `name`, unless it is empty, anybody may stop it."""
Answer = list[Any]
"""``[key, kind, JSON text]``, of one of the three kinds below."""
RESULT: Final = 0
ERROR: Final = 1
UNKNOWN: Final = 2
"""No such call is here, as after a restart of the host: its message must be sent again. The call's
own id keeps it from running twice."""
Run = Callable[[bytes], Coroutine[Any, Any, WireResult]]

UNCLAIMED_S: Final = 60.0
"""How long an outcome waits for a caller that may come back; then it is dropped."""
ANSWER_BYTES: Final = 4 * 1024 * 1024
"""What one task returns, beyond its first answer; further ones go with the next."""
_LINGER_S: Final = 0.0002
"""For each call that still runs when one has ended, since others mostly end with it…"""
_MOST_LINGERED: Final = 10
"""…of so many."""


class CarriedCalls:
    """The calls of one host that somebody brought in a batch."""

    def __init__(self) -> None:
        self._calls: dict[str, _Carried] = {}

    async def exchange(
        self, begin: Sequence[Begin], follow: Sequence[str], run: Run
    ) -> list[Answer]:
        """Begin calls; wait until one of these, or of those followed, has its outcome.

        Args:
            begin: New calls; one whose key is known goes on.
            follow: Keys of calls that earlier tasks began.
            run: Runs a call, given its message.

        Returns:
            The outcomes that are there, at least one, each of them once; and which keys of
            `follow` are unknown.

        Cancelling stops no call.
        """
        unknown: list[Answer] = [[key, UNKNOWN, b""] for key in follow if key not in self._calls]
        calls = [self._calls[key] for key in follow if key in self._calls]
        calls += [self._begun(key, name, message, run) for key, name, message in begin]
        if unknown or not calls:
            return unknown
        news = asyncio.Event()
        for call in calls:
            call.follow(news)
        try:
            await news.wait()
            running = sum(not call.task.done() for call in calls)
            if running:
                await asyncio.sleep(min(running, _MOST_LINGERED) * _LINGER_S)
            return self._taken(calls)
        finally:
            for call in calls:
                if self._calls.get(call.key) is call:
                    call.unfollow(news)

    def drop(self, keys: Sequence[str]) -> None:
        """Stop calls whose callers went away; unknown keys do nothing."""
        for key in keys:
            if key in self._calls:
                self._calls[key].task.cancel()

    def cancel(self, name: str) -> bool:
        """Stop the calls of a name; False when none runs."""
        named = [c for c in self._calls.values() if c.name == name and not c.task.done()]
        for call in named:
            call.task.cancel()
        return bool(named)

    def _begun(self, key: str, name: str, message: bytes, run: Run) -> _Carried:
        call = self._calls.get(key)
        if call is None:
            task = asyncio.get_running_loop().create_task(run(message))
            call = self._calls[key] = _Carried(key, name, task, self._forget)
        return call

    def _taken(self, calls: Sequence[_Carried]) -> list[Answer]:
        answers: list[Answer] = []
        size = 0
        for call in calls:
            if call.task.done() and self._calls.get(call.key) is call:
                answer = call.answer()
                size += len(answer[2])
                if answers and size > ANSWER_BYTES:
                    break
                answers.append(answer)
                del self._calls[call.key]
        return answers

    def _forget(self, call: _Carried) -> None:
        if call.news is None and self._calls.get(call.key) is call:
            del self._calls[call.key]


class _Carried:
    """One call that runs, or has ended and was not told to its caller."""

    def __init__(
        self,
        key: str,
        name: str,
        task: asyncio.Task[WireResult],
        forget: Callable[[_Carried], None],
    ) -> None:
        self.key = key
        self.name = name
        self.task = task
        self.news: asyncio.Event | None = None
        """Of whoever follows it; None: nobody does."""
        self._forget = forget
        task.add_done_callback(self._end)

    def follow(self, news: asyncio.Event) -> None:
        if self.news is not None:
            self.news.set()  # whoever follows it now was sent again by Ray, and waits no more
        self.news = news
        if self.task.done():
            news.set()

    def unfollow(self, news: asyncio.Event) -> None:
        if self.news is news:
            self.news = None
            if self.task.done():
                self._await_caller()

    def _end(self, task: asyncio.Task[WireResult]) -> None:
        if not task.cancelled():
            task.exception()  # nobody may ever ask for it
        if self.news is None:
            self._await_caller()
        else:
            self.news.set()

    def _await_caller(self) -> None:
        asyncio.get_running_loop().call_later(UNCLAIMED_S, self._forget, self)

    def answer(self) -> Answer:
        """Return the outcome as it travels."""
        if self.task.cancelled():
            error: BaseException | None = CallCancelled(
                "the caller cancelled the call", hint="its tool was told to stop"
            )
        else:
            error = self.task.exception()
        if error is None:
            return [self.key, RESULT, self.task.result().json]
        if not isinstance(error, AenvError):
            logger.error("a call failed in its host", exc_info=error)
            error = InternalError(f"the host failed: {type(error).__name__}: {error}")
        return [self.key, ERROR, pydantic_core.to_json(to_wire(error), fallback=str)]


def outcome_of(kind: int, text: bytes) -> bytes | AenvError:
    """Return an outcome as its caller has it: a result's JSON text, or an error."""
    return text if kind == RESULT else from_wire(pydantic_core.from_json(text))
