"""What is known of instances whose host does not answer: they may live, so their leases stay."""

from __future__ import annotations

from typing import Any

from ray import exceptions as ray_exceptions

from aenv_ray.actors.controller.host_queries import (
    count_instances_on,
    list_instances_on,
    without_outer,
)
from aenv_ray.actors.host.environment_relay import OUTER_LABEL
from aenv_ray.errors import FabricUnavailable
from aenv_ray.hub.ray_leases import changes
from aenv_ray.hub.records import Lease
from aenv_ray.ids import InstanceId
from aenv_ray.models import (
    ActorDensity,
    InstanceInfo,
    InstanceStatus,
    Isolation,
    Lifetime,
)

NOW = 1000.0


def info(name: str, host: str) -> InstanceInfo:
    return InstanceInfo(
        id=InstanceId(name), reference="probe@1.0.0", status=InstanceStatus.RUNNING,
        engine="fake", node_id="n", host=host, density=ActorDensity.SHARED, created_at=NOW,
        deadline=NOW + 60.0, idle_timeout_s=None, lifetime=Lifetime.JOB, owner="ann",
        labels={}, isolation=Isolation(kind="none"), start_mode="fresh", calls=0, generation=0,
    )  # fmt: skip


def lease(name: str, status: InstanceStatus = InstanceStatus.RUNNING) -> Lease:
    return Lease(
        id=name, reference="probe@1.0.0", digest="d", owner="ann", status=status,
        created_at=NOW, deadline=NOW + 60.0, capability=f"c-{name}",
    )  # fmt: skip


async def ask(name: str, operation: str, *args: Any) -> Any:
    assert operation == "instances"
    if name == "well":
        return 2 if args else [info("a", "well")]
    if name == "idle":
        return 0 if args else []
    error = FabricUnavailable(f"host {name}")
    if name == "earlier":
        if args:
            raise error from TypeError("too many positional arguments")
        return [info("b", "earlier")]
    if name == "dead":
        raise error from ray_exceptions.ActorDiedError()
    if name == "dead-node":
        raise error from ray_exceptions.ActorUnschedulableError("its node died")
    raise error


async def test_only_a_host_that_has_ended_has_nothing_any_more() -> None:
    seen = await list_instances_on(ask, ["well", "dead", "dead-node", "hung"])
    assert [one.id for one in seen.found] == ["a"]
    assert seen.unheard == {"dead", "dead-node", "hung"}
    assert seen.silent == {"hung"}


async def test_a_host_is_vacant_only_by_its_own_word() -> None:
    """Invariant 3: what one that was killed left is ended by those who watch for its end."""
    hosts = ["well", "idle", "dead", "dead-node", "hung"]
    seen = await list_instances_on(ask, hosts)
    assert seen.vacant(hosts) == {"idle"}


async def test_what_a_silent_host_may_have_is_doubtful() -> None:
    seen = await list_instances_on(ask, ["well", "hung"])
    where = {"a": "well", "b": "well", "c": "hung"}
    assert seen.doubtful(["a", "b", "c", "d"], where) == {"c", "d"}, "of d nothing is known"
    heard = await list_instances_on(ask, ["well", "dead"])
    assert heard.doubtful(["a", "b", "c", "d"], where) == set()


def test_a_lease_ends_only_when_its_instance_is_known_to_be_gone() -> None:
    leases = [lease("a"), lease("b"), lease("c"), lease("p", InstanceStatus.PENDING)]
    gone, moved = changes(leases, [info("a", "well")], {"b"})
    assert gone == ["c"]
    assert moved == {}


async def test_instances_that_were_released_at_their_shared_host_are_forgotten() -> None:
    """A sampling releases millions of them there; what is on a silent host is kept."""
    busy, silent = "aenv-host-a-0", "aenv-host-b-0"

    async def answer(name: str, operation: str) -> Any:
        del operation
        if name == busy:
            return [info("new", busy)]
        raise FabricUnavailable(f"host {name}")

    hosts = [busy, silent]
    seen = await list_instances_on(answer, hosts)
    where = {"old": busy, "kept": silent, "own": "own"}
    assert seen.located(hosts, where) == {"new": busy, "kept": silent, "own": "own"}


def test_inner_instances_without_their_outer_one_are_found() -> None:
    """Invariant 3: it was lost with its node, and with the records that name them."""
    warm = info("w", "well").model_copy(update={"requested_id": InstanceId("r")})
    inner = [
        info(f"inner-{outer}", "well").model_copy(update={"labels": {OUTER_LABEL: outer}})
        for outer in ("a", "w", "r", "silent", "lost")
    ]
    found = [info("a", "well"), warm, *inner]
    assert without_outer(found, {"silent"}) == ["inner-lost"]
    assert without_outer([info("a", "well")], ()) == []


async def test_a_host_that_does_not_answer_is_not_counted_as_empty() -> None:
    counts, silent = await count_instances_on(ask, ["well", "idle", "dead", "dead-node", "hung"])
    assert (counts, silent) == ({"well": 2, "idle": 0}, {"hung"})


async def test_a_host_of_an_earlier_version_counts_what_it_lists() -> None:
    """Otherwise its node drains until the limit of the drain, with nothing on it."""
    counts, silent = await count_instances_on(ask, ["earlier", "idle"])
    assert (counts, silent) == ({"earlier": 1, "idle": 0}, set())
