"""Stopping a call interrupts that call and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import operator
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.runtime.door import calls
from aenv_ray.runtime.door.calls import (
    CallInterrupted,
    RunningCall,
    Watchdog,
    current_call,
    retry_lost_interrupts,
)
from aenv_ray.runtime.system.threads import start_thread


@pytest.fixture(autouse=True)
def catching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry interrupts as in a sandbox: here too one may hit a callback of the collector."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    retry_lost_interrupts()


def call(deadline_s: float = 60.0, **options: Any) -> RunningCall:
    return RunningCall("id", "tool", time.monotonic() + deadline_s, **options)


def spin(began: threading.Event) -> None:
    began.set()
    while True:
        threading.Event().wait(0.001)


def in_thread(
    one: RunningCall, function: Any, **arguments: Any
) -> tuple[threading.Thread, list[Any]]:
    ended: list[Any] = []

    def run() -> None:
        try:
            ended.append(one.run_sync(function, arguments))
        except BaseException as exc:  # noqa: BLE001  # looked at by the test
            ended.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ended


def test_current_call_is_set_only_inside_a_call() -> None:
    one = call()
    assert one.run_sync(current_call, {}) is one
    outside = current_call()
    assert outside is not one
    assert not outside.is_cancelled
    assert outside.remaining_s == float("inf")
    outside.progress(1.0)


def test_stop_interrupts_the_function() -> None:
    """Invariant 11."""
    one, began = call(), threading.Event()
    thread, ended = in_thread(one, spin, began=began)
    assert began.wait(10.0)
    one.stop("cancelled")
    one.stop("timeout")
    thread.join(10.0)
    assert isinstance(ended[0], CallInterrupted)
    assert one.stop_reason == "cancelled"


def test_except_exception_does_not_catch_the_interrupt() -> None:
    """Invariant 11."""
    began = threading.Event()

    def stubborn(began: threading.Event) -> None:
        while True:
            try:
                spin(began)
            except Exception:  # noqa: BLE001  # what careless tools do
                continue

    one = call()
    thread, ended = in_thread(one, stubborn, began=began)
    assert began.wait(10.0)
    one.stop("timeout")
    thread.join(10.0)
    assert isinstance(ended[0], CallInterrupted)


def test_an_interrupt_that_hits_a_destructor_is_repeated() -> None:
    """Invariant 11: Python drops what is raised there."""
    began = threading.Event()

    class Lingering:
        def __del__(self) -> None:
            until = time.monotonic() + 30.0
            began.set()
            while time.monotonic() < until:
                pass

    def litter() -> None:
        Lingering()
        spin(began)

    one = call()
    thread, ended = in_thread(one, litter)
    assert began.wait(10.0)
    one.stop("timeout")
    thread.join(60.0)
    assert isinstance(ended[0], CallInterrupted)


def test_a_call_that_is_stopped_before_it_begins_never_runs() -> None:
    """Invariant 11."""
    one, ran = call(), []
    one.stop("cancelled")
    with pytest.raises(CallInterrupted):
        one.run_sync(lambda: ran.append(1), {})
    assert ran == []


def test_stop_after_the_end_does_nothing() -> None:
    one = call()
    assert one.run_sync(lambda: 7, {}) == 7
    one.stop("timeout")
    assert sum(range(100_000)) == 4_999_950_000  # this thread would be hit here


def test_a_stop_that_races_with_the_end_hits_only_its_own_call() -> None:
    """The thread that ran it goes on to run others."""
    survived = 0
    for _ in range(300):
        one, go = call(), threading.Event()

        def brief(go: threading.Event) -> str:
            go.set()
            return "done"

        def stopper(one: RunningCall = one, go: threading.Event = go) -> None:
            go.wait(10.0)
            one.stop("timeout")

        thread = threading.Thread(target=stopper)
        thread.start()
        with contextlib.suppress(CallInterrupted):
            one.run_sync(brief, {"go": go})
        thread.join()
        survived += sum(range(1000)) == 499_500
    assert survived == 300


def test_progress_reaches_the_listener() -> None:
    told: list[Any] = []
    one = call(on_progress=lambda *report: told.append(report))
    one.run_sync(lambda: current_call().progress(1, 2, "half"), {})
    assert told == [(1, 2, "half")]


def test_remaining_time_never_goes_below_zero() -> None:
    assert call(-5.0).remaining_s == 0.0
    assert 59.0 < call().remaining_s <= 60.0


async def test_an_async_call_is_stopped_by_the_bound_function() -> None:
    one, stopped = call(), []
    one.bind_stop(lambda: stopped.append("now"))
    one.stop("cancelled")
    assert stopped == ["now"]
    one.bind_stop(lambda: stopped.append("late"))
    assert stopped == ["now", "late"]

    async def inside() -> RunningCall:
        await asyncio.sleep(0)
        return current_call()

    assert await one.run_async(inside, {}) is one


def test_a_wait_inside_an_async_call_does_not_replace_how_the_call_is_cancelled() -> None:
    """Invariant 11: an async tool may wait for its host in a thread."""
    one, stopped = call(), []
    done = threading.Event()
    one.bind_stop(lambda: stopped.append("task"))
    one.bind_stop(done.set)
    one.unbind_stop(done.set)
    one.bind_stop(done.set)
    one.stop("cancelled")
    assert stopped == ["task"]
    assert done.is_set()


# --- the watchdog ---------------------------------------------------------------------------------


@pytest.fixture
def expired() -> Any:
    class Expired:
        def __init__(self) -> None:
            self.calls: list[RunningCall] = []
            self.some = threading.Semaphore(0)

        def __call__(self, one: RunningCall) -> None:
            self.calls.append(one)
            self.some.release()

    return Expired()


def test_the_watchdog_reports_each_call_once_in_the_order_of_deadlines(expired: Any) -> None:
    """Invariant 9."""
    watchdog = Watchdog(expired)
    late, early, removed, later = call(0.1), call(0.03), call(0.01), call(60.0)
    for one in (later, late, early, removed):
        watchdog.add(one)
    watchdog.remove(removed)
    assert expired.some.acquire(timeout=10.0)
    assert expired.some.acquire(timeout=10.0)
    told = [one for one in expired.calls if one is not removed]
    assert told == [early, late]


def test_an_earlier_deadline_wakes_a_sleeping_watchdog(expired: Any) -> None:
    """Invariant 9."""
    watchdog = Watchdog(expired)
    watchdog.add(call(60.0))
    for _ in range(20):
        soon = call(0.005)
        watchdog.add(soon)
        assert expired.some.acquire(timeout=10.0)
        assert expired.calls[-1] is soon


@pytest.mark.parametrize("problem", [MemoryError, RuntimeError("no thread"), OSError(24, "files")])
def test_the_watchdog_survives_a_sandbox_that_is_out_of_resources(
    expired: Any, problem: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 9: an agent that uses up its sandbox must not disable deadlines."""
    monkeypatch.setattr(calls, "_WATCH_RETRY_S", 0.001)
    problems = [problem] * 3

    def on_expired(one: RunningCall) -> None:
        if problems:
            raise problems.pop()
        expired(one)

    watchdog = Watchdog(on_expired)
    for one in (call(0.005), call(0.02)):
        watchdog.add(one)
        assert expired.some.acquire(timeout=10.0)
        assert expired.calls[-1] is one


