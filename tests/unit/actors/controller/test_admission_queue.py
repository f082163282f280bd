"""Who waits for room in a full cluster, and who gets it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv_ray.actors.controller.admission_queue import (
    MOST_BUNDLES,
    OVERTAKEN_S,
    AdmissionQueue,
    Ticket,
    bundles,
    missing_room,
)
from aenv_ray.actors.controller.placement import HostLoad, Need
from aenv_ray.ids import InstanceId


def ticket(owner: str, count: int = 1, since: float = 0.0, job: str | None = None) -> Ticket:
    ids = tuple(InstanceId(f"{owner}-{since:g}-{n}") for n in range(count))
    return Ticket(ids, owner, job, since)


def backlog(*tickets: Ticket) -> AdmissionQueue:
    waiting = AdmissionQueue()
    for one in tickets:
        waiting.add(one)
    return waiting


def room(free: int, capacity: int = 100, name: str = "h") -> HostLoad:
    return HostLoad(name, f"node-{name}", capacity - free, capacity)


def served(waiting: AdmissionQueue, *hosts: HostLoad, now: float = 0.0) -> list[Ticket]:
    return [grant.ticket for grant in waiting.grants(list(hosts), now)]


def test_owners_take_turns_however_many_creates_one_of_them_has() -> None:
    """Fair by owner."""
    many = [ticket("many", since=float(n)) for n in range(10)]
    few = [ticket("few", since=100.0 + n) for n in range(2)]
    given_out = served(backlog(*many, *few), room(4))
    assert Counter(one.owner for one in given_out) == {"many": 2, "few": 2}
    assert [one for one in given_out if one.owner == "many"] == many[:2], "in their order"


def test_turns_count_instances_not_creates() -> None:
    groups = [ticket("groups", 4, since=float(n)) for n in range(3)]
    singles = [ticket("singles", since=50.0 + n) for n in range(8)]
    given_out = served(backlog(*groups, *singles), room(8))
    assert sum(len(one.ids) for one in given_out if one.owner == "singles") == 4


def test_who_comes_anew_is_not_served_before_all_others() -> None:
    waiting = backlog(*[ticket("old", since=float(n)) for n in range(50)])
    assert len(served(waiting, room(40))) == 40
    for n in range(10):
        waiting.add(ticket("new", since=100.0 + n))
    given_out = served(waiting, room(4))
    assert Counter(one.owner for one in given_out) == {"old": 2, "new": 2}


def test_a_group_is_given_all_its_slots_or_none_and_they_may_be_on_several_hosts() -> None:
    group = ticket("a", 5)
    waiting = backlog(group)
    assert waiting.grants([room(2, name="x"), room(2, name="y")], 0.0) == []
    (grant,) = waiting.grants([room(2, name="x"), room(3, name="y")], 0.0)
    assert {name: len(ids) for name, ids in grant.shares.items()} == {"x": 2, "y": 3}
    assert sorted(i for ids in grant.shares.values() for i in ids) == sorted(group.ids)
    assert len(waiting) == 0


def test_independent_instances_get_the_slots_that_there_are() -> None:
    """Invariant 9: those without a place are asked for again, and counted until then."""
    many = replace(ticket("a", 5), is_divisible=True)
    waiting = backlog(many)
    assert waiting.grants([room(0)], 0.0) == []
    (grant,) = waiting.grants([room(1, name="x"), room(2, name="y")], 0.0)
    assert (grant.granted, grant.left) == (3, 2)
    assert sorted(i for ids in grant.shares.values() for i in ids) == sorted(many.ids[:3])
    assert len(waiting) == 0


def test_a_group_that_does_not_fit_is_overtaken_for_a_while_and_then_by_nobody() -> None:
    large, small = ticket("large", 4), ticket("small", since=1.0)
    assert served(backlog(large, small), room(2, capacity=4)) == [small]
    waiting = backlog(large, small)
    assert served(waiting, room(2, capacity=4), now=OVERTAKEN_S) == []
    assert served(waiting, room(4, capacity=4), now=OVERTAKEN_S) == [large]


def test_nobody_is_kept_waiting_for_a_group_that_needs_nodes_that_are_not_there() -> None:
    large, small = ticket("large", 9), ticket("small", since=1.0)
    assert served(backlog(large, small), room(2, capacity=4), now=10 * OVERTAKEN_S) == [small]


def test_who_waits_no_longer_is_given_nothing() -> None:
    gone, stays = ticket("a", job="01"), ticket("a", since=1.0, job="02")
    waiting = backlog(gone, stays)
    waiting.remove(gone)
    waiting.remove(gone)
    assert waiting.instances == 1
    assert served(waiting, room(5)) == [stays]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6)), max_size=12),
    st.lists(st.integers(0, 6), max_size=4),
)
def test_nothing_is_given_twice_and_no_host_more_than_it_holds(
    asked: list[tuple[str, int]], free: list[int]
) -> None:
    tickets = [ticket(owner, count, float(n)) for n, (owner, count) in enumerate(asked)]
    waiting = backlog(*tickets)
    hosts = [room(f, capacity=6, name=f"h{n}") for n, f in enumerate(free)]
    grants = waiting.grants(hosts, 0.0)
    ids = [i for grant in grants for share in grant.shares.values() for i in share]
    assert len(ids) == len(set(ids))
    assert len(grants) + len(waiting) == len(tickets)
    for host in hosts:
        assert sum(len(grant.shares.get(host.name, ())) for grant in grants) <= host.free


@pytest.mark.parametrize(
    ("missing", "slots", "expected"),
    [(-2, 4, []), (0, None, []), (3, None, [1, 1, 1]), (9, 4, [4, 4, 1]), (8, 4, [4, 4])],
)
def test_demand_is_what_is_missing_in_pieces_that_fit_a_node(
    missing: int, slots: int | None, expected: list[int]
) -> None:
    assert bundles(missing, slots) == expected


@pytest.mark.parametrize(
    ("missing", "slots", "expected"),
    [(2, 4, [3, 3]), (3, 8, [6, 3]), (1, None, [1, 1, 1]), (2, 2, [2, 2])],
)
def test_demand_for_instances_of_three_places_is_in_pieces_that_fit_a_node(
    missing: int, slots: int | None, expected: list[int]
) -> None:
    assert bundles(missing, slots, places=3) == expected


def test_demand_is_bounded() -> None:
    assert len(bundles(10**6, 2)) == len(bundles(10**6, None, 3)) == MOST_BUNDLES


def on(engine: str, free: int) -> HostLoad:
    return HostLoad(engine, f"node-{engine}", 100 - free, 100, (engine,))


def needing(owner: str, engines: tuple[str, ...], count: int = 1, since: float = 0.0) -> Ticket:
    return replace(ticket(owner, count, since), need=Need(engines))


def test_instances_go_where_one_of_their_engines_runs() -> None:
    """An instance that may run on several engines goes where there is room."""
    pods, any_of_two = (
        needing("a", ("docker", "kubernetes"), 2),
        needing("b", ("process", "docker")),
    )
    hosts = [on("process", 0), on("kubernetes", 3), on("docker", 1)]
    grants = backlog(pods, any_of_two, needing("c", ("process",))).grants(hosts, 0.0)
    assert {grant.ticket.owner: set(grant.shares) for grant in grants} == {
        "a": {"kubernetes"}, "b": {"docker"},
    }  # fmt: skip


def test_a_group_that_waits_for_one_engine_holds_up_no_other() -> None:
    big, small = needing("a", ("docker",), 5), needing("a", ("process",), since=1.0)
    hosts = [on("docker", 4), on("process", 1)]
    late = needing("b", ("docker",), since=2.0)
    given_out = backlog(big, small, late).grants(hosts, OVERTAKEN_S + 1)
    assert [grant.ticket for grant in given_out] == [small]


def test_instances_that_may_be_on_one_node_only_get_slots_there() -> None:
    tied = replace(ticket("a"), need=Need(node_ids=("node-h1",)))
    waiting = backlog(tied, ticket("b", 2, since=1.0))
    (grant,) = waiting.grants([room(2, name="h0"), room(0, name="h1")], 0.0)
    assert (grant.ticket.owner, set(grant.shares)) == ("b", {"h0"})
    (grant,) = waiting.grants([room(2, name="h0"), room(1, name="h1")], 0.0)
    assert (grant.ticket, set(grant.shares)) == (tied, {"h1"})


def test_an_owner_whose_grant_failed_is_not_served_before_all_others() -> None:
    waiting = backlog(ticket("a", 50))
    (grant,) = waiting.grants([room(50)], 0.0)
    waiting.take_back(grant)
    waiting.add(ticket("b", since=1.0))
    waiting.grants([room(50)], 2.0)
    for since in (3.0, 4.0):
        waiting.add(ticket("a", since=since))
    waiting.add(ticket("b", since=5.0))
    (grant,) = waiting.grants([room(1)], 6.0)
    assert grant.ticket.owner == "b"


def test_slots_go_first_to_instances_that_may_be_on_one_node_only() -> None:
    tied = Need(node_ids=("node-x",))
    hosts = [room(1, name="x"), room(1, name="y")]
    assert missing_room({Need(("process",)): 1, tied: 1}, hosts) == {}
    assert missing_room({Need(("process",)): 1, tied: 2}, hosts) == {tied: 1}


def test_the_slots_that_are_missing_are_counted_by_engine() -> None:
    hosts = [on("process", 3), on("docker", 2)]
    wanted = {Need(("docker",)): 3, Need(("process", "docker")): 2, Need(()): 4}
    assert missing_room(wanted, hosts) == {Need(("docker",)): 1, Need(()): 3}


def test_an_instance_gets_all_its_places_on_one_host() -> None:
    """Invariant 14: those for inner instances, which an agent may create later."""
    group = replace(ticket("a", 2), need=Need(places=3))
    waiting = backlog(group)
    assert waiting.grants([room(3, name="x"), room(2, name="y"), room(2, name="z")], 0.0) == []
    (grant,) = waiting.grants([room(4, name="x"), room(3, name="y")], 0.0)
    assert {name: len(ids) for name, ids in grant.shares.items()} == {"x": 1, "y": 1}
    waiting.add(replace(ticket("a"), need=Need(places=17)))
    assert len(waiting.grants([room(4, capacity=4)], 0.0)) == 1, "all slots of a smaller host"


def test_turns_count_the_places_of_instances() -> None:
    nested = [replace(ticket("nested", since=float(n)), need=Need(places=3)) for n in range(4)]
    plain = [ticket("plain", since=50.0 + n) for n in range(9)]
    given_out = served(backlog(*nested, *plain), room(12))
    assert Counter(one.owner for one in given_out) == {"nested": 2, "plain": 6}


def test_missing_places_are_counted_where_instances_have_several() -> None:
    hosts = [room(4, capacity=4, name="x"), room(2, capacity=4, name="y")]
    assert missing_room({Need((), 3): 3, Need(()): 4}, hosts) == {Need((), 3): 2, Need(()): 1}
