"""Where instances go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv_ray.actors.controller.placement import (
    HostLoad,
    Need,
    check_capacity,
    emptiest,
    host_capacities,
    may_grow,
    near_node,
    needed,
    shared_host_names,
    spread,
    usable,
)
from aenv_ray.actors.fabric import shared_hosts
from aenv_ray.actors.fabric.shared_hosts import SharedHosts
from aenv_ray.actors.fabric.waits import BlockingWaits
from aenv_ray.actors.host.host_capacity import HOST_CAPACITY
from aenv_ray.actors.ray_shell.nodes import NodeFacts
from aenv_ray.blocking import run_blocking
from aenv_ray.errors import CapacityExceeded
from aenv_ray.ids import new_instance_id
from aenv_ray.models import InstanceSpec

HOSTS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=6
).map(
    lambda rows: [
        HostLoad(f"h{index}", f"n{index}", instances, capacity)
        for index, (instances, capacity) in enumerate(rows)
    ]
)  # fmt: skip


@given(HOSTS, st.integers(0, 200))
def test_all_are_placed_or_none(hosts: list[HostLoad], count: int) -> None:
    free = sum(host.free for host in hosts)
    if count > free:
        with pytest.raises(CapacityExceeded) as raised:
            spread(count, hosts)
        assert raised.value.retry_after_s > 0
        assert str(count) in raised.value.message
        return
    given_out = spread(count, hosts)
    assert sum(given_out.values()) == count
    assert all(number > 0 for number in given_out.values())
    for host in hosts:
        assert given_out.get(host.name, 0) <= host.free


@given(HOSTS, st.integers(1, 200))
def test_the_fullest_stays_as_empty_as_possible(hosts: list[HostLoad], count: int) -> None:
    if count > sum(host.free for host in hosts):
        return
    given_out = spread(count, hosts)
    after = {host.name: host.instances + given_out.get(host.name, 0) for host in hosts}
    for taken in given_out:
        for other in hosts:
            if given_out.get(other.name, 0) < other.free:
                assert after[taken] <= after[other.name] + 1


@given(HOSTS, st.integers(0, 50))
def test_the_same_question_has_the_same_answer(hosts: list[HostLoad], count: int) -> None:
    if count <= sum(host.free for host in hosts):
        assert spread(count, hosts) == spread(count, list(reversed(hosts)))


@given(HOSTS, st.integers(0, 60), st.integers(2, 9))
def test_each_instance_gets_all_its_places_on_its_host(
    hosts: list[HostLoad], count: int, places: int
) -> None:
    """One that needs more than a host has takes all of it."""
    if count > sum(host.room(places) for host in hosts):
        with pytest.raises(CapacityExceeded, match=f"of {places} slots each, inner instances"):
            spread(count, hosts, places)
        return
    given_out = spread(count, hosts, places)
    assert sum(given_out.values()) == count
    for host in hosts:
        number = given_out.get(host.name, 0)
        after = host.taking(number, places)
        assert number == 0 or after.instances <= max(host.capacity, 1)


@given(HOSTS.filter(bool), st.integers(0, 60))
def test_inner_instances_are_always_placed_and_prefer_hosts_with_room(
    hosts: list[HostLoad], count: int
) -> None:
    """Invariant 14."""
    given_out = spread(count, hosts, places=0)
    assert sum(given_out.values()) == count
    roomy = {host.name for host in hosts if host.free}
    assert not roomy or given_out.keys() <= roomy
    node = hosts[0].node_id
    assert near_node(hosts, node, 1, 0) == hosts[:1]


class Controller:
    """Tells of two hosts, one of them full, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.engines: tuple[str, ...] = ()
        self.shared_hosts = self

    def remote(self, patience_s: float, wanted: int, need: Need) -> list[tuple[HostLoad, None]]:
        assert patience_s > 0
        assert wanted > 0
        assert need.engines == self.engines
        assert need.places > 0
        self.asked += 1
        return [(HostLoad("a", "n", HOST_CAPACITY), None), (HostLoad("b", "m", 0), None)]


def test_a_group_that_no_empty_cluster_holds_is_refused_before_it_is_made() -> None:
    controller = Controller()
    hosts = SharedHosts(controller, BlockingWaits(lambda answer, *_: answer))
    run_blocking(hosts.check_size(HOST_CAPACITY))
    assert controller.asked == 0, "any one host holds it"
    run_blocking(hosts.check_size(2 * HOST_CAPACITY))  # once what is there is released, it fits
    with pytest.raises(
        CapacityExceeded, match=f"10000000 .* {2 * HOST_CAPACITY} at most"
    ) as raised:
        run_blocking(hosts.check_size(10**7))
    assert raised.value.hint
    with pytest.raises(CapacityExceeded, match="2 at most"):
        run_blocking(hosts.check_size(3, places=HOST_CAPACITY))
    check_capacity(5, 5)
    with pytest.raises(CapacityExceeded):
        check_capacity(6, 5)


def test_a_host_over_its_capacity_has_no_room() -> None:
    assert HostLoad("h", "n", 9, 4).free == 0