def test_a_watchdog_without_a_thread_tries_again(
    expired: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 9: the first call of a sandbox may come when it has no process left."""
    starts = iter([RuntimeError("can't start new thread")])

    def start(target: Any) -> None:
        for problem in starts:
            raise problem
        start_thread(target)

    monkeypatch.setattr(calls, "start_thread", start)
    watchdog = Watchdog(expired)
    first, second = call(0.005), call(60.0)
    watchdog.add(first)
    watchdog.add(second)
    assert expired.some.acquire(timeout=10.0)
    assert expired.calls == [first]


@pytest.mark.skipif(sys.platform != "linux", reason="children are found in /proc")
def test_a_child_that_stop_could_not_see_yet_is_killed() -> None:
    """A stop that comes while a program is being started: nothing of it runs on."""
    ready, gate, spawned = threading.Lock(), threading.Lock(), list[int]()
    ready.acquire()
    gate.acquire()
    spawn = functools.partial(os.posix_spawnp, "sleep", ["sleep", "1000"], {})
    keep = functools.partial(spawned.extend, map(operator.call, [spawn]))
    # All of it is one C call: an interrupt waits until it has returned, as inside `Popen`.
    steps = map(operator.call, [ready.release, gate.acquire, keep])
    one = call()

    def left_over() -> str:
        with pytest.raises(CallInterrupted):
            one.run_sync(lambda: tuple(steps), {})
        return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()

    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(left_over)
        assert ready.acquire(timeout=10)
        one.stop("timeout")
        gate.release()
        assert left.result(10) == ""
    assert len(spawned) == 1


def test_the_watchdog_calls_sweep_at_the_requested_times() -> None:
    """An idle instance gives back the memory of old outcomes."""
    swept = threading.Semaphore(0)
    times = iter([time.monotonic(), time.monotonic() + 0.01, float("inf")])

    def sweep() -> float:
        swept.release()
        return next(times)

    watchdog = Watchdog(lambda _: None, sweep)
    watchdog.add(RunningCall("a", "a", time.monotonic()))
    for _ in range(3):
        assert swept.acquire(timeout=10)
