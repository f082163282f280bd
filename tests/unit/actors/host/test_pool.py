"""Which sandboxes are kept ready, for whom and how many, as decisions."""

from __future__ import annotations

from typing import Any

import pytest

from aenv_ray.actors.host import pool
from aenv_ray.actors.host.pool import is_plain, pool_key
from tests.unit.actors.host.pool_world import World, spec, world

__all__ = ["world"]  # a fixture


# --- which pool serves whom ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"environment_variables": {"A": "1"}}, {"arguments": ("-v",)}, {"labels": {"a": "1"}},
        {"datasource": "s3://x"}, {"engine": "docker"}, {"digest": "other"},
    ],
)  # fmt: skip
def test_what_the_code_may_have_read_makes_a_pool_of_its_own(fields: dict[str, Any]) -> None:
    """A sandbox cannot be given other variables, arguments or labels once it runs."""
    assert pool_key(spec(**fields)) != pool_key(spec())
    assert is_plain(spec(**fields)) == (not {"engine", "digest"}.isdisjoint(fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"ttl_s": 1.0}, {"idle_timeout_s": 2.0}, {"owner": "me"}, {"job_id": None},
        {"instance_id": "env-2"},
    ],
)  # fmt: skip
def test_what_is_the_takers_alone_makes_none(fields: dict[str, Any]) -> None:
    assert pool_key(spec(**fields)) == pool_key(spec())
    assert is_plain(spec(**fields))


def test_a_key_tells_no_secret() -> None:
    """Invariant 10."""
    assert "hush" not in pool_key(spec(environment_variables={"TOKEN": "hush"}))


def test_the_order_of_variables_does_not_matter() -> None:
    one = spec(environment_variables={"A": "1", "B": "2"})
    assert pool_key(one) == pool_key(spec(environment_variables={"B": "2", "A": "1"}))


# --- what was asked for --------------------------------------------------------------------------


def test_a_pool_with_plenty_left_waits_for_those_who_take(world: World) -> None:
    """A start has a core for long; who takes one waits for it."""
    key = world.ask(10)
    world.settle(5.0)
    for taken, started in ((2, 0), (2, 0), (2, 1)):
        world.clock.advance(pool.CALM_S / 2)
        world.demand(taken)
        world.pools.take(key, taken)
        assert world.refill() == started
    world.settle(5.0)
    world.demand(1)
    world.pools.take(key, 1)
    assert world.refill() == 0
    world.clock.advance(2 * pool.CALM_S)
    assert world.refill() == 1


def test_who_asks_for_more_now_does_not_wait(world: World) -> None:
    key = world.ask(4)
    world.settle(5.0)
    world.demand(1)
    world.pools.take(key, 1)
    assert world.refill() == 0
    world.ask(5)
    assert world.refill() == 2


def test_what_was_asked_for_is_started_and_handed_out_oldest_first(world: World) -> None:
    key = world.ask(3)
    world.settle(5.0)
    assert world.pools.ready(key) == 3
    assert world.pools.missing(key, world.clock.now()) == 0
    assert world.pools.take(key, 2) == world.started[:2]
    assert world.pools.take(key, 2) == world.started[2:]
    assert world.pools.take(key, 2) == []


def test_what_was_taken_is_made_up_for(world: World) -> None:
    key = world.ask(3)
    world.settle(5.0)
    world.pools.take(key, 3)
    world.settle(5.0)
    assert world.pools.ready(key) == 3
    assert len(world.started) == 6


def test_a_request_replaces_the_earlier_one_of_its_job(world: World) -> None:
    key = world.ask(5)
    world.settle(5.0)
    world.ask(2)
    assert len(world.pools.surplus(world.clock.now())) == 3
    assert world.pools.ready(key) == 2
    assert [request.count for request in world.pools.requests()] == [2]


def test_asking_for_none_drains_at_once_and_holds_against_demand(world: World) -> None:
    key = world.ask(4)
    world.settle(5.0)
    world.ask(0)
    assert sorted(world.pools.surplus(world.clock.now())) == sorted(world.started)
    world.demand(100, warm=3)
    assert world.settle() == []
    assert world.pools.ready(key) == 0


def test_requests_of_several_jobs_add_up_and_end_with_their_jobs(world: World) -> None:
    """A pool ends with the Ray job that asked for it, unless it is detached."""
    key = world.ask(2)
    world.ask(3, job_id="j2")
    world.ask(1, job_id=None)
    world.settle(5.0)
    assert world.pools.ready(key) == 6
    assert world.pools.forget_jobs(["j2", "unknown"])
    assert not world.pools.forget_jobs(["j2"])
    world.settle(5.0)
    assert world.pools.ready(key) == 3
    world.pools.forget_jobs(["j1"])
    world.settle(5.0)
    assert world.pools.ready(key) == 1


def test_an_idle_pool_drains_and_comes_back_with_the_next_create(world: World) -> None:
    key = world.ask(2, idle_timeout_s=100.0)
    assert world.settle(99.0) == []
    world.demand(1, slow=False)
    assert world.settle(99.0) == []
    assert len(world.settle(2.0)) == 2
    assert world.pools.ready(key) == 0
    world.demand(1, slow=False)
    world.settle(5.0)
    assert world.pools.ready(key) == 2


