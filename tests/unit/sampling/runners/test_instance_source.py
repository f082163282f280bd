"""The instances of a runner: how many are started, and that each is released once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from aenv_ray.actors.fabric.create_options import OwnOptions
from aenv_ray.actors.fabric.create_protocol import Created, EachCreate
from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.errors import AenvError, CapacityExceeded, SandboxStartFailed
from aenv_ray.ids import InstanceId
from aenv_ray.models import InstanceSpec
from aenv_ray.sampling.runners.instance_source import (
    STALE_S,
    GroupStart,
    Instance,
    InstanceSource,
    StartPlan,
)


def _plan(concurrency: int, interval_s: float, start_s: float) -> StartPlan:
    plan = StartPlan(concurrency)
    for n in range(20):
        plan.needed(n * interval_s)
    plan.started(start_s)
    return plan


def test_long_episodes_have_no_instance_ahead() -> None:
    """One that waits would occupy a place, and its time to live would pass."""
    plan = _plan(16, interval_s=5.0, start_s=0.2)
    assert plan.count(waiting=0, ready=0, starting=0, live=16, left=None) == 0


def test_short_episodes_have_as_many_ahead_as_begin_during_a_start() -> None:
    """At 100 episodes a second and starts of 100 ms, ten."""
    plan = _plan(16, interval_s=0.01, start_s=0.1)
    assert plan.count(waiting=0, ready=0, starting=0, live=16, left=None) == pytest.approx(
        10, abs=1
    )
    assert plan.count(waiting=3, ready=2, starting=6, live=16, left=None) == pytest.approx(5, abs=1)


def test_nothing_is_ahead_of_the_last_episodes() -> None:
    """Instances for which no episode is left would only be released."""
    plan = _plan(16, interval_s=0.01, start_s=0.1)
    assert plan.count(waiting=0, ready=0, starting=0, live=4, left=0) == 0
    assert plan.count(waiting=2, ready=0, starting=0, live=4, left=1) == 3


def test_an_eager_plan_has_an_instance_for_every_episode_at_once() -> None:
    """A trainer resets its environments one after the other: their rate says nothing."""
    plan = StartPlan(4, is_eager=True)
    assert plan.count(waiting=0, ready=0, starting=0, live=0, left=4) == 4
    assert plan.count(waiting=1, ready=1, starting=1, live=2, left=3) == 2
    plan.reuses = True
    assert plan.count(waiting=0, ready=2, starting=0, live=3, left=3) == 1


def test_instances_that_are_being_released_count() -> None:
    """A sandbox occupies its node until it is gone."""
    plan = StartPlan(4)
    assert plan.count(waiting=4, ready=0, starting=0, live=plan.most - 1, left=None) == 1
    assert plan.count(waiting=4, ready=0, starting=0, live=plan.most, left=None) == 0


class _FakeInstances:
    """A cluster in which the starts end when told, in order."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, EachCreate]] = []
        self.groups: list[int] = []
        self.datasources: list[str] = []
        self.group_failures: list[AenvError] = []
        self.released: list[Created] = []
        self.made = 0
        self._never = asyncio.Event()

    async def create(self, count: int, news: EachCreate) -> None:
        self.requests.append((count, news))
        await self._never.wait()

    async def create_group(self, count: int, own: OwnOptions | None = None) -> list[Created]:
        self.groups.append(count)
        self.datasources.append(own.datasource if own else "")
        if self.group_failures:
            raise self.group_failures.pop()
        self.made += count
        return [Created(cast("Any", n), cast("Any", None), cast("Any", None)) for n in range(count)]

    async def release(self, instances: Sequence[Created]) -> None:
        self.released += instances

    def start(self, request: int, count: int = 1) -> None:
        for _ in range(count):
            self.made += 1
            self.requests[request][1].on_outcome(
                Created(cast("Any", self.made), cast("Any", 0), cast("Any", 0))
            )


class _FakeHandle:
    """A handle that counts its connection."""

    connected = 0

    def __init__(self, created: Created) -> None:
        self.instance_id = str(created.spec)

    async def connect_directly(self) -> bool:
        type(self).connected += 1
        return True

    async def close(self) -> None:
        type(self).connected -= 1


