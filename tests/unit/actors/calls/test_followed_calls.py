"""Calls that their callers follow: progress in rounds, results once, cancelling by a name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aenv_ray.actors.calls.followed_calls import BACKLOG, FollowedCalls
from aenv_ray.actors.calls.wire import WireResult
from aenv_ray.errors import CallCancelled, SandboxLost


class Tool:
    """A call that ends when the test says so."""

    def __init__(self) -> None:
        self.began = 0
        self.was_cancelled = False
        self.report: Callable[..., None] = lambda *_: None
        self.outcome: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def __call__(self, report: Any) -> WireResult:
        self.began += 1
        self.report = report
        try:
            return WireResult("tools/call", await self.outcome)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


async def begun(tool: Tool) -> None:
    while not tool.began:  # noqa: ASYNC110  # a turn of the loop begins it
        await asyncio.sleep(0)


async def test_reports_come_in_rounds_and_the_result_once() -> None:
    """Every round has what came since the last; the call is made once."""
    calls, tool = FollowedCalls(), Tool()
    first = asyncio.create_task(calls.next("t", "", tool))
    await begun(tool)
    tool.report(1, 3, None)
    tool.report(2, 3, "two")
    assert await first == [(1, 3, None), (2, 3, "two")]
    again = asyncio.create_task(calls.next("t", "", tool))
    await asyncio.sleep(0)
    assert not again.done()
    tool.report(3, 3, None)
    tool.outcome.set_result(b"{}")
    assert await again == [(3, 3, None)]
    assert await calls.next("t", "", tool) == b"{}"
    assert tool.began == 1


async def test_a_quick_call_has_its_result_in_the_first_round() -> None:
    """Without reports there is one round."""
    calls, tool = FollowedCalls(), Tool()
    tool.outcome.set_result(b"[]")
    assert await calls.next("t", "n", tool) == b"[]"
    assert not calls.cancel("n")


async def test_a_slow_reader_loses_the_oldest_reports() -> None:
    """Memory is bounded; the newest progress is what counts."""
    calls, tool = FollowedCalls(), Tool()
    first = asyncio.create_task(calls.next("t", "", tool))
    await begun(tool)
    for n in range(BACKLOG + 10):
        tool.report(n, None, None)
    reports = await first
    assert len(reports) == BACKLOG
    assert reports[-1] == (BACKLOG + 9, None, None)
    first = asyncio.create_task(calls.next("t", "", tool))
    tool.outcome.set_result(b"1")
    assert await first == b"1"


async def test_a_name_cancels_from_elsewhere() -> None:
    """Invariant 11: the tool is told, and the caller that waits gets a typed error."""
    calls, tool, other = FollowedCalls(), Tool(), Tool()
    waiting = asyncio.create_task(calls.next("t", "session 7", tool))
    spared = asyncio.create_task(calls.next("u", "session 8", other))
    await begun(tool)
    await begun(other)
    assert calls.cancel("session 7")
    with pytest.raises(CallCancelled):
        await waiting
    assert tool.was_cancelled
    assert not calls.cancel("session 7")
    assert not other.was_cancelled
    other.outcome.set_result(b"0")
    assert await spared == b"0"


async def test_a_caller_that_goes_away_cancels() -> None:
    """Invariant 11: `CancelledError` passes, and the tool is told."""
    calls, tool = FollowedCalls(), Tool()
    waiting = asyncio.create_task(calls.next("t", "", tool))
    await begun(tool)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0)
    assert tool.was_cancelled


async def test_errors_pass_as_they_are() -> None:
    """A dead sandbox is no result."""
    calls, tool = FollowedCalls(), Tool()
    tool.outcome.set_exception(SandboxLost("gone"))
    with pytest.raises(SandboxLost, match="gone"):
        await calls.next("t", "", tool)
