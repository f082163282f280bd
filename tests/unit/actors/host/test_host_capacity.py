"""The slots of a host, some of them reserved for creates that waited."""

from __future__ import annotations

import pytest

from aenv_ray.actors.host.host_capacity import HostCapacity
from aenv_ray.errors import CapacityExceeded, FabricUnavailable
from aenv_ray.ids import HostId, InstanceId
from tests.fake_clock import FakeClock

A, B, C = InstanceId("a"), InstanceId("b"), InstanceId("c")


class Bench:
    """A host with three slots."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.present = 0
        self.capacity = HostCapacity(HostId("h"), 3, lambda: self.present, self.clock)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_reserved_place_is_given_to_nobody_else(bench: Bench) -> None:
    bench.present = 2
    assert bench.capacity.reserve([A], 30.0)
    with pytest.raises(CapacityExceeded):
        bench.capacity.admit(dict.fromkeys([B], 1))
    assert not bench.capacity.reserve([B], 30.0)
    bench.capacity.admit(dict.fromkeys([A], 1))
    assert bench.capacity.taken() == 2, "the instance now uses the place itself"


def test_an_id_has_one_reservation_which_expires(bench: Bench) -> None:
    assert bench.capacity.reserve([A, B], 30.0)
    assert bench.capacity.reserve([A, B], 30.0)
    assert bench.capacity.taken() == 2
    bench.clock.advance(31.0)
    assert bench.capacity.taken() == 0
    bench.capacity.admit(dict.fromkeys([A, B, C], 1))


def test_a_held_host_accepts_only_reserved_instances(bench: Bench) -> None:
    """Nobody overtakes the creates that wait."""
    bench.capacity.hold(5.0)
    assert bench.capacity.reserve([A], 30.0)
    with pytest.raises(CapacityExceeded, match="have waited longer") as raised:
        bench.capacity.admit(dict.fromkeys([B], 1))
    assert raised.value.hint
    with pytest.raises(CapacityExceeded, match="have waited longer"):
        bench.capacity.admit(dict.fromkeys([A, B], 1))
    bench.capacity.admit(dict.fromkeys([A], 1))
    bench.capacity.admit(dict.fromkeys([], 1))
    bench.clock.advance(6.0)
    bench.capacity.admit(dict.fromkeys([B], 1))


def test_a_release_before_the_start_frees_the_reserved_place(bench: Bench) -> None:
    assert bench.capacity.reserve([A, B, C], 30.0)
    bench.capacity.forget([A, InstanceId("unknown")])
    assert bench.capacity.taken() == 2


def test_a_draining_host_accepts_only_what_has_its_place_already(bench: Bench) -> None:
    """Creates that were granted places go on; others are told to go to another host."""
    bench.present = 1
    assert bench.capacity.reserve([A], 30.0)
    bench.capacity.drain(60.0)
    assert bench.capacity.capacity == bench.capacity.taken() == 2, "nothing is free"
    assert not bench.capacity.reserve([B], 30.0)
    with pytest.raises(FabricUnavailable, match="drained") as raised:
        bench.capacity.admit(dict.fromkeys([B], 1))
    assert raised.value.hint
    bench.capacity.admit(dict.fromkeys([A], 1))
    bench.capacity.drain(0.0)
    bench.capacity.admit(dict.fromkeys([B], 1))
    assert bench.capacity.capacity == 3


def test_an_instance_takes_slots_for_its_inner_ones_which_are_always_accepted(
    bench: Bench,
) -> None:
    """Invariant 14: an agent that has inner instances created does not fill its cluster."""
    bench.capacity.admit({A: 3})
    bench.present = 1
    with pytest.raises(CapacityExceeded, match=r"1 of 3 slots in use; 1 more .* need 3"):
        bench.capacity.admit({A: 3})
    assert not bench.capacity.reserve([A], 30.0, 3)
    assert bench.capacity.reserve([A], 30.0, 2)
    assert bench.capacity.taken() == 3
    bench.capacity.hold(60.0)
    bench.capacity.admit({B: 0, C: 0})
    bench.capacity.drain(60.0)
    bench.capacity.admit({B: 0, C: 0})
    bench.capacity.admit({A: 2})


def test_an_instance_with_more_places_than_a_host_has_slots_takes_them_all(bench: Bench) -> None:
    bench.capacity.admit({A: 17})
    assert bench.capacity.reserve([A], 30.0, 17)
    assert bench.capacity.taken() == 3
