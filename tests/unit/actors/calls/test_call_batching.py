"""The batch protocol: results one by one, progress, cancellation, and hosts that restart."""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Callable
from typing import Any

import pytest

from aenv_ray.actors.calls.call_batching import (
    PROGRESS,
    UNKNOWN,
    BatchClient,
    BatchedCall,
    BatchServer,
    Reports,
)
from aenv_ray.actors.calls.caller_notes import MAX_REPORTS, MAX_REPORTS_CHARACTERS
from aenv_ray.actors.calls.wire import WireResult
from aenv_ray.engines.base import OnProgress
from aenv_ray.errors import CallCancelled, InternalError, SandboxLost


class Node:
    """A host whose calls end, and report progress, when the test says so."""

    def __init__(self) -> None:
        self.server = BatchServer(self.run)
        self.outcomes: dict[bytes, asyncio.Future[bytes]] = {}
        self.reporters: dict[bytes, OnProgress | None] = {}
        self.runs: list[bytes] = []
        self.stopped: list[bytes] = []
        self.batches: list[tuple[int, int]] = []
        self.broken: Exception | None = None

    def outcome(self, message: bytes) -> asyncio.Future[bytes]:
        return self.outcomes.setdefault(message, asyncio.get_running_loop().create_future())

    def report(self, message: bytes, progress: float, text: str | None = None) -> None:
        reporter = self.reporters[message]
        assert reporter is not None
        reporter(progress, None, text)

    async def run(self, message: bytes, on_progress: OnProgress | None) -> WireResult:
        self.runs.append(message)
        self.reporters[message] = on_progress
        try:
            return WireResult("tools/call", await asyncio.shield(self.outcome(message)))
        except asyncio.CancelledError:
            self.stopped.append(message)
            raise

    async def exchange(self, begin: list[Any], follow: list[str], cancel: list[str]) -> list[Any]:
        if begin or follow:
            self.batches.append((len(begin), len(follow)))
        if self.broken is not None:
            raise self.broken
        return await self.server.exchange(begin, follow, cancel)

    def client(self) -> BatchClient:
        return BatchClient(self.exchange)


