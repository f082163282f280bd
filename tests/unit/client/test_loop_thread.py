"""Tests of the event loop in a background thread, and of results that do not reach the caller."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from aenv_ray.actors.calls.handle import EnvHandle
from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.client.loop_thread import LoopThread
from aenv_ray.client.vector import Ready, StepOutcome, VectorEnvironment
from aenv_ray.errors import ConfigError
from aenv_ray.models import ToolResult


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread("aenv-test")
    yield made
    made.close()


async def _cancelled_when_ready(waiting: asyncio.Task[Any], ready: threading.Event) -> None:
    """Cancel a wait after its result was ready, before this loop has heard of it."""
    await asyncio.sleep(0)
    assert ready.wait(10)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_a_result_that_a_cancelled_caller_does_not_get_is_given_back(loop: LoopThread) -> None:
    ready, given = threading.Event(), list[str]()

    async def result() -> str:
        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, ready.set)
        return "result"

    async def give_back(value: str) -> None:
        given.append(value)

    async def main() -> None:
        await _cancelled_when_ready(asyncio.create_task(loop.run(result(), give_back)), ready)

    asyncio.run(main())
    loop.wait(asyncio.sleep(0))
    assert given == ["result"]


def test_a_result_that_arrives_is_not_given_back(loop: LoopThread) -> None:
    given = list[str]()

    async def result() -> str:
        return "result"

    async def give_back(value: str) -> None:
        given.append(value)

    async def main() -> str:
        return await loop.run(result(), give_back)

    assert asyncio.run(main()) == "result"
    assert loop.wait(result(), give_back) == "result"
    loop.wait(asyncio.sleep(0))
    assert not given


def test_a_call_that_is_cancelled_before_its_result_gives_nothing_back(loop: LoopThread) -> None:
    began, given = threading.Event(), list[str]()

    async def never() -> str:
        began.set()
        await asyncio.sleep(3600)
        return "result"

    async def give_back(value: str) -> None:
        given.append(value)

    async def main() -> None:
        await _cancelled_when_ready(asyncio.create_task(loop.run(never(), give_back)), began)

    asyncio.run(main())
    loop.wait(asyncio.sleep(0))
    assert not given


class _SlowToEnd:
    """An instance whose first call waits for its cancellation; calls take a while to end."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.calls: list[str] = []

    async def call_tool(self, tool: str, arguments: object, timeout_s: float) -> ToolResult:
        self.calls.append(f"{tool} begins")
        try:
            if not self.began.is_set():
                self.began.set()
                await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.05)
            self.calls.append(f"{tool} ends")
        return ToolResult(content=[], is_error=False)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_step_of_a_vector_waits_for_the_calls_of_a_cancelled_one(is_async: bool) -> None:
    """Its caller has nothing else to wait for them."""
    vector, instance = VectorEnvironment(()), _SlowToEnd()
    vector.handles, vector._calls = (cast("EnvHandle", None),), [cast("AsyncEnvHandle", instance)]

    async def main() -> list[StepOutcome]:
        first = asyncio.create_task(vector.step_async("first", [None]))
        await asyncio.to_thread(instance.began.wait, 10)
        with pytest.raises(ConfigError, match=r"calls to the instances \[0\] are under way"):
            vector.step("other", [None])
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        if is_async:
            return await vector.step_async("second", [None])
        return vector.step("second", [None])

    (outcome,) = asyncio.run(main())
    vector._loop.close()
    assert isinstance(outcome, ToolResult)
    assert instance.calls == ["first begins", "first ends", "second begins", "second ends"]


def test_outcomes_of_a_vector_that_a_cancelled_recv_had_taken_are_received_next() -> None:
    vector = VectorEnvironment(())
    ready = threading.Event()
    outcome = ToolResult(content=[], is_error=False)

    async def finished() -> ToolResult:
        return outcome

    async def under_way() -> None:
        vector._pending[asyncio.create_task(finished())] = 3
        asyncio.get_running_loop().call_later(0.05, ready.set)

    async def main() -> None:
        vector._loop.wait(under_way())
        await _cancelled_when_ready(asyncio.create_task(vector.recv_async()), ready)
        assert await vector.recv_async() == [Ready(3, outcome)]

    asyncio.run(main())
    vector._loop.close()