@given(st.lists(st.sampled_from("abcd"), max_size=20), st.sets(st.sampled_from("abcd")))
def test_a_dedicated_host_goes_where_the_fewest_are(taken: list[str], nodes: set[str]) -> None:
    node = emptiest(nodes, taken)
    if not nodes:
        assert node is None
        return
    assert node in nodes
    assert taken.count(node) == min(taken.count(other) for other in nodes)


@pytest.mark.parametrize(("cores", "hosts"), [(0, 1), (1, 1), (8, 1), (16, 2), (70, 8)])
def test_a_node_has_a_shared_host_for_each_eight_cores(cores: int, hosts: int) -> None:
    names = shared_host_names("node-with-a-long-id", NodeFacts(cores))
    assert len(names) == hosts


def test_a_node_holds_what_it_declares_divided_among_its_hosts() -> None:
    assert host_capacities(NodeFacts(16, slots=5)) == [3, 2]
    assert host_capacities(NodeFacts(64, slots=2)) == [1, 1]
    assert host_capacities(NodeFacts(2)) == [HOST_CAPACITY]
    assert host_capacities(NodeFacts(16, slots=0)) == []


def test_a_head_without_cores_leaves_instances_to_others() -> None:
    head, plain = NodeFacts(0, is_head=True), NodeFacts(2, is_head=True)
    worker = NodeFacts(2, slots=4)
    assert not head.takes_instances
    assert NodeFacts(0).takes_instances, "only a head says something by having no cores"
    assert may_grow([head])
    assert may_grow([plain, worker])
    assert not may_grow([plain, NodeFacts(2)])


@given(st.lists(st.integers(1, 5), max_size=6), st.integers(-3, 40))
def test_as_few_idle_nodes_are_used_as_are_needed(slots: list[int], missing: int) -> None:
    idle = {f"n{index}": NodeFacts(1, slots=count) for index, count in enumerate(slots)}
    chosen = needed(idle, missing)
    places = [idle[node].slots or 0 for node in chosen]
    assert sum(places) >= min(missing, sum(slots))
    assert missing > 0 or not chosen
    assert not chosen or sum(places[:-1]) < missing


def test_where_slots_are_declared_nodes_without_take_nothing() -> None:
    head, worker, full = NodeFacts(8, is_head=True), NodeFacts(4, slots=2), NodeFacts(4, slots=0)
    assert usable({"h": head, "w": NodeFacts(4)}).keys() == {"h", "w"}
    assert usable({"h": head, "w": worker, "f": full}).keys() == {"w"}
    assert usable({"h": NodeFacts(0, is_head=True)}) == {}
    assert usable({"h": NodeFacts(8, slots=3, is_head=True), "w": worker}).keys() == {"h", "w"}


@given(HOSTS, st.integers(0, 60))
def test_a_near_node_is_used_if_it_has_room(hosts: list[HostLoad], count: int) -> None:
    """Otherwise, and for an unknown node, all hosts are candidates."""
    for host in hosts:
        is_near = 0 < count <= host.free
        assert near_node(hosts, host.node_id, count) == ([host] if is_near else hosts)
    assert near_node(hosts, "another", count) == hosts


def test_an_inner_instance_starts_on_the_full_node_of_its_outer_one() -> None:
    """Invariant 14: its slot was taken when the outer one was created."""
    spec = InstanceSpec(
        instance_id=new_instance_id("probe"), reference="probe@1.0.0", digest="d", ttl_s=60.0,
        engine="fake", near_node="n", places=0,
    )  # fmt: skip
    controller = Controller()
    hosts = SharedHosts(controller, BlockingWaits(lambda answer, *_: answer))
    controller.engines = ("fake",)
    (share,) = run_blocking(hosts.place([spec]))
    assert share.name == "a", "the full one"
    (share,) = run_blocking(hosts.place([spec.model_copy(update={"places": 3})]))
    assert share.name == "b"


@pytest.mark.parametrize("may_queue", [True, False])
def test_what_did_not_fit_a_moment_ago_joins_the_queue_at_once(
    monkeypatch: pytest.MonkeyPatch, may_queue: bool
) -> None:
    """The controller is not asked again for each create of a full cluster."""
    now = 1000.0
    monkeypatch.setattr(shared_hosts.time, "monotonic", lambda: now)
    spec = InstanceSpec(
        instance_id=new_instance_id("probe"), reference="probe@1.0.0", digest="d", ttl_s=60.0,
        engine="fake", places=HOST_CAPACITY,
    )  # fmt: skip
    controller = Controller()
    controller.engines = ("fake",)
    hosts = SharedHosts(controller, BlockingWaits(lambda answer, *_: answer))
    (share,) = run_blocking(hosts.place_some([spec, spec], may_queue=may_queue))
    assert (share.name, len(share.specs), controller.asked) == ("b", 1, 1)
    run_blocking(hosts.place_some([spec], may_queue=may_queue))
    assert controller.asked == (1 if may_queue else 2)
    now += shared_hosts.FRESH_S
    run_blocking(hosts.place_some([spec], may_queue=may_queue))
    assert controller.asked == (2 if may_queue else 3)