async def turns(until: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not until():  # noqa: ASYNC110  # turns of the loop bring it about
            await asyncio.sleep(0)


async def ended(*calls: BatchedCall) -> list[Any]:
    async with asyncio.timeout(60):
        await asyncio.wait([call.result for call in calls])
    return [call.result.exception() or call.result.result() for call in calls]


# --- results -------------------------------------------------------------------------------------


async def test_calls_sent_together_travel_in_one_task() -> None:
    node = Node()
    client = node.client()
    calls = [client.send(b"%d" % n) for n in range(20)]
    await turns(lambda: len(node.runs) == 20)
    assert node.batches == [(20, 0)]
    for n in range(20):
        node.outcome(b"%d" % n).set_result(b"[%d]" % n)
    assert await ended(*calls) == [b"[%d]" % n for n in range(20)]


async def test_a_slow_call_delays_no_other_call() -> None:
    """Later tasks follow it; it runs once."""
    node = Node()
    client = node.client()
    slow, quick = client.send(b"slow"), client.send(b"quick")
    node.outcome(b"quick").set_result(b"1")
    assert await ended(quick) == [b"1"]
    later = client.send(b"later")
    node.outcome(b"later").set_result(b"2")
    assert await ended(later) == [b"2"]
    assert not slow.result.done()
    node.outcome(b"slow").set_result(b"3")
    assert await ended(slow) == [b"3"]
    assert sorted(node.runs) == [b"later", b"quick", b"slow"]


async def test_a_task_follows_a_limited_number_of_calls() -> None:
    """Bounds what one slow call costs when another one ends."""
    node = Node()
    client = node.client()
    calls = [client.send(b"%d" % n) for n in range(300)]
    await turns(lambda: len(node.runs) == 300)
    for n in range(300):
        node.outcome(b"%d" % n).set_result(b"{}")
    assert await ended(*calls) == [b"{}"] * 300
    assert max(begin + follow for begin, follow in node.batches) <= 64
    assert len(node.runs) == 300


async def test_large_messages_travel_alone() -> None:
    node = Node()
    client = node.client()
    calls = [client.send(b"%d" % n + bytes(3 << 20)) for n in range(3)]
    await turns(lambda: len(node.runs) == 3)
    assert node.batches == [(1, 0)] * 3
    for message in node.runs:
        node.outcome(message).set_result(bytes(3 << 20))
    assert [len(one) for one in await ended(*calls)] == [3 << 20] * 3


async def test_each_call_has_its_own_error() -> None:
    """An exception that is none of our errors becomes an InternalError."""
    node = Node()
    client = node.client()
    lost, broken, well = client.send(b"lost"), client.send(b"broken"), client.send(b"well")
    node.outcome(b"lost").set_exception(SandboxLost("gone", instance_id="i-1", hint="again"))
    node.outcome(b"broken").set_exception(RuntimeError("oh"))
    node.outcome(b"well").set_result(b"1")
    errors = await ended(lost, broken, well)
    assert isinstance(errors[0], SandboxLost)
    assert (errors[0].message, errors[0].instance_id, errors[0].hint) == ("gone", "i-1", "again")
    assert isinstance(errors[1], InternalError)
    assert errors[2] == b"1"


# --- progress ------------------------------------------------------------------------------------


async def test_progress_arrives_in_order_and_before_the_result() -> None:
    node = Node()
    reports: Reports = []
    call = node.client().send(b"m", on_progress=reports.extend)
    await turns(lambda: bool(node.runs))
    node.report(b"m", 1)
    node.report(b"m", 2)
    await turns(lambda: len(reports) == 2)
    node.report(b"m", 3)
    node.outcome(b"m").set_result(b"{}")
    assert await ended(call) == [b"{}"]
    assert reports == [(1, None, None), (2, None, None), (3, None, None)]
    assert node.runs == [b"m"]


async def test_a_call_without_a_reader_of_progress_reports_none() -> None:
    node = Node()
    call = node.client().send(b"m")
    node.outcome(b"m").set_result(b"{}")
    assert await ended(call) == [b"{}"]
    assert node.reporters == {b"m": None}


async def test_progress_that_nobody_reads_is_bounded() -> None:
    """The oldest reports are dropped; the newest progress is what counts."""
    node = Node()
    first = asyncio.create_task(node.exchange([["k", "", True, b"m"]], [], []))
    await turns(lambda: bool(node.runs))
    for n in range(MAX_REPORTS + 10):
        node.report(b"m", n)
    ((key, kind, text),) = await first
    assert (key, kind) == ("k", PROGRESS)
    assert text.startswith((b"[[10,", b"[[10.0,"))
    assert text.count(b"null") == 2 * MAX_REPORTS
    node.outcome(b"m").set_result(b"1")
    assert await node.exchange([], ["k"], []) == [["k", 0, b"1"]]


async def test_long_reports_that_nobody_reads_are_bounded() -> None:
    """Invariant 7: a tool that reports without end would fill its host, and the gateway."""
    node = Node()
    first = asyncio.create_task(node.exchange([["k", "", True, b"m"]], [], []))
    await turns(lambda: bool(node.runs))
    for n in range(20):
        node.report(b"m", n, text="x" * (MAX_REPORTS_CHARACTERS // 4))
    ((_, _, text),) = await first
    assert [report[0] for report in json.loads(text)] == [16, 17, 18, 19]
    node.outcome(b"m").set_result(b"1")
    assert await node.exchange([], ["k"], []) == [["k", 0, b"1"]]


# --- cancellation --------------------------------------------------------------------------------


async def test_a_cancelled_call_is_stopped() -> None:
    """Invariant 11: its tool is told to stop; other calls continue."""
    node = Node()
    client = node.client()
    left, stays = client.send(b"left"), client.send(b"stays")
    await turns(lambda: len(node.runs) == 2)
    client.cancel(left)
    assert isinstance((await ended(left))[0], CallCancelled)
    await turns(lambda: node.stopped == [b"left"])
    node.outcome(b"stays").set_result(b"1")
    assert await ended(stays) == [b"1"]


async def test_no_exchange_belongs_to_the_task_of_a_caller() -> None:
    """Ray cancels with a task all that it has started; it finds the task in the context."""
    task = contextvars.ContextVar("task", default="none")
    seen: list[str] = []
    node = Node()

    async def exchange(begin: list[Any], follow: list[str], cancel: list[str]) -> list[Any]:
        seen.append(task.get())
        return await node.exchange(begin, follow, cancel)

    client = BatchClient(exchange)
    task.set("a caller's")
    call = client.send(b"1")
    await turns(lambda: node.runs == [b"1"])
    client.cancel(call)
    await turns(lambda: node.stopped == [b"1"])
    assert set(seen) == {"none"}


async def test_the_only_call_in_flight_can_be_cancelled() -> None:
    """The cancellation travels without new calls."""
    node = Node()
    client = node.client()
    call = client.send(b"m")
    await turns(lambda: bool(node.runs))
    client.cancel(call)
    await turns(lambda: node.stopped == [b"m"])


async def test_a_call_cancelled_before_it_was_sent_never_runs() -> None:
    node = Node()
    client = node.client()
    client.cancel(client.send(b"left"))
    other = client.send(b"other")
    node.outcome(b"other").set_result(b"1")
    assert await ended(other) == [b"1"]
    assert node.runs == [b"other"]


async def test_any_process_cancels_a_call_by_its_name() -> None:
    """The cancellation may come through another replica; unnamed calls are never affected."""
    node = Node()
    client = node.client()
    call, unnamed = client.send(b"named", "session 1"), client.send(b"unnamed")
    await turns(lambda: len(node.runs) == 2)
    assert await node.exchange([], [], ["session 2", ""]) == []
    assert not node.stopped
    assert await node.exchange([], [], ["session 1"]) == []
    assert isinstance((await ended(call))[0], CallCancelled)
    assert node.stopped == [b"named"]
    assert not unnamed.result.done()


@pytest.mark.parametrize("is_named", [True, False])
async def test_a_forgotten_call_goes_on(is_named: bool) -> None:
    node = Node()
    client = node.client()
    call = client.send(b"m", "name" if is_named else "")
    await turns(lambda: bool(node.runs))
    client.forget(call)
    node.outcome(b"m").set_result(b"1")
    other = client.send(b"other")
    node.outcome(b"other").set_result(b"2")
    assert await ended(other) == [b"2"]
    assert not call.result.done()
    assert not node.stopped


# --- failures of hosts ---------------------------------------------------------------------------


async def test_a_restarted_host_gets_its_calls_again() -> None:
    """The call id prevents a second run."""
    node = Node()
    client = node.client()
    slow, quick = client.send(b"slow"), client.send(b"quick")
    await turns(lambda: len(node.runs) == 2)
    node.server = BatchServer(node.run)
    before, node.outcomes[b"slow"] = node.outcome(b"slow"), asyncio.Future()
    node.outcome(b"quick").set_result(b"1")
    assert await ended(quick) == [b"1"]
    await turns(lambda: len(node.runs) == 3)
    node.outcome(b"slow").set_result(b"2")
    assert await ended(slow) == [b"2"]
    before.cancel()


async def test_the_death_of_a_host_fails_its_calls() -> None:
    """Every call raises the cause; later calls are sent as usual."""
    node = Node()
    client = node.client()
    node.broken = ConnectionError("dead")
    assert await ended(client.send(b"1"), client.send(b"2")) == [node.broken, node.broken]
    node.broken = None
    again = client.send(b"3")
    node.outcome(b"3").set_result(b"3")
    assert await ended(again) == [b"3"]


async def test_a_task_that_ray_sends_again_runs_nothing_twice() -> None:
    """Both exchanges end, one of them with the outcome; the call runs once."""
    node = Node()
    begin = [["k", "", False, b"m"]]
    first = asyncio.create_task(node.exchange(begin, [], []))
    await turns(lambda: bool(node.runs))
    again = asyncio.create_task(node.exchange(begin, [], []))
    await turns(first.done)
    assert first.result() == []
    node.outcome(b"m").set_result(b"1")
    assert await again == [["k", 0, b"1"]]
    assert node.runs == [b"m"]
    assert await node.exchange([], ["k"], []) == [["k", UNKNOWN, b""]]
