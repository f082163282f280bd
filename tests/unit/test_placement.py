"""Where new instances go: never too many on one host, all or nothing, and even."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv_ray.actors.placement import HOST_CAPACITY, HostLoad, spread
from aenv_ray.errors import CapacityExceeded


@st.composite
def host_lists(draw: st.DrawFn) -> list[HostLoad]:
    sizes = draw(
        st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=0, max_size=6)
    )
    return [
        HostLoad(f"host-{index}", f"node-{index % 2}", instances, capacity)
        for index, (instances, capacity) in enumerate(sizes)
    ]


@given(hosts=host_lists(), count=st.integers(0, 130))
def test_all_instances_are_placed_or_none(hosts: list[HostLoad], count: int) -> None:
    free = sum(host.free for host in hosts)
    if count > free:
        with pytest.raises(CapacityExceeded, match=f"{count} instances do not fit: {free} of"):
            spread(count, hosts)
        return
    given_to = spread(count, hosts)
    assert sum(given_to.values()) == count
    assert all(n > 0 for n in given_to.values())
    by_name = {host.name: host for host in hosts}
    assert all(n <= by_name[name].free for name, n in given_to.items())


@given(hosts=host_lists(), data=st.data())
def test_no_instance_could_move_to_an_emptier_host(
    hosts: list[HostLoad], data: st.DataObject
) -> None:
    """The fullest host stays as empty as possible: moving one never makes it more even."""
    count = data.draw(st.integers(0, sum(host.free for host in hosts)))
    given_to = spread(count, hosts)
    after = {host.name: host.instances + given_to.get(host.name, 0) for host in hosts}
    with_room = [h for h in hosts if given_to.get(h.name, 0) < h.free]
    for name in given_to:
        for other in with_room:
            assert after[name] <= after[other.name] + 1


@given(hosts=host_lists(), data=st.data())
def test_the_same_load_is_always_divided_the_same_way(
    hosts: list[HostLoad], data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, sum(host.free for host in hosts)))
    assert spread(count, hosts) == spread(count, list(reversed(hosts)))


def test_no_host_is_full_when_nothing_is_asked_for() -> None:
    assert spread(0, []) == {}
    assert spread(0, [HostLoad("a", "n", 0)]) == {}


def test_a_refusal_says_when_to_try_again_and_what_to_do() -> None:
    with pytest.raises(CapacityExceeded, match="0 of 0 places on 0 hosts") as caught:
        spread(1, [])
    assert caught.value.retryable
    assert caught.value.retry_after_s > 0
    assert caught.value.hint


def test_an_overfull_host_has_no_negative_room() -> None:
    over = HostLoad("a", "n", instances=HOST_CAPACITY + 3)
    assert over.free == 0
    assert spread(1, [over, HostLoad("b", "n", 5)]) == {"b": 1}
