"""How fast pools are filled, and what they never do, as decisions."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from aenv_ray.actors.host import pool
from aenv_ray.actors.host.pool import pool_key
from aenv_ray.ids import InstanceId
from tests.unit.actors.host.pool_world import ROOM, World, spec, world

__all__ = ["world"]  # a fixture


# --- rates and limits ----------------------------------------------------------------------------


def test_refills_are_few_at_once_and_fewer_while_somebody_waits(world: World) -> None:
    world.ask(100)
    now = world.clock.now()
    assert world.pools.refills(now, room=ROOM, is_busy=True).total() == 1
    assert world.pools.refills(now, room=ROOM, is_busy=True).total() == 0
    assert world.pools.refills(now, room=ROOM, is_busy=False).total() == pool.MOST_UNDER_WAY - 1
    assert world.pools.refills(now, room=ROOM, is_busy=False).total() == 0


def test_sandboxes_that_start_on_other_machines_do_not_count_for_the_node(world: World) -> None:
    """Pods start on other machines: many at a time, and those of this machine beside them."""
    world.ask(100, engine="kubernetes")
    world.ask(100)
    now, remote = world.clock.now(), {"kubernetes"}
    decided = world.pools.refills(now, room=ROOM, is_busy=True, remote_engines=remote)
    assert sorted(decided.values()) == [1, pool.REFILL_BURST - 1]
    world.clock.advance(10.0)
    decided = world.pools.refills(now + 10.0, room=ROOM, is_busy=True, remote_engines=remote)
    assert sorted(decided.values()) == [pool.MOST_REMOTE - pool.REFILL_BURST + 1]


def test_slow_starts_of_one_pool_keep_no_other_one_empty(world: World) -> None:
    """An image that is pulled for minutes, for as many sandboxes as may start at a time."""
    slow = world.ask(100)
    now = world.clock.now()
    assert world.pools.refills(now, room=ROOM, is_busy=False)[slow] == pool.MOST_UNDER_WAY
    other = world.ask(1, digest="other")
    assert not world.pools.refills(now, room=ROOM, is_busy=False)
    now += pool.SLOW_S
    assert world.pools.refills(now, room=ROOM, is_busy=False) == {other: 1}
    made = [InstanceId("env-1")]
    world.pools.refilled(other, made, now, began=now, count=1, has_failed=False)
    assert not world.pools.refills(now, room=ROOM, is_busy=False), "the slow one has its share"


def test_starts_that_end_first_do_not_make_the_slow_ones_young(world: World) -> None:
    """Pods that wait for a node, in a pool of which others start in seconds."""
    busy, began = world.ask(2), world.clock.now()
    assert world.pools.refills(began, room=ROOM, is_busy=False) == {busy: 2}
    world.ask(4)
    now = began + pool.SLOW_S
    assert world.pools.refills(now, room=ROOM, is_busy=False) == {busy: 2}
    made = [InstanceId("env-1"), InstanceId("env-2")]
    world.pools.refilled(busy, made, now, began=now, count=2, has_failed=False)
    others = {world.ask(1, digest=f"other-{number}") for number in range(pool.MOST_UNDER_WAY)}
    decided = world.pools.refills(now + 1.0, room=ROOM, is_busy=False)
    assert decided.keys() == others


def test_refills_keep_to_a_rate(world: World) -> None:
    world.ask(1000)
    at_once = 0
    while started := world.refill():
        at_once += started
    assert at_once == pool.REFILL_BURST
    world.settle(10.0)
    most = pool.REFILL_BURST + 10.0 * pool.REFILLS_PER_S
    assert 0.9 * most <= len(world.started) <= most


def test_pools_take_no_more_than_the_room_there_is(world: World) -> None:
    world.ask(10)
    assert world.refill(room=2) == 2
    assert world.refill(room=0) == 0
    assert world.refill(room=-5) == 0


def test_a_large_pool_does_not_keep_a_small_one_waiting(world: World) -> None:
    world.ask(1000)
    world.settle(3.0)
    small = world.ask(1, digest="other")
    world.settle(1.0)
    assert world.pools.ready(small) == 1


def test_a_pool_whose_starts_fail_pauses_ever_longer(world: World) -> None:
    world.ask(1)
    pauses = []
    last = world.clock.now()
    while len(pauses) < 9:
        if world.refill(fails=True):
            pauses.append(world.clock.now() - last)
            last = world.clock.now()
        world.clock.advance(1.0)
    assert pauses == [0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    world.ask(1)
    assert world.refill() == 1, "whoever asks again means it"


def test_one_that_died_is_not_handed_out_and_is_made_up_for(world: World) -> None:
    key = world.ask(2)
    world.settle(2.0)
    world.pools.gone(world.started[0])
    world.pools.gone(InstanceId("unknown"))
    assert world.pools.take(key, 2) == world.started[1:2]
    world.settle(2.0)
    assert world.pools.ready(key) == 2


def test_one_that_nobody_took_for_long_is_replaced(world: World) -> None:
    key = world.ask(1, idle_timeout_s=1e9)
    world.settle(2.0)
    world.clock.advance(pool.MAX_AGE_S)
    assert world.pools.surplus(world.clock.now()) == world.started[:1]
    world.settle(2.0)
    assert world.pools.take(key, 1) == world.started[1:2]


def test_the_largest_pool_gives_way_first(world: World) -> None:
    large, small = world.ask(5), world.ask(2, digest="other")
    world.settle(5.0)
    assert len(world.pools.give_way(3)) == 3
    assert (world.pools.ready(large), world.pools.ready(small)) == (2, 2)
    assert len(world.pools.give_way(9)) == 4
    assert world.pools.give_way(1) == world.pools.give_way(-1) == []


def test_a_wall_clock_that_is_set_back_stops_nothing(world: World) -> None:
    world.ask(10)
    world.refill()
    world.clock.advance(-5000.0)
    world.settle(5.0)
    assert len(world.started) == 10


# --- whatever happens ----------------------------------------------------------------------------

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 12), st.sampled_from("ab")),
        st.tuples(st.just("demand"), st.integers(1, 60), st.sampled_from("ab")),
        st.tuples(st.just("take"), st.integers(1, 12), st.sampled_from("ab")),
        st.tuples(st.just("die"), st.integers(0, 12), st.sampled_from("ab")),
        st.tuples(st.just("pass"), st.integers(1, 40), st.sampled_from("ab")),
        st.tuples(st.just("room"), st.integers(0, 20), st.sampled_from("ab")),
    ),
    max_size=40,
)


@given(EVENTS)
def test_each_sandbox_leaves_the_pools_once(events: list[tuple[str, int, str]]) -> None:
    """Fresh: none is handed out twice, after its death, or after it was chosen to end."""
    world, left = World(), Counter[str]()
    for what, number, digest in events:
        key = pool_key(spec(digest=digest))
        if what == "ask":
            world.ask(number, digest=digest)
        elif what == "demand":
            world.demand(number, digest=digest)
        elif what == "take":
            taken = world.pools.take(key, number)
            assert len(taken) <= number
            left.update(taken)
        elif what == "die":
            alive = [i for i in world.started if i not in left]
            left.update(alive[:number])
            for instance_id in alive[:number]:
                world.pools.gone(instance_id)
        elif what == "pass":
            left.update(world.settle(float(number)))
        else:
            left.update(world.pools.give_way(number))
        assert world.pools.size == len(world.started) - len(left)
    assert set(left.values()) <= {1}
    assert left.keys() <= set(world.started)
    world.pools.forget_jobs(["j1"])
    left.update(world.settle(1.0))
    assert sorted(left.elements()) == sorted(world.started), "nothing outlives its jobs"