def _source(instances: _FakeInstances, concurrency: int = 8) -> InstanceSource:
    return InstanceSource(
        instances,
        lambda created: cast("AsyncEnvHandle", _FakeHandle(created)),
        concurrency=concurrency,
        left=lambda: None,
    )


async def _turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def _acquire(source: InstanceSource, count: int) -> list[asyncio.Task[Instance]]:
    return [asyncio.create_task(source.acquire()) for _ in range(count)]


async def _end_starts(tasks: list[asyncio.Task[Instance]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_what_is_needed_meanwhile_is_the_next_request() -> None:
    """Requests grow with the load, and few are under way."""
    instances = _FakeInstances()
    source = _source(instances)
    tasks = _acquire(source, 3)
    await _turn()
    tasks += _acquire(source, 1)
    await _turn()
    for _ in range(4):
        tasks += _acquire(source, 1)
        await _turn()
    assert [count for count, _ in instances.requests] == [3, 1], "two requests are under way"
    await _end_starts(tasks)
    await source.close()


async def test_waiting_for_room_holds_up_no_request() -> None:
    """All creates that wait are in the cluster's queue, so that it grows by as much."""
    instances = _FakeInstances()
    source = _source(instances)
    tasks = []
    for _ in range(8):
        tasks += _acquire(source, 1)
        await _turn()
        instances.requests[-1][1].on_queued(1)
        await _turn()
    assert sum(count for count, _ in instances.requests) == 8
    await _end_starts(tasks)
    await source.close()


async def test_an_abandoned_episode_leaves_no_instance() -> None:
    """Its instance goes to the next episode, or is released at the end."""
    instances = _FakeInstances()
    source = _source(instances)
    (first,) = _acquire(source, 1)
    await _turn()
    first.cancel()
    await _turn()
    instances.start(0)
    await source.close()
    assert len(instances.released) == instances.made == 1


async def test_an_instance_that_was_handed_over_to_a_cancelled_episode_is_released() -> None:
    """The cancellation and the start may come in the same turn."""
    instances = _FakeInstances()
    source = _source(instances)
    (first,) = _acquire(source, 1)
    await _turn()
    instances.start(0)
    first.cancel()
    await asyncio.wait([first])
    await source.close()
    assert len(instances.released) == 1


async def test_an_instance_that_is_given_back_after_the_end_is_released() -> None:
    """Nothing would take it, or release it later."""
    instances = _FakeInstances()
    source = _source(instances)
    (first,) = _acquire(source, 1)
    await _turn()
    instances.start(0)
    instance = await first
    await source.close()
    source.give_back(instance)
    await _turn()
    assert len(instances.released) == 1


async def test_a_failed_start_fails_one_episode() -> None:
    """The others of its request go on."""
    instances = _FakeInstances()
    source = _source(instances)
    first, second = _acquire(source, 2)
    await _turn()
    instances.requests[0][1].on_outcome(SandboxStartFailed("no"))
    instances.start(0)
    with pytest.raises(SandboxStartFailed):
        await first
    source.release(await second)
    await source.close()
    assert len(instances.released) == 1


async def test_a_failed_request_fails_its_episodes() -> None:
    """An error of the whole request reaches everybody who waits for it."""

    class Full(_FakeInstances):
        async def create(self, count: int, news: EachCreate) -> None:
            raise CapacityExceeded("full")

    source = _source(Full())
    with pytest.raises(CapacityExceeded):
        await source.acquire()
    await source.close()


async def test_a_group_gets_its_instances_together_or_not_at_all() -> None:
    """Its episodes fail and are restarted together; later ones are restarted alone."""
    instances = _FakeInstances()
    instances.group_failures = [CapacityExceeded("full")]
    source, start = _source(instances), GroupStart(3)
    tasks = [asyncio.create_task(start.take(source, 0)) for _ in range(3)]
    await asyncio.wait(tasks)
    assert [type(task.exception()) for task in tasks] == [CapacityExceeded] * 3
    taken = [await start.take(source, 1) for _ in range(3)]
    assert instances.groups == [3, 3]
    assert len({id(one) for one in taken}) == 3
    alone = asyncio.create_task(start.take(source, 2))
    await _turn()
    assert [count for count, _ in instances.requests] == [1]
    await _end_starts([alone])
    for one in taken:
        source.release(one)
    await source.close()
    assert len(instances.released) == 3


async def test_an_episode_that_is_cancelled_while_its_group_starts_leaves_no_instance() -> None:
    """The others go on."""
    instances = _FakeInstances()
    source, start = _source(instances), GroupStart(2)
    first, second = (asyncio.create_task(start.take(source, 0)) for _ in range(2))
    await asyncio.sleep(0)
    await _end_starts([first])
    source.release(await second)
    await source.close()
    assert len(instances.released) == 2


async def test_a_used_instance_serves_the_next_episode_until_it_is_old() -> None:
    """The last episode on it has most of its time to live left."""
    cluster, now = _FakeInstances(), 0.0
    source = InstanceSource(
        cluster,
        lambda created: cast("AsyncEnvHandle", _FakeHandle(created)),
        concurrency=8,
        left=lambda: None,
        clock=lambda: now,
    )
    spec = InstanceSpec(instance_id=InstanceId("x-1"), reference="x", digest="", ttl_s=100.0)
    (episode,) = _acquire(source, 1)
    await _turn()
    created = Created(spec, cast("Any", 0), cast("Any", 0))
    cluster.requests[0][1].on_outcome(created)
    first = await episode
    assert not first.is_used
    now = 20.0
    assert source.reuse(first)
    (second,) = await source.begin_group(1)
    assert (second.created, second.is_used) == (created, True)
    assert cluster.groups == []
    now = 26.0
    assert not source.reuse(second)
    source.release(second)
    await source.close()
    assert cluster.released == [created]


async def test_a_used_instance_that_waited_too_long_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each connection takes two descriptors of the runner."""
    monkeypatch.setattr(_FakeHandle, "connected", 0)
    cluster, now = _FakeInstances(), 0.0
    source = InstanceSource(
        cluster,
        lambda created: cast("AsyncEnvHandle", _FakeHandle(created)),
        concurrency=8,
        left=lambda: None,
        clock=lambda: now,
    )
    episodes = _acquire(source, 2)
    await _turn()
    spec = InstanceSpec(instance_id=InstanceId("x-1"), reference="x", digest="", ttl_s=1e6)
    for n in range(2):
        own = spec.model_copy(update={"instance_id": InstanceId(f"x-{n}")})
        created = Created(own, cast("Any", 0), cast("Any", 0), cast("Any", "a key"))
        cluster.requests[0][1].on_outcome(created)
    for episode in episodes:
        instance = await episode
        await source.connect(instance)
        await source.connect(instance)  # as a later episode on it does
        assert source.reuse(instance)
    assert _FakeHandle.connected == 2
    now = STALE_S + 1.0
    (third,) = _acquire(source, 1)
    await _turn()
    assert (_FakeHandle.connected, len(cluster.released)) == (0, 2)
    await _end_starts([third])
    await source.close()


async def test_an_instance_with_the_datasource_of_a_task_serves_only_its_episode() -> None:
    """It runs in the image of one task, so that no other episode may get it."""
    cluster = _FakeInstances()
    source = _source(cluster)
    own = await source.acquire(OwnOptions("registry/image:1"))
    assert (cluster.datasources, own.is_for_task) == (["registry/image:1"], True)
    assert not source.reuse(own._replace(created=_created()))
    source.release(own)
    group = [await GroupStart(1).take(source, 0, OwnOptions("registry/image:2")) for _ in range(2)]
    assert cluster.datasources == ["registry/image:1", *["registry/image:2"] * 2]
    for one in group:
        source.release(one)
    await source.close()
    assert len(cluster.released) == 3


def _created() -> Created:
    spec = InstanceSpec(instance_id=InstanceId("x-1"), reference="x", digest="", ttl_s=1e6)
    return Created(spec, cast("Any", 0), cast("Any", 0))
