"""The places of a host: some are kept for those who waited for them."""

from __future__ import annotations

import pytest

from aenv_ray.actors.host.host_capacity import HostCapacity
from aenv_ray.clock import FakeClock
from aenv_ray.errors import CapacityExceeded
from aenv_ray.ids import HostId, InstanceId

A, B, C = InstanceId("a"), InstanceId("b"), InstanceId("c")


class Bench:
    """Three places, of which a number is taken."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.present = 0
        self.places = HostCapacity(HostId("h"), 3, lambda: self.present, self.clock)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_place_that_is_kept_is_given_to_nobody_else(bench: Bench) -> None:
    bench.present = 2
    assert bench.places.keep([A], 30.0)
    with pytest.raises(CapacityExceeded):
        bench.places.admit([B])
    assert not bench.places.keep([B], 30.0)
    bench.places.admit([A])
    assert bench.places.taken() == 2, "it takes its place by being there"


def test_a_place_is_kept_once_for_an_id_and_not_for_ever(bench: Bench) -> None:
    assert bench.places.keep([A, B], 30.0)
    assert bench.places.keep([A, B], 30.0)
    assert bench.places.taken() == 2
    bench.clock.advance(31.0)
    assert bench.places.taken() == 0
    bench.places.admit([A, B, C])


def test_while_others_wait_only_they_are_let_in(bench: Bench) -> None:
    """Design D9: nobody overtakes those who wait."""
    bench.places.hold(5.0)
    assert bench.places.keep([A], 30.0)
    with pytest.raises(CapacityExceeded, match="wait longer") as raised:
        bench.places.admit([B])
    assert raised.value.hint
    with pytest.raises(CapacityExceeded, match="wait longer"):
        bench.places.admit([A, B])
    bench.places.admit([A])
    bench.places.admit([])
    bench.clock.advance(6.0)
    bench.places.admit([B])


def test_what_is_released_before_it_starts_gives_its_place_back(bench: Bench) -> None:
    assert bench.places.keep([A, B, C], 30.0)
    bench.places.forget([A, InstanceId("unknown")])
    assert bench.places.taken() == 2
