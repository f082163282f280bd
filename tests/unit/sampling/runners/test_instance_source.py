"""The instances of a runner: how many are started, and that each is released once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from aenv_ray.actors.fabric.create_options import OwnOptions
from aenv_ray.actors.fabric.create_protocol import Created, CreateListener, OnQueue
from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.errors import AenvError, CapacityExceeded, SandboxStartFailed
from aenv_ray.ids import InstanceId
from aenv_ray.models import InstanceSpec
from aenv_ray.sampling.runners import instance_source
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


def test_long_episodes_start_no_instance_ahead() -> None:
    """One that waits would occupy a place, and its time to live would pass."""
    plan = _plan(16, interval_s=5.0, start_s=0.2)
    assert plan.count(waiting=0, ready=0, starting=0, live=16, left=None) == 0


def test_short_episodes_start_as_many_ahead_as_begin_during_a_start() -> None:
    """At 100 episodes a second and starts of 100 ms, ten."""
    plan = _plan(16, interval_s=0.01, start_s=0.1)
    assert plan.count(waiting=0, ready=0, starting=0, live=16, left=None) == pytest.approx(
        10, abs=1
    )
    assert plan.count(waiting=3, ready=2, starting=6, live=16, left=None) == pytest.approx(5, abs=1)


def test_no_instances_are_started_ahead_of_the_last_episodes() -> None:
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


def test_instances_being_released_count_as_live() -> None:
    """A sandbox occupies its node until it is gone."""
    plan = StartPlan(4)
    assert plan.count(waiting=4, ready=0, starting=0, live=plan.most - 1, left=None) == 1
    assert plan.count(waiting=4, ready=0, starting=0, live=plan.most, left=None) == 0


class _FakeInstances:
    """A cluster in which the starts end when told, in order."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, CreateListener]] = []
        self.groups: list[int] = []
        self.datasources: list[str] = []
        self.group_failures: list[AenvError] = []
        self.released: list[Created] = []
        self.made = 0
        self._never = asyncio.Event()

    async def create(self, count: int, listener: CreateListener) -> None:
        self.requests.append((count, listener))
        await self._never.wait()

    async def create_group(
        self, count: int, own: OwnOptions | None = None, on_queue: OnQueue = lambda _: None
    ) -> list[Created]:
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


