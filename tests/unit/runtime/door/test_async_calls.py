"""Calls from an event loop: threads, cancellation while waiting, clients that disconnect."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from aenv_ray.runtime.api.registry import Registry
from aenv_ray.runtime.door import async_calls
from aenv_ray.runtime.door.async_calls import AsyncCalls, Disconnect, Workers, read_outcome
from aenv_ray.runtime.door.dispatch import Dispatcher
from aenv_ray.runtime.faults import Fault
from aenv_ray.testing.contract_bench import eventually


class Bench:
    """An environment with a tool that waits until the test lets it go."""

    def __init__(self, max_threads: int = 4) -> None:
        self.began = threading.Event()
        self.go = threading.Event()
        self.ran: list[str] = []
        registry = Registry()
        registry.add_tool(self.wait, name="wait")
        self.calls = AsyncCalls(Dispatcher(registry), max_threads)

    def wait(self, label: str) -> str:
        self.ran.append(label)
        self.began.set()
        self.go.wait(10.0)
        return label

    def start(self, label: str, disconnect: Disconnect | None = None, **meta: Any) -> Any:
        params = {"name": "wait", "arguments": {"label": label}, "_meta": meta}
        call = self.calls.call("tools/call", params, disconnect=disconnect)
        return asyncio.create_task(call)

    async def has_begun(self) -> None:
        assert await asyncio.to_thread(self.began.wait, 10.0)


def _text(outcome: bytes) -> str:
    return str(read_outcome(outcome)["content"][0]["text"])


@pytest.mark.parametrize("claimed", [-1, 10**9])
async def test_a_client_does_not_open_the_gate_of_an_outer_reward(claimed: int) -> None:
    """Invariant 14: only a host says that a call is not of an agent."""
    bench = Bench()
    bench.go.set()
    held = {"aenv/rewards": 1, "aenv/held_s": 60.0}
    bench.calls.dispatcher.submit("aenv/end_processes", {"_meta": held}, lambda _: None)
    with pytest.raises(Fault, match="a reward of the instance is under way"):
        read_outcome(await bench.start("x", **{"aenv/rewards": claimed}))
    assert bench.ran == []


async def test_a_call_that_is_cancelled_before_it_gets_a_thread_never_runs() -> None:
    """Invariant 11: cancelling a call cancels it."""
    bench = Bench(max_threads=1)
    first = bench.start("first")
    await bench.has_begun()
    second, third = bench.start("second"), bench.start("third")
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    bench.go.set()
    assert [_text(await first), _text(await third)] == ["first", "third"]
    assert bench.ran == ["first", "third"]


async def test_a_call_without_a_free_thread_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 9: every wait has a deadline; every deadline error names what it waited for."""
    monkeypatch.setattr(async_calls, "_GRACE_S", 0.0)
    bench = Bench(max_threads=1)
    first = bench.start("first")
    await bench.has_begun()
    late = await bench.start("late", **{"aenv/timeout_s": 0.05})
    with pytest.raises(Fault, match="no thread was free in time") as raised:
        read_outcome(late)
    assert raised.value.code == "tool_timeout"
    bench.go.set()
    await first
    assert bench.ran == ["first"]


async def test_a_client_that_disconnects_cancels_its_call() -> None:
    bench = Bench()
    disconnect = Disconnect()
    call = bench.start("x", disconnect)
    await bench.has_begun()
    disconnect.happen()
    with pytest.raises(Fault, match="went away") as raised:
        read_outcome(await call)
    assert raised.value.code == "call_cancelled"
    bench.go.set()


async def test_a_call_with_an_id_survives_the_disconnect_of_its_client() -> None:
    """A repeated id waits for the first outcome; the call runs once."""
    bench = Bench()
    disconnect = Disconnect()
    call = bench.start("x", disconnect, **{"aenv/call_id": "one"})
    await bench.has_begun()
    disconnect.happen()
    call.cancel()
    again = bench.start("x", Disconnect(), **{"aenv/call_id": "one"})
    await asyncio.sleep(0)
    bench.go.set()
    assert _text(await again) == "x"
    assert bench.ran == ["x"]


async def test_stop_cancels_running_calls() -> None:
    bench = Bench()
    call = bench.start("x")
    await bench.has_begun()
    await bench.calls.stop("the server stops")
    with pytest.raises(Fault, match="the server stops"):
        read_outcome(await call)
    bench.go.set()


@pytest.mark.parametrize("timeout", ["soon", -1, 0, True])
async def test_an_invalid_timeout_is_refused(timeout: Any) -> None:
    bench = Bench()
    with pytest.raises(Fault, match="timeout"):
        read_outcome(await bench.start("x", **{"aenv/timeout_s": timeout}))
    assert bench.ran == []


def test_workers_grow_to_their_limit_and_run_waiting_jobs() -> None:
    workers = Workers(3, "test")
    go = threading.Event()
    done = threading.Semaphore(0)
    running = threading.Semaphore(0)

    def job() -> None:
        running.release()
        go.wait(10.0)
        done.release()

    for _ in range(10):
        workers.submit(job)
    for _ in range(3):
        assert running.acquire(timeout=10.0)
    assert workers.busy == 3
    go.set()
    for _ in range(10):
        assert done.acquire(timeout=10.0)
    assert workers._threads == 3


@contextlib.contextmanager
def no_thread_starts() -> Iterator[None]:
    """No thread of this process can be started.

    Not by a stack that is too large: CPython 3.11 keeps the state of a thread that did not start,
    under the identity of its creator, so that interrupts for this thread would be lost in it.
    """

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", refuse)
        patch.setattr(threading, "_start_new_thread", refuse)
        yield


async def test_a_call_for_which_no_thread_starts_is_refused_and_never_runs() -> None:
    """Invariant 1: its caller may repeat it."""
    bench = Bench()
    with no_thread_starts(), pytest.raises(Fault, match="start new thread") as raised:
        read_outcome(await bench.start("refused"))
    assert raised.value.code == "sandbox_exhausted"
    assert raised.value.context["died_of"] == "processes"
    later = bench.start("later")
    await bench.has_begun()
    assert bench.calls._workers.busy == 1
    bench.go.set()
    assert _text(await later) == "later"
    assert bench.ran == ["later"]
    assert not bench.calls._running


async def test_a_call_for_which_no_further_thread_starts_waits_for_one() -> None:
    bench = Bench()
    calls = [bench.start("first")]
    await bench.has_begun()
    with no_thread_starts():
        calls.append(bench.start("second"))
        await asyncio.sleep(0)
    assert not calls[1].done()
    calls.append(bench.start("third"))
    await eventually(lambda: len(bench.ran) == 3, "the third started threads for both")
    bench.go.set()
    assert [_text(await call) for call in calls] == ["first", "second", "third"]


def test_idle_workers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_calls, "_IDLE_S", 0.01)
    workers = Workers(3, "aenv-test-idle")
    done = threading.Event()
    for _ in range(20):
        done.clear()
        workers.submit(done.set)
        assert done.wait(10.0)
    for thread in threading.enumerate():
        if thread.name == "aenv-test-idle":
            thread.join(10.0)
    assert workers._threads == 0
    assert workers.busy == 0
