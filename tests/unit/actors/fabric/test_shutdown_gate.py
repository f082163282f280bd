"""What uses a connection is out of it before Ray ends, and nothing goes in after."""

from __future__ import annotations

import threading

import pytest

from aenv_ray.actors.fabric import driver_api
from aenv_ray.actors.fabric.shutdown_gate import ShutdownGate, gated
from aenv_ray.errors import FabricUnavailable


class Worker:
    def __init__(self) -> None:
        self.gate = ShutdownGate()

    @gated
    def outer(self) -> str:
        return self.inner("done")

    @gated
    def inner(self, text: str) -> str:
        return text


def test_work_passes_an_open_gate_and_may_enter_again_inside() -> None:
    worker = Worker()
    assert worker.outer() == "done"
    assert worker.gate.close(0.0), "all has left"


def test_a_closed_gate_lets_nothing_in_and_says_the_way_out() -> None:
    worker = Worker()
    assert worker.gate.close(0.0)
    with pytest.raises(FabricUnavailable, match="shut down") as caught:
        worker.outer()
    assert "init()" in str(caught.value.hint)


def test_closing_waits_for_what_is_inside_which_is_told_at_its_next_step() -> None:
    gate, entered, may_look = ShutdownGate(), threading.Event(), threading.Event()
    told: list[FabricUnavailable] = []

    def work() -> None:
        with gate:
            entered.set()
            assert may_look.wait(30)
            try:
                gate.check()
            except FabricUnavailable as exc:
                told.append(exc)

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(30)
    assert not gate.close(0.0), "the thread is still inside"
    may_look.set()
    assert gate.close(30.0)
    assert told
    thread.join(30)


def test_work_that_runs_after_the_shutdown_does_not_connect_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread of a pool that starts late must not bring up a Ray that nobody ends."""
    monkeypatch.setattr(driver_api, "_fabric", None)
    connect = driver_api.connector()
    driver_api.shutdown()
    with pytest.raises(FabricUnavailable, match="shut down"):
        connect()


def test_a_gate_that_fails_raises_its_error_also_for_work_under_way() -> None:
    gate = ShutdownGate()
    with gate:
        gate.fail("the head was lost", "start again")
        with pytest.raises(FabricUnavailable, match="head was lost") as caught:
            gate.check()
    assert caught.value.hint == "start again"
    with pytest.raises(FabricUnavailable, match="head was lost"), gate:
        raise AssertionError("it let something in")
