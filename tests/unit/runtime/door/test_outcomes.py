"""The memory of call ids (invariant 1)."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from aenv_ray.runtime.door.outcomes import Outcomes

LOST = b"lost"


def test_only_the_first_call_of_an_id_runs_and_all_get_its_outcome() -> None:
    """Invariant 1."""
    outcomes, told = Outcomes(), []
    assert outcomes.begin("a", told.append, LOST)
    assert not outcomes.begin("a", told.append, LOST)
    assert told == []
    assert outcomes.pending == 1
    assert outcomes.finish("a", b"1")
    assert told == [b"1", b"1"]
    assert not outcomes.begin("a", told.append, LOST)
    assert told == [b"1", b"1", b"1"]
    assert outcomes.pending == 0


def test_the_first_outcome_stays() -> None:
    """A deadline and a late result race; the caller heard one of them."""
    outcomes, told = Outcomes(), []
    outcomes.begin("a", told.append, LOST)
    assert outcomes.finish("a", b"timeout")
    assert not outcomes.finish("a", b"result")
    assert not outcomes.finish("never", b"result")
    outcomes.begin("a", told.append, LOST)
    assert told == [b"timeout", b"timeout"]


def test_a_call_whose_outcome_was_dropped_is_reported_as_lost_and_not_run_again() -> None:
    """Invariants 1 and 12."""
    outcomes, told = Outcomes(max_bytes=10), []
    for name in ("a", "b", "c"):
        outcomes.begin(name, lambda _: None, LOST)
        outcomes.finish(name, b"x" * 6)
    for name in ("a", "b", "c"):
        assert not outcomes.begin(name, told.append, LOST)
    assert told == [LOST, LOST, b"x" * 6]


def test_the_newest_outcome_is_stored_whatever_its_size() -> None:
    outcomes, told = Outcomes(max_bytes=10), []
    outcomes.begin("big", told.append, LOST)
    outcomes.finish("big", b"x" * 1000)
    outcomes.begin("big", told.append, LOST)
    assert told == [b"x" * 1000] * 2


class Clock:
    """Seconds that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_an_old_outcome_is_dropped_and_its_call_does_not_run_again() -> None:
    """Invariant 1: the memory is bounded in time as well as in size."""
    clock, told = Clock(), []
    outcomes = Outcomes(max_age_s=300, clock=clock)
    for name in ("old", "young"):
        outcomes.begin(name, lambda _: None, LOST)
        outcomes.finish(name, b"x" * 100)
        clock.now += 200
    again = outcomes.expire()
    assert clock.now < again < clock.now + 300
    assert not outcomes.begin("old", told.append, LOST)
    assert not outcomes.begin("young", told.append, LOST)
    assert told == [LOST, b"x" * 100]
    clock.now = again
    assert outcomes.expire() == float("inf")
    assert outcomes._bytes == 0
    assert not outcomes.begin("young", told.append, LOST)
    assert told[2:] == [LOST]


def test_outcomes_of_a_busy_minute_expire_together() -> None:
    """An instance that has become idle is woken a few times, not once for each call."""
    clock = Clock()
    outcomes = Outcomes(max_age_s=300, clock=clock)
    for number in range(600):
        outcomes.begin(str(number), lambda _: None, LOST)
        outcomes.finish(str(number), b"x")
        clock.now += 0.1
    wakes = 0
    while (again := outcomes.expire()) < float("inf"):
        clock.now, wakes = again, wakes + 1
    assert wakes <= 2


def test_a_pending_call_does_not_expire() -> None:
    clock, told = Clock(), []
    outcomes = Outcomes(max_age_s=300, clock=clock)
    outcomes.begin("slow", told.append, LOST)
    clock.now += 10_000
    outcomes.expire()
    assert outcomes.pending == 1
    outcomes.finish("slow", b"late")
    assert told == [b"late"]


def test_ids_are_forgotten_oldest_first() -> None:
    outcomes = Outcomes(max_ids=3)
    for name in "abcd":
        outcomes.begin(name, lambda _: None, LOST)
        outcomes.finish(name, name.encode())
    assert not outcomes.begin("b", lambda _: None, LOST)
    assert outcomes.begin("a", lambda _: None, LOST)
    assert outcomes._bytes == 3


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40))
def test_an_id_runs_at_most_once_in_any_order_of_events(events: list[tuple[str, bool]]) -> None:
    """Invariant 1."""
    outcomes, runs, told, asked = Outcomes(), {}, [], 0
    for name, is_begin in events:
        if is_begin:
            asked += 1
            runs[name] = runs.get(name, 0) + outcomes.begin(name, told.append, LOST)
        else:
            outcomes.finish(name, name.encode())
    for name in runs:
        outcomes.finish(name, name.encode())
    assert all(count == 1 for count in runs.values())
    assert len(told) == asked
    assert LOST not in told


def test_threads_that_repeat_an_id_at_once_run_it_once() -> None:
    """Invariant 1."""
    outcomes, barrier = Outcomes(), threading.Barrier(8)
    ran: list[int] = []
    told: list[bytes] = []

    def repeat(number: int) -> None:
        barrier.wait()
        for call in range(200):
            if outcomes.begin(str(call), told.append, LOST):
                ran.append(number)
                outcomes.finish(str(call), b"done")

    threads = [threading.Thread(target=repeat, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ran) == 200
    assert told == [b"done"] * 1600
