"""What a tool sends to the client of its call, and asks it for, at the public door."""

from __future__ import annotations

import asyncio
import threading
import time
from asyncio import run_coroutine_threadsafe
from types import SimpleNamespace
from typing import Any

import pytest

from aenv_ray.runtime.door.calls import CallInterrupted, RunningCall, current_call
from aenv_ray.runtime.public.mcp import _Client


class Session:
    """A client that offers elicitation, and whose user does not answer."""

    client_capabilities = SimpleNamespace(elicitation={}, sampling=None)

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.dropped = asyncio.Event()

    async def send_request(self, *_: Any, **__: Any) -> None:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.dropped.set()


def client_of(session: Any, **more: Any) -> _Client:
    context: Any = SimpleNamespace(session=session, request_id="1", **more)
    return _Client(context)


async def test_a_tool_that_waits_for_the_user_is_stopped_with_its_call() -> None:
    """Invariant 11: the thread is free at once, and the question is withdrawn."""
    session = Session()
    client = client_of(session)
    schema = {"type": "object", "properties": {}}
    call = RunningCall("tools/call 1", "delete", time.monotonic() + 600.0, caller=client)

    def run() -> str:
        try:
            call.run_sync(lambda: current_call().elicit("Delete it?", schema), {})
        except CallInterrupted:
            return "interrupted"
        return "answered"

    running = asyncio.create_task(asyncio.to_thread(run))
    async with asyncio.timeout(30):
        await session.asked.wait()
        call.stop("cancelled")
        assert await running == "interrupted"
        await session.dropped.wait()


async def test_a_question_is_withdrawn_if_the_thread_is_interrupted_before_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant 11: an interrupt may come between the question and the wait for its answer."""
    session = Session()
    client = client_of(session)
    call = RunningCall("tools/call 1", "delete", time.monotonic() + 600.0, caller=client)
    loop = asyncio.get_running_loop()

    def interrupted(*arguments: Any) -> Any:
        asking = run_coroutine_threadsafe(*arguments)
        run_coroutine_threadsafe(session.asked.wait(), loop).result(30)
        stopping = threading.Thread(target=call.stop, args=("cancelled",))
        stopping.start()
        stopping.join()
        return asking

    def run() -> str:
        try:
            call.run_sync(lambda: current_call().elicit("Delete it?", {"type": "object"}), {})
        except CallInterrupted:
            return "interrupted"
        return "answered"

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    async with asyncio.timeout(30):
        assert await asyncio.to_thread(run) == "interrupted"
        await session.dropped.wait()


async def test_messages_after_the_end_of_a_call_are_dropped() -> None:
    """A thread that a tool leaves behind can neither fill a queue nor hold up the answer."""
    sent: list[str] = []

    async def log(message: str, *_: Any, **__: Any) -> None:
        sent.append(message)

    client = client_of(Session(), log=log)
    sending = asyncio.create_task(client.send())
    client.log("info", "during", None)
    client.end()
    client.log("info", "after", None)
    async with asyncio.timeout(30):
        await sending
    assert sent == ["during"]
