"""The memory of call ids: an id runs once, and everyone who asks is told once."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv_ray.runtime.outcomes import Outcomes

LOST = b"lost"


def ask(outcomes: Outcomes, call_id: str) -> tuple[bool, list[bytes]]:
    told: list[bytes] = []
    return outcomes.begin(call_id, told.append, LOST), told


def test_an_unknown_id_runs_and_a_known_one_is_answered() -> None:
    """Invariant 1: no call runs a tool twice."""
    outcomes = Outcomes()
    runs, told = ask(outcomes, "a")
    assert runs
    assert told == []
    assert outcomes.pending == 1
    assert outcomes.finish("a", b"one")
    assert told == [b"one"]
    assert outcomes.pending == 0
    assert ask(outcomes, "a") == (False, [b"one"])


def test_a_repetition_while_it_runs_waits_for_the_same_outcome() -> None:
    """Invariant 1."""
    outcomes = Outcomes()
    _, first = ask(outcomes, "a")
    runs, second = ask(outcomes, "a")
    assert not runs
    outcomes.finish("a", b"one")
    assert first == second == [b"one"]


def test_the_first_outcome_stays() -> None:
    """A tool that ends after its deadline changes nothing for anyone."""
    outcomes = Outcomes()
    _, told = ask(outcomes, "a")
    assert outcomes.finish("a", b"timeout")
    assert not outcomes.finish("a", b"late result")
    assert told == [b"timeout"]
    assert ask(outcomes, "a")[1] == [b"timeout"]


def test_finishing_what_never_began_is_nothing() -> None:
    outcomes = Outcomes()
    assert not outcomes.finish("never", b"x")
    assert ask(outcomes, "never")[0]


def test_an_outcome_dropped_for_room_still_refuses_its_id() -> None:
    """Invariant 1: forgetting the bytes is not forgetting the call."""
    outcomes = Outcomes(max_bytes=10)
    for call_id in ("a", "b", "c"):
        ask(outcomes, call_id)
        outcomes.finish(call_id, call_id.encode() * 5)
    assert ask(outcomes, "a") == (False, [LOST])
    assert ask(outcomes, "b") == (False, [b"bbbbb"])
    assert ask(outcomes, "c") == (False, [b"ccccc"])


def test_the_newest_outcome_is_kept_whatever_its_size() -> None:
    outcomes = Outcomes(max_bytes=10)
    for call_id in ("a", "big"):
        ask(outcomes, call_id)
        outcomes.finish(call_id, call_id.encode() * 100)
    assert ask(outcomes, "a") == (False, [LOST])
    assert ask(outcomes, "big") == (False, [b"big" * 100])


def test_the_oldest_ids_are_forgotten_and_free_their_bytes() -> None:
    outcomes = Outcomes(max_ids=2, max_bytes=10)
    for call_id in "abcdef":
        ask(outcomes, call_id)
        outcomes.finish(call_id, call_id.encode() * 5)
    assert ask(outcomes, "e") == (False, [b"eeeee"])
    assert ask(outcomes, "f") == (False, [b"fffff"])
    assert ask(outcomes, "a")[0], "so long ago that no repetition can be under way"


def test_a_call_under_way_is_never_forgotten() -> None:
    """Invariant 1: also when many others pass it."""
    outcomes = Outcomes(max_ids=1, max_bytes=1)
    _, told = ask(outcomes, "slow")
    for number in range(20):
        ask(outcomes, str(number))
        outcomes.finish(str(number), b"xx")
    assert not ask(outcomes, "slow")[0]
    outcomes.finish("slow", b"done")
    assert told == [b"done"]


def test_a_waiter_may_ask_again() -> None:
    """It is told outside of the lock."""
    outcomes = Outcomes()
    inner: list[bytes] = []
    outcomes.begin("a", lambda _: outcomes.begin("a", inner.append, LOST), LOST)
    outcomes.finish("a", b"one")
    assert inner == [b"one"]


@pytest.mark.parametrize("finishers", [1, 4])
def test_of_many_threads_one_runs_and_all_are_told_once(finishers: int) -> None:
    """Invariant 1, with threads."""
    outcomes = Outcomes()
    told: list[bytes] = []
    runs: list[bool] = []
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait(10.0)
        ran = outcomes.begin("a", told.append, LOST)
        runs.append(ran)
        if ran:
            threads = [
                threading.Thread(target=outcomes.finish, args=("a", b"one"))
                for _ in range(finishers)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(10.0)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(10.0)
    assert runs.count(True) == 1
    assert told == [b"one"] * 8


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.booleans(), st.binary(max_size=6)), max_size=40)
)
def test_whatever_the_order_an_id_runs_once_and_each_asker_hears_at_most_once(
    events: list[tuple[str, bool, bytes]],
) -> None:
    """Invariant 1."""
    outcomes = Outcomes(max_bytes=8)
    ran: list[str] = []
    askers: list[list[bytes]] = []
    for call_id, begins, outcome in events:
        if begins:
            runs, told = ask(outcomes, call_id)
            askers.append(told)
            ran += [call_id] * runs
        else:
            outcomes.finish(call_id, outcome)
    assert len(ran) == len(set(ran))
    assert all(len(told) <= 1 for told in askers)
