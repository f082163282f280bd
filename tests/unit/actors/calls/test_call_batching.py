"""Calls that reach a host in batches: results one by one, stopping, a host that forgets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from aenv_ray.actors.calls.call_batching import UNKNOWN, CarriedCalls
from aenv_ray.actors.calls.wire import WireResult
from aenv_ray.errors import CallCancelled, InternalError, SandboxLost
from aenv_ray.serve.gateway.data.call_batching import Carried, Carrier


class Node:
    """A host and its sandboxes, whose calls end when the test says so."""

    def __init__(self) -> None:
        self.calls = CarriedCalls()
        self.outcomes: dict[bytes, asyncio.Future[bytes]] = {}
        self.runs: list[bytes] = []
        self.stopped: list[bytes] = []
        self.batches: list[tuple[int, int]] = []
        self.broken: Exception | None = None
        self._memory: dict[bytes, bytes] = {}

    def outcome(self, message: bytes) -> asyncio.Future[bytes]:
        return self.outcomes.setdefault(message, asyncio.get_running_loop().create_future())

    async def run(self, message: bytes) -> WireResult:
        self.runs.append(message)
        try:
            return WireResult("tools/call", await asyncio.shield(self.outcome(message)))
        except asyncio.CancelledError:
            self.stopped.append(message)
            raise

    async def exchange(self, begin: list[Any], follow: list[str]) -> list[Any]:
        self.batches.append((len(begin), len(follow)))
        if self.broken is not None:
            raise self.broken
        return await self.calls.exchange(begin, follow, self.run)

    def drop(self, keys: Sequence[str]) -> None:
        self.calls.drop(keys)

    def carrier(self) -> Carrier:
        return Carrier(self.exchange, self.drop)


async def turns(until: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not until():  # noqa: ASYNC110  # turns of the loop bring it about
            await asyncio.sleep(0)


async def ended(*calls: Carried) -> list[Any]:
    async with asyncio.timeout(60):
        await asyncio.wait([call.result for call in calls])
    return [call.result.exception() or call.result.result() for call in calls]


async def test_calls_of_one_turn_go_together() -> None:
    """One task for all of them, and each has its own result."""
    node = Node()
    carrier = node.carrier()
    calls = [carrier.send(b"%d" % n) for n in range(20)]
    await turns(lambda: len(node.runs) == 20)
    assert node.batches == [(20, 0)]
    for n in range(20):
        node.outcome(b"%d" % n).set_result(b"[%d]" % n)
    assert await ended(*calls) == [b"[%d]" % n for n in range(20)]


async def test_a_slow_call_delays_no_other() -> None:
    """It is followed by later tasks, and runs once."""
    node = Node()
    carrier = node.carrier()
    slow, quick = carrier.send(b"slow"), carrier.send(b"quick")
    node.outcome(b"quick").set_result(b"1")
    assert await ended(quick) == [b"1"]
    later = carrier.send(b"later")
    node.outcome(b"later").set_result(b"2")
    assert await ended(later) == [b"2"]
    assert not slow.result.done()
    node.outcome(b"slow").set_result(b"3")
    assert await ended(slow) == [b"3"]
    assert sorted(node.runs) == [b"later", b"quick", b"slow"]


async def test_many_slow_calls_are_followed_in_pieces() -> None:
    """What one of them costs when another ends is bounded."""
    node = Node()
    carrier = node.carrier()
    calls = [carrier.send(b"%d" % n) for n in range(300)]
    await turns(lambda: len(node.runs) == 300)
    for n in range(300):
        node.outcome(b"%d" % n).set_result(b"{}")
    assert await ended(*calls) == [b"{}"] * 300
    assert max(begin + follow for begin, follow in node.batches) <= 64
    assert len(node.runs) == 300


async def test_large_calls_do_not_travel_together() -> None:
    """One message of many megabytes is enough for a task."""
    node = Node()
    carrier = node.carrier()
    calls = [carrier.send(b"%d" % n + bytes(3 << 20)) for n in range(3)]
    await turns(lambda: len(node.runs) == 3)
    assert node.batches == [(1, 0)] * 3
    for message in node.runs:
        node.outcome(message).set_result(bytes(3 << 20))
    assert [len(one) for one in await ended(*calls)] == [3 << 20] * 3


async def test_errors_are_each_calls_own() -> None:
    """One that fails fails alone, with its own error; our bug is an InternalError."""
    node = Node()
    carrier = node.carrier()
    lost, broken, well = carrier.send(b"lost"), carrier.send(b"broken"), carrier.send(b"well")
    node.outcome(b"lost").set_exception(SandboxLost("gone", instance_id="i-1", hint="again"))
    node.outcome(b"broken").set_exception(RuntimeError("oh"))
    node.outcome(b"well").set_result(b"1")
    errors = await ended(lost, broken, well)
    assert isinstance(errors[0], SandboxLost)
    assert (errors[0].message, errors[0].instance_id, errors[0].hint) == ("gone", "i-1", "again")
    assert isinstance(errors[1], InternalError)
    assert errors[2] == b"1"


async def test_a_call_that_is_dropped_is_stopped() -> None:
    """Invariant 11: its tool is told, the others go on."""
    node = Node()
    carrier = node.carrier()
    left, stays = carrier.send(b"left"), carrier.send(b"stays")
    await turns(lambda: len(node.runs) == 2)
    carrier.drop(left)
    assert isinstance((await ended(left))[0], CallCancelled)
    await turns(lambda: node.stopped == [b"left"])
    node.outcome(b"stays").set_result(b"1")
    assert await ended(stays) == [b"1"]


async def test_a_call_that_was_not_sent_never_runs() -> None:
    """Its caller went away before its batch left."""
    node = Node()
    carrier = node.carrier()
    carrier.drop(carrier.send(b"left"))
    other = carrier.send(b"other")
    node.outcome(b"other").set_result(b"1")
    assert await ended(other) == [b"1"]
    assert node.runs == [b"other"]


async def test_anybody_stops_a_call_by_its_name() -> None:
    """A cancellation may come through another replica."""
    node = Node()
    call = node.carrier().send(b"named", "session 1")
    await turns(lambda: bool(node.runs))
    assert not node.calls.cancel("session 2")
    assert node.calls.cancel("session 1")
    assert isinstance((await ended(call))[0], CallCancelled)
    assert not node.calls.cancel("session 1")


async def test_a_host_that_was_restarted_is_told_again() -> None:
    """What it does not know goes there anew; the call's own id keeps it from running twice."""
    node = Node()
    carrier = node.carrier()
    slow, quick = carrier.send(b"slow"), carrier.send(b"quick")
    await turns(lambda: len(node.runs) == 2)
    node.calls = CarriedCalls()
    before, node.outcomes[b"slow"] = node.outcome(b"slow"), asyncio.Future()
    node.outcome(b"quick").set_result(b"1")
    assert await ended(quick) == [b"1"]
    await turns(lambda: len(node.runs) == 3)
    node.outcome(b"slow").set_result(b"2")
    assert await ended(slow) == [b"2"]
    before.cancel()