# --- config and demand ---------------------------------------------------------------------------


def test_the_config_keeps_some_ready_from_the_first_create_on(world: World) -> None:
    world.demand(1, warm=2, slow=False)
    world.settle(5.0)
    assert world.pools.ready(pool_key(spec())) == 2
    assert len(world.settle(pool.IDLE_S)) == 2


def test_the_config_keeps_none_for_what_one_caller_alone_gave(world: World) -> None:
    """Else a variable for each task would leave a pool for each task."""
    for number in range(50):
        world.demand(1, warm=2, slow=False, environment_variables={"TASK": str(number)})
    world.settle(5.0)
    assert world.started == []


def test_configs_fill_a_host_for_no_owner(world: World) -> None:
    """Invariant 7: no quota counts them, and an owner can publish any number of projects."""
    for number in range(50):
        world.demand(1, warm=3, most=4, slow=False, owner="eve", digest=f"eve-{number}")
    world.demand(1, warm=3, most=4, slow=False, owner="ann")
    world.settle(20.0)
    ready = [world.pools.ready(pool_key(spec(digest=f"eve-{number}"))) for number in range(50)]
    assert ready == [3, 1, *[0] * 48]
    assert world.pools.ready(pool_key(spec())) == 3
    world.settle(pool.IDLE_S)
    world.demand(1, warm=3, most=4, slow=False, owner="eve", digest="later")
    world.settle(5.0)
    assert world.pools.ready(pool_key(spec(digest="later"))) == 3


def test_owners_who_share_an_environment_keep_its_pool_filled(world: World) -> None:
    """One without room for it neither empties it nor pays for it."""
    shared = pool_key(spec())
    config: dict[str, Any] = {"warm": 4, "most": 4, "slow": False}
    world.demand(1, owner="ann", digest="of ann", **config)
    for owner in ("bob", "ann"):
        world.demand(1, owner=owner, **config)
        world.settle(5.0)
        assert world.pools.ready(shared) == 4, f"the latest create was {owner}'s"
    assert world.pools.ready(pool_key(spec(digest="of ann"))) == 4
    world.demand(1, owner="bob", digest="of bob", **config)
    world.settle(5.0)
    assert world.pools.ready(pool_key(spec(digest="of bob"))) == 0, "bob's room is in the other"
    world.settle(pool.IDLE_S / 2)
    world.demand(1, owner="ann", **config)
    assert len(world.settle(pool.IDLE_S / 2)) == 8, "bob has not created for long"
    assert world.pools.size == 0


def test_configs_of_ray_code_have_the_room_of_the_host(world: World) -> None:
    for digest in ("a", "b"):
        world.demand(1, warm=8, most=4, slow=False, digest=digest)
    world.settle(20.0)
    assert world.pools.size == 8, "the policy limits each"


def test_a_request_wins_over_the_config(world: World) -> None:
    world.demand(1, warm=5)
    key = world.ask(1)
    world.settle(5.0)
    assert world.pools.ready(key) == 1


def test_steady_demand_for_what_starts_slowly_is_anticipated(world: World) -> None:
    for _ in range(20):
        world.demand(1)
        world.settle(1.0)
    key = pool_key(spec())
    assert world.pools.ready(key) == int(20 * pool.LEAD_S / pool.DEMAND_WINDOW_S)
    assert len(world.settle(2 * pool.DEMAND_WINDOW_S)) == 2
    assert world.pools.size == 0


@pytest.mark.parametrize(
    ("count", "slow", "warm", "kept"),
    [
        (9, True, None, 0),
        (10, True, None, 1),
        (100_000, True, None, pool.MOST_BY_DEMAND),
        (100_000, False, None, 0),
        (100_000, True, 0, 0),
    ],
    ids=["too little", "enough", "bounded", "starts are fast", "the config says none"],
)
def test_how_much_a_demand_keeps_ready(
    world: World, count: int, slow: bool, warm: int | None, kept: int
) -> None:
    world.demand(count, warm, slow=slow)
    world.settle(5.0)
    assert world.pools.ready(pool_key(spec())) == kept


def test_demand_that_sinks_ends_nothing_until_there_is_none(world: World) -> None:
    """Ending one to start it again a moment later costs two starts."""
    world.demand(40)
    world.settle(pool.DEMAND_WINDOW_S - 1.0)
    world.demand(1)
    assert world.settle(pool.DEMAND_WINDOW_S - 1.0) == []
    assert len(world.settle(5.0)) == 4


def test_the_demand_of_a_job_that_ended_keeps_nothing(world: World) -> None:
    world.demand(40)
    world.demand(1, warm=2, digest="other")
    world.settle(2.0)
    world.pools.forget_jobs(["j1"])
    world.settle(1.0)
    assert world.pools.size == 0


def test_what_an_earlier_host_kept_by_demand_is_kept_for_a_while(world: World) -> None:
    """Nobody knows the demand after a restart; it shows soon, or there is none."""
    world.pools.adopted(spec(), world.clock.now())
    assert world.settle(pool.DEMAND_WINDOW_S - 1.0) == []
    assert world.pools.take(pool_key(spec()), 1) == ["env-1"]
    world.pools.adopted(spec(), world.clock.now())
    assert world.settle(pool.DEMAND_WINDOW_S + 1.0) == ["env-1"]