def _source(
    instances: _FakeInstances,
    concurrency: int = 8,
    *,
    is_eager: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> InstanceSource:
    return InstanceSource(
        instances,
        lambda created: cast("AsyncEnvHandle", _FakeHandle(created)),
        concurrency=concurrency,
        left=lambda: 0 if is_eager else None,
        is_eager=is_eager,
        clock=clock,
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


async def test_needs_that_arise_during_requests_share_the_next_request() -> None:
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


async def test_a_request_that_waits_for_room_does_not_delay_others() -> None:
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
    assert source.queued == 8
    await _end_starts(tasks)
    assert source.queued == 0, "what is started ahead of need holds up nobody"
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
        async def create(self, count: int, listener: CreateListener) -> None:
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
    source = _source(cluster, clock=lambda: now)
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
    source = _source(cluster, clock=lambda: now)
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


# --- groups in a full cluster ---------------------------------------------------------------------


class _FullCluster(_FakeInstances):
    """A cluster with few places: what does not fit waits, in order."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.free = places
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.has_released = asyncio.Event()
        self._queue = asyncio.Condition()
        self.waiting: list[object] = []

    async def create(self, count: int, listener: CreateListener) -> None:
        for _ in range(count):
            await self._take(1, lambda _: None)
            listener.on_outcome(self._created())

    async def create_group(
        self, count: int, own: OwnOptions | None = None, on_queue: OnQueue = lambda _: None
    ) -> list[Created]:
        self.groups.append(count)
        await self._take(count, on_queue)
        try:
            await self.may_start.wait()
        except asyncio.CancelledError:
            self.free += count
            raise
        return [self._created() for _ in range(count)]

    async def _take(self, count: int, on_queue: OnQueue) -> None:
        me = object()
        self.waiting.append(me)
        try:
            async with self._queue:
                on_queue(self.free < count)
                await self._queue.wait_for(lambda: self.waiting[0] is me and self.free >= count)
                self.free -= count
                on_queue(False)
        finally:
            self.waiting.remove(me)
            asyncio.create_task(self._look_again())  # noqa: RUF006

    async def _look_again(self) -> None:
        async with self._queue:
            self._queue.notify_all()

    def _created(self) -> Created:
        self.made += 1
        name = InstanceId(f"x-{self.made}")
        spec = InstanceSpec(instance_id=name, reference="x", digest="", ttl_s=1e6)
        return Created(spec, cast("Any", 0), cast("Any", 0))

    async def release(self, instances: Sequence[Created]) -> None:
        await super().release(instances)
        self.free += len(instances)
        self.has_released.set()
        await self._look_again()


@pytest.fixture
def soon_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances that nobody uses again are released after a moment."""
    monkeypatch.setattr(instance_source, "STALE_S", 0.01)
    monkeypatch.setattr(instance_source, "_SWEEP_S", 0.01)


async def _group(source: InstanceSource, count: int) -> list[Instance]:
    async with asyncio.timeout(30.0):
        return list(await source.begin_group(count))


async def _close(cluster: _FullCluster, *sources: InstanceSource) -> None:
    for source in sources:
        await source.close()
    assert len(cluster.released) == len({one.spec.instance_id for one in cluster.released})
    assert len(cluster.released) == cluster.made, "each is released once"


async def test_a_group_that_waits_for_room_gets_what_another_has_given_back() -> None:
    """The cluster would give it no room: the idle instances of its own runner occupy it."""
    cluster = _FullCluster(8)
    source = _source(cluster, 16)
    first = await _group(source, 8)
    second, third = (source.begin_group(8) for _ in range(2))
    await _turn()
    assert source.queued == 16
    for instance in first:
        assert not second.done()
        assert source.reuse(instance)
    async with asyncio.timeout(30.0):
        again = await second
        assert {one.env.instance_id for one in again} == {one.env.instance_id for one in first}
        for instance in again:
            source.reuse(instance)
        again = await third
    await _turn()
    assert (cluster.made, cluster.waiting) == (8, []), "and nothing is created any more"
    assert source.queued == 0
    for instance in again:
        source.release(instance)
    await _close(cluster, source)


@pytest.mark.parametrize("was_queued", [False, True])
async def test_queue_notices_after_the_end_of_a_group_are_ignored(was_queued: bool) -> None:
    """Whether it waits for room is asked in a thread, which goes on when it is cancelled."""

    class Telling(_FakeInstances):
        async def create_group(
            self, count: int, own: OwnOptions | None = None, on_queue: OnQueue = lambda _: None
        ) -> list[Created]:
            told.append(on_queue)
            await self._never.wait()
            raise AssertionError

    told: list[OnQueue] = []
    source = _source(Telling(), 16)
    start = source.begin_group(8, OwnOptions("image:1"))
    await _turn()
    await asyncio.to_thread(told[0], was_queued)
    await _turn()
    assert source.queued == 8 * was_queued
    start.cancel()
    await asyncio.wait([start])
    await asyncio.to_thread(told[0], not was_queued)
    await _turn()
    assert source.queued == 0
    await source.close()


@pytest.mark.parametrize("is_eager", [False, True])
async def test_groups_that_wait_for_each_others_instances_are_served_in_turn(
    soon_stale: None, is_eager: bool
) -> None:
    """Those of two runners or trainers; each keeps half of the places, and would wait for more."""
    cluster = _FullCluster(8)
    sources = [_source(cluster, 16, is_eager=is_eager) for _ in range(2)]
    for source in sources:
        for instance in await _group(source, 4):
            assert source.reuse(instance)
    groups = [source.begin_group(8) for source in sources]
    await _turn()
    assert cluster.groups[2:] == [4, 4]
    async with asyncio.timeout(30.0):
        await asyncio.wait(groups, return_when=asyncio.FIRST_COMPLETED)
        for number in (0, 1) if groups[0].done() else (1, 0):
            instances = list(await groups[number])
            assert len(instances) == 8
            for instance in instances:
                sources[number].release(instance)
    await _close(cluster, *sources)


async def test_idle_used_instances_are_released_for_others(
    soon_stale: None,
) -> None:
    """To another runner, for example, which has tasks left."""
    cluster = _FullCluster(8)
    done, other = _source(cluster, 16), _source(cluster, 16)
    for instance in await _group(done, 8):
        assert done.reuse(instance)
    for instance in await _group(other, 8):
        other.release(instance)
    await _close(cluster, done, other)


async def test_a_trainer_keeps_its_instances_until_a_group_waits_for_room(
    soon_stale: None,
) -> None:
    """They wait for the next episodes meanwhile, while the trainer trains."""
    cluster = _FullCluster(8)
    source, other = _source(cluster, 16, is_eager=True), _source(cluster, 16)
    for instance in await _group(source, 4):
        assert source.reuse(instance)
    taken = await _group(other, 4)
    swept = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, swept.set)
    await swept.wait()
    assert cluster.released == []
    group = source.begin_group(8)
    async with asyncio.timeout(30.0):
        await cluster.has_released.wait()
    assert len(cluster.released) == 4
    for instance in taken:
        other.release(instance)
    async with asyncio.timeout(30.0):
        for instance in await group:
            source.release(instance)
    await _close(cluster, source, other)


async def test_a_group_keeps_ready_instances_while_the_others_start(soon_stale: None) -> None:
    """They wait for no room, so that nobody waits for theirs."""
    cluster = _FullCluster(16)
    source = _source(cluster, 16)
    for instance in await _group(source, 4):
        assert source.reuse(instance)
    cluster.may_start.clear()
    group = source.begin_group(8)
    (single,) = _acquire(source, 1)
    swept = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, swept.set)
    await swept.wait()
    assert not (await single).is_used, "it has an instance of its own"
    assert source.reuse(single.result())
    cluster.may_start.set()
    async with asyncio.timeout(30.0):
        assert sorted(one.is_used for one in await group) == [False] * 4 + [True] * 4
        await cluster.has_released.wait()  # the one that is not needed
    for instance in group.result():
        source.release(instance)
    await _close(cluster, source)