async def test_a_host_that_is_gone_fails_what_it_had() -> None:
    """Every caller gets the same cause, and nothing is kept."""
    node = Node()
    carrier = node.carrier()
    node.broken = ConnectionError("dead")
    assert await ended(carrier.send(b"1"), carrier.send(b"2")) == [node.broken, node.broken]
    node.broken = None
    again = carrier.send(b"3")
    node.outcome(b"3").set_result(b"3")
    assert await ended(again) == [b"3"]


async def test_an_outcome_is_told_once_and_a_known_call_begins_once() -> None:
    """Ray may send the same task again: both of it end, and the call runs once."""
    node = Node()
    begin = [["k", "", b"m"]]
    first = asyncio.create_task(node.exchange(begin, []))
    await turns(lambda: bool(node.runs))
    again = asyncio.create_task(node.exchange(begin, []))
    await turns(first.done)
    assert first.result() == []
    node.outcome(b"m").set_result(b"1")
    assert await again == [["k", 0, b"1"]]
    assert node.runs == [b"m"]
    assert await node.exchange([], ["k"]) == [["k", UNKNOWN, b""]]


@pytest.mark.parametrize("is_named", [True, False])
async def test_what_nobody_waits_for_is_forgotten(is_named: bool) -> None:
    """A call that goes on without its caller leaves nothing at the caller."""
    node = Node()
    carrier = node.carrier()
    call = carrier.send(b"m", "name" if is_named else "")
    await turns(lambda: bool(node.runs))
    carrier.forget(call)
    node.outcome(b"m").set_result(b"1")
    other = carrier.send(b"other")
    node.outcome(b"other").set_result(b"2")
    assert await ended(other) == [b"2"]
    assert not call.result.done()
    assert not node.stopped
