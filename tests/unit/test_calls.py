"""One call under way: how it is interrupted, by whom, and what it may ask."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from aenv_ray.runtime.calls import Call, CallInterrupted, Watchdog, current_call

WAIT_S = 10.0


def in_future(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


class Running:
    """A call in a thread of its own."""

    def __init__(self, function: Callable[..., Any], call: Call | None = None) -> None:
        self.call = call or Call("id", "tool", in_future())
        self.began = threading.Event()
        self.outcome: Any = None
        self._function = function
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self.began.wait(WAIT_S)

    def _run(self) -> None:
        try:
            self.outcome = self.call.run_sync(self._function, {"began": self.began})
        except BaseException as exc:  # noqa: BLE001  # what it raised is what the test looks at
            self.outcome = exc
            self.began.set()

    def end(self) -> Any:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.outcome


def spin(began: threading.Event) -> None:
    began.set()
    while True:
        pass


def spin_and_swallow(began: threading.Event) -> None:
    began.set()
    while True:
        try:
            while True:
                pass
        except Exception:  # noqa: BLE001  # what careless tools do
            pass


@pytest.mark.parametrize("function", [spin, spin_and_swallow])
def test_a_python_function_that_spins_is_interrupted(function: Callable[..., Any]) -> None:
    """Invariant 11: the tool is told, also one that swallows every `Exception`."""
    running = Running(function)
    running.call.stop("cancelled")
    assert isinstance(running.end(), CallInterrupted)
    assert running.call.is_cancelled


def test_a_call_that_was_stopped_before_it_ran_does_not_run() -> None:
    """Invariant 11."""
    call = Call("id", "tool", in_future())
    call.stop("cancelled")
    ran: list[bool] = []
    with pytest.raises(CallInterrupted):
        call.run_sync(lambda: ran.append(True), {})
    assert ran == []


def test_an_interrupt_after_the_end_reaches_nobody() -> None:
    call = Call("id", "tool", in_future())
    assert call.run_sync(lambda: 7, {}) == 7
    call.stop("cancelled")
    total = sum(range(100_000))
    assert total == 4_999_950_000


def test_the_first_reason_stays() -> None:
    call = Call("id", "tool", in_future())
    call.stop("timeout")
    call.stop("cancelled")
    assert call.stop_reason == "timeout"


def test_a_function_may_ask_whether_it_is_cancelled() -> None:
    seen = threading.Event()

    async def run() -> None:
        call = current_call()
        assert not call.is_cancelled
        call.stop("cancelled")
        assert current_call().is_cancelled
        seen.set()

    asyncio.run(Call("id", "tool", in_future()).run_async(run, {}))
    assert seen.is_set()


def test_an_async_call_is_cancelled_once_by_what_was_bound() -> None:
    call = Call("id", "tool", in_future())
    stopped: list[str] = []
    call.bind_stop(lambda: stopped.append("bound"))
    call.stop("cancelled")
    call.stop("cancelled")
    assert stopped == ["bound"]


def test_a_stop_before_the_binding_is_not_lost() -> None:
    """Invariant 11."""
    call = Call("id", "tool", in_future())
    call.stop("cancelled")
    stopped: list[str] = []
    call.bind_stop(lambda: stopped.append("late"))
    assert stopped == ["late"]


def test_current_call_is_the_running_one_and_afterwards_none() -> None:
    call = Call("id", "tool", in_future())
    assert call.run_sync(current_call, {}) is call
    assert current_call() is not call


def test_a_failing_function_leaves_no_current_call() -> None:
    call = Call("id", "tool", in_future())
    with pytest.raises(ZeroDivisionError):
        call.run_sync(lambda: 1 // 0, {})
    assert current_call() is not call


def test_outside_of_a_call_the_current_one_has_no_deadline_and_no_listener() -> None:
    call = current_call()
    assert call.remaining_s == float("inf")
    assert not call.is_cancelled
    call.progress(0.5, 1.0, "half")


def test_progress_reaches_who_listens() -> None:
    heard: list[tuple[float, float | None, str | None]] = []
    call = Call("id", "tool", in_future(), lambda *news: heard.append(news))
    call.run_sync(lambda: current_call().progress(1.0, 2.0, "half"), {})
    assert heard == [(1.0, 2.0, "half")]


def test_what_remains_is_never_negative() -> None:
    assert Call("id", "tool", time.monotonic() - 5.0).remaining_s == 0.0
    assert 55.0 < Call("id", "tool", in_future()).remaining_s <= 60.0


class Expiries:
    """A watchdog and whom it stopped."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._changed = threading.Condition()
        self.watchdog = Watchdog(self._note)

    def _note(self, call: Call) -> None:
        call.stop("timeout")
        with self._changed:
            self.calls.append(call.call_id)
            self._changed.notify_all()

    def wait_for(self, count: int) -> list[str]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.calls) >= count, WAIT_S)
        return self.calls


def test_a_deadline_stops_a_call_that_spins() -> None:
    """Invariant 9: every wait has a deadline."""
    expiries = Expiries()
    running = Running(spin, Call("id", "tool", in_future(0.05)))
    expiries.watchdog.add(running.call)
    assert expiries.wait_for(1) == ["id"]
    assert isinstance(running.end(), CallInterrupted)
    assert running.call.stop_reason == "timeout"


def test_an_earlier_deadline_that_comes_later_is_met_first() -> None:
    expiries = Expiries()
    expiries.watchdog.add(Call("minute", "tool", in_future(60.0)))
    expiries.watchdog.add(Call("soon", "tool", in_future(0.02)))
    assert expiries.wait_for(1) == ["soon"]


def test_a_call_that_ended_in_time_is_left_alone() -> None:
    expiries = Expiries()
    ended = Call("ended", "tool", in_future(0.02))
    expiries.watchdog.add(ended)
    expiries.watchdog.remove(ended)
    expiries.watchdog.remove(ended)
    expiries.watchdog.add(Call("late", "tool", in_future(0.04)))
    assert expiries.wait_for(1) == ["late"]
    assert not ended.is_cancelled


def test_each_call_expires_once() -> None:
    expiries = Expiries()
    names = [f"call-{number}" for number in range(20)]
    for name in names:
        expiries.watchdog.add(Call(name, "tool", in_future(0.01)))
    expiries.watchdog.add(Call("last", "tool", in_future(0.06)))
    assert sorted(expiries.wait_for(21)) == sorted([*names, "last"])