async def test_a_second_group_leaves_the_first_what_it_has_reserved() -> None:
    """However long the others take to start; both groups begin."""
    cluster, now = _FullCluster(16), 0.0
    source = _source(cluster, 16, clock=lambda: now)
    for instance in await _group(source, 3):
        assert source.reuse(instance)
    cluster.may_start.clear()
    first = source.begin_group(4)
    await _turn()
    now = STALE_S + 1.0
    second = source.begin_group(4)
    cluster.may_start.set()
    async with asyncio.timeout(10.0):
        assert sorted(one.is_used for one in await first) == [False, True, True, True]
        assert len(await second) == 4
    for instance in (*first.result(), *second.result()):
        source.release(instance)
    await _close(cluster, source)


async def test_a_create_that_fails_as_its_group_begins_another_does_not_fail_the_group() -> None:
    """The group has given up what it had reserved, and creates all of its instances."""
    has_failed = asyncio.Event()

    class Failing(_FullCluster):
        async def create_group(
            self, count: int, own: OwnOptions | None = None, on_queue: OnQueue = lambda _: None
        ) -> list[Created]:
            if self.group_failures:
                on_queue(True)
                await has_failed.wait()
                raise self.group_failures.pop()
            return await super().create_group(count, own, on_queue)

    cluster, now = Failing(8), 0.0
    source = _source(cluster, 16, clock=lambda: now)
    for instance in await _group(source, 2):
        assert source.reuse(instance)
    cluster.group_failures = [CapacityExceeded("full")]
    group = source.begin_group(4)
    await _turn()
    now = STALE_S + 1.0
    has_failed.set()
    await asyncio.sleep(0)  # it has failed, and the source does not know it yet
    source._sweep()
    async with asyncio.timeout(10.0):
        for instance in await group:
            assert not instance.is_used
            source.release(instance)
    await _close(cluster, source)


async def test_instances_that_start_while_the_group_is_served_serve_others() -> None:
    """None is lost, and none runs on."""
    cluster = _FullCluster(16)
    source = _source(cluster, 16)
    first = await _group(source, 8)
    cluster.may_start.clear()
    group = source.begin_group(8)
    await _turn()
    cluster.may_start.set()
    await asyncio.sleep(0)  # they run, and the source does not know it yet
    for instance in first:
        source.reuse(instance)
    async with asyncio.timeout(30.0):
        taken = await group
    assert all(one.is_used for one in taken)
    await _turn()
    (single,) = _acquire(source, 1)
    await _turn()
    for instance in (*taken, await single):
        source.release(instance)
    await _close(cluster, source)


async def test_a_group_that_fails_leaves_the_ready_instances_to_others() -> None:
    """Here to an episode that is played alone, and waits."""

    class Failing(_FullCluster):
        async def create_group(
            self, count: int, own: OwnOptions | None = None, on_queue: OnQueue = lambda _: None
        ) -> list[Created]:
            if self.group_failures:
                raise self.group_failures.pop()
            return await super().create_group(count, own, on_queue)

    cluster = Failing(2)
    source = _source(cluster, 16)
    for instance in await _group(source, 2):
        assert source.reuse(instance)
    cluster.group_failures = [CapacityExceeded("full")]
    group, (single,) = source.begin_group(4), _acquire(source, 1)
    async with asyncio.timeout(30.0):
        with pytest.raises(CapacityExceeded):
            await group
        instance = await single
    assert instance.is_used
    source.release(instance)
    await _close(cluster, source)


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
