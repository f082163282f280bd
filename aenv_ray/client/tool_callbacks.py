"""What a program offers to the tools that it calls: a log, and answers of user and model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from aenv_ray.actors.calls.handle import Offer
from aenv_ray.blocking import awaited
from aenv_ray.models import LogMessage, Question
from aenv_ray.runtime.door.caller_link import ELICIT

OnLog = Callable[[LogMessage], Awaitable[None] | None]
"""Takes a message of a tool."""
OnElicit = Callable[
    [str, Mapping[str, Any]], Awaitable[Mapping[str, Any] | None] | Mapping[str, Any] | None
]
"""Takes a question to the user, and the JSON Schema of the answer. Returns the answer, or None if
the user declines."""
OnSample = Callable[[Mapping[str, Any]], Awaitable[str] | str]
"""Takes the parameters of MCP's ``sampling/createMessage``. Returns the text of the model."""


@dataclass(frozen=True)
class ToolCallbacks:
    """Callbacks for tools; they may be async. None: this is not offered."""

    on_log: OnLog | None = None
    on_elicit: OnElicit | None = None
    on_sample: OnSample | None = None

    @property
    def offers(self) -> list[Offer]:
        """What is offered, as in `EnvHandle.stream_tool`."""
        given: dict[Offer, Any] = {
            "logging": self.on_log, "elicitation": self.on_elicit, "sampling": self.on_sample
        }  # fmt: skip
        return [offer for offer, callback in given.items() if callback is not None]

    @property
    def capabilities(self) -> dict[str, Any]:
        """What is offered, as capabilities of an MCP client."""
        return {offer: {} for offer in self.offers if offer != "logging"}

    async def log(self, message: LogMessage) -> None:
        """Pass on a message."""
        if self.on_log is not None:
            await awaited(self.on_log(message))

    async def result(self, question: Question) -> dict[str, Any] | None:
        """Return the result of a question in MCP's form; None if nobody can answer it."""
        params = question.params
        if question.method == ELICIT:
            if self.on_elicit is None:
                return None
            schema = params.get("requestedSchema") or {}
            answer = await awaited(self.on_elicit(str(params.get("message", "")), schema))
            if answer is None:
                return {"action": "decline"}
            return {"action": "accept", "content": dict(answer)}
        if self.on_sample is None:
            return None
        text = await awaited(self.on_sample(params))
        content = {"type": "text", "text": text}
        return {"role": "assistant", "content": content, "model": "caller"}


class Answering:
    """Answers the questions of one call while it runs; leave it once the call has its result.

    Args:
        callbacks: Answer them.
        send: Sends the result of a question; None refuses it.

    Raises:
        Exception: From a callback; the block is cancelled, and with it the call.
    """

    def __init__(
        self,
        callbacks: ToolCallbacks,
        send: Callable[[Question, dict[str, Any] | None], Awaitable[Any]],
    ) -> None:
        self._callbacks = callbacks
        self._send = send
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()

    async def take(self, message: LogMessage | Question) -> None:
        """Pass on a log message, or begin to answer a question."""
        if isinstance(message, LogMessage):
            await self._callbacks.log(message)
            return
        task = self._group.create_task(self._answer(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, question: Question) -> None:
        await self._send(question, await self._callbacks.result(question))

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        for task in self._tasks:  # the tool does not wait any more
            task.cancel()
        try:
            await self._group.__aexit__(*exc)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
