"""A host's promises about starting, releasing and taking over, on the fake engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from aenv_ray import logs
from aenv_ray.actors.calls.wire import CallMessage
from aenv_ray.actors.host import host as host_module
from aenv_ray.actors.host.host import Host
from aenv_ray.clock import SystemClock
from aenv_ray.engines.base import RunningSandbox
from aenv_ray.engines.door import DoorSandbox
from aenv_ray.errors import (
    AenvError,
    CapacityExceeded,
    DeadlineExceeded,
    FabricUnavailable,
    InsideCause,
    InstanceNotFound,
    InstanceReleased,
    SandboxLost,
    SandboxStartFailed,
)
from aenv_ray.hub.store import InstanceStore
from aenv_ray.ids import new_instance_id
from aenv_ray.models import ActorDensity, InstanceInfo, InstanceRecord, InstanceSpec, InstanceStatus
from aenv_ray.policy import Policy
from aenv_ray.testing.contract_bench import eventually
from tests.contract.hub.memory_store import MemoryInstanceStore
from tests.fake_clock import FakeClock
from tests.unit.actors.host.spy_engine import AWAY, HOST, SpyEngine


@pytest.fixture
def spec(spec: Callable[..., InstanceSpec]) -> InstanceSpec:
    return spec()


async def test_a_repeated_start_waits_for_the_first(
    host: Host, engine: SpyEngine, spec: InstanceSpec
) -> None:
    """Ray sends an interrupted task again: the same id starts once, and both are told of it."""
    engine.gate.clear()
    async with asyncio.TaskGroup() as group:
        first = group.create_task(host.start([spec]))
        await engine.at_gate.wait()
        second = group.create_task(host.start([spec]))
        await asyncio.sleep(0)
        engine.gate.set()
    assert engine.made == [spec.instance_id]
    assert [i.id for i in first.result()] == [spec.instance_id]  # type: ignore[union-attr]
    assert second.result() == first.result()
    assert await host.start([spec]) == first.result()
    assert host.load()[0] == 1


async def test_instances_that_start_or_are_expected_count(
    host: Host, engine: SpyEngine, spec: InstanceSpec
) -> None:
    """Otherwise a node counts as drained, and is stopped, while they start."""
    expected = new_instance_id("probe")
    assert host.reserve([expected], 30.0)
    assert await host.count_instances() == 0, "it may be started elsewhere"
    engine.gate.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(host.start([spec]))
        await engine.at_gate.wait()
        assert (await host.count_instances(), await host.instances()) == (1, [])
        await host.drain(60.0)
        assert await host.count_instances() == 2
        engine.gate.set()
    host.reserve([expected], 0.0)
    assert await host.count_instances() == 1
    await host.release([spec.instance_id])
    assert await host.count_instances() == 0


async def test_a_repeated_start_is_told_of_the_firsts_failure(
    host: Host, engine: SpyEngine, spec: InstanceSpec
) -> None:
    """Also when the first failed; a later one tries anew, for nothing is left of it."""
    engine.gate.clear()
    engine.fail_next_start("no fuel")
    async with asyncio.TaskGroup() as group:
        first = group.create_task(host.start([spec]))
        await engine.at_gate.wait()
        second = group.create_task(host.start([spec]))
        await asyncio.sleep(0)
        engine.gate.set()
    for outcome in (*first.result(), *second.result()):
        assert isinstance(outcome, SandboxStartFailed)
        assert "no fuel" in outcome.message
    (again,) = await host.start([spec])
    assert isinstance(again, InstanceInfo)


async def test_a_start_that_is_cancelled_leaves_its_repetition_an_error(
    host: Host, engine: SpyEngine, spec: InstanceSpec
) -> None:
    """Whoever waits for a start that was cancelled does not wait for ever."""
    engine.gate.clear()
    first = asyncio.create_task(host.start([spec]))
    await engine.at_gate.wait()
    second = asyncio.create_task(host.start([spec]))
    await asyncio.sleep(0)
    first.cancel()
    (outcome,) = await second
    assert isinstance(outcome, FabricUnavailable)
    assert first.cancelled()
    assert host.load()[0] == 0


async def test_what_was_released_before_its_start_cannot_come_to_be(
    host: Host, engine: SpyEngine, spec: InstanceSpec
) -> None:
    """A release that overtakes the start: the id is used up on this host."""
    assert await host.release([spec.instance_id]) == []
    (outcome,) = await host.start([spec])
    assert isinstance(outcome, InstanceReleased)
    assert engine.made == []


async def test_what_is_released_while_it_starts_ends_when_it_is_up(
    host: Host, engine: SpyEngine, spec: InstanceSpec
) -> None:
    """Invariant 4; and a start that is sent again does not bring it back."""
    engine.gate.clear()
    async with asyncio.TaskGroup() as group:
        started = group.create_task(host.start([spec]))
        await engine.at_gate.wait()
        assert await host.release([spec.instance_id]) == [spec.instance_id]
        engine.gate.set()
    for outcome in (*started.result(), *await host.start([spec])):
        assert isinstance(outcome, InstanceReleased)
    assert await engine.running() == []
    assert engine.made == [spec.instance_id]


async def test_every_method_says_the_same_of_an_unknown_instance(host: Host) -> None:
    unknown = new_instance_id("probe")
    with pytest.raises(InstanceNotFound) as info:
        await host.info(unknown)
    with pytest.raises(InstanceNotFound) as call:
        await host.calls.call(CallMessage(unknown, "tools/call", 30.0, b'{"name":"count"}'))
    assert info.value.message_and_hint == call.value.message_and_hint
    assert unknown in info.value.message


async def test_what_ended_is_not_started_again(host: Host, spec: InstanceSpec) -> None:
    """A start that Ray sends again after the end gets the end."""
    await host.start([spec])
    await host.release([spec.instance_id])
    (outcome,) = await host.start([spec])
    assert isinstance(outcome, InstanceReleased)


async def restarted(
    open_host: Callable[[InstanceStore], Host],
    spec: InstanceSpec,
    engine: SpyEngine,
    away: int,
    store: InstanceStore | None = None,
) -> Host:
    """Return a host that took over from one that ran an instance of `spec`."""
    store = store or MemoryInstanceStore()
    earlier = open_host(store)
    await earlier.open()
    await earlier.start([spec])
    await earlier.close()
    engine.away_for = away
    later = open_host(store)
    await later.open()
    return later


async def test_a_launcher_that_is_away_for_a_moment_is_no_loss(
    open_host: Callable[[InstanceStore], Host], spec: InstanceSpec, engine: SpyEngine
) -> None:
    """Invariant 2: only `SandboxLost` is a loss; the rest is asked again."""
    host = await restarted(open_host, spec, engine, away=2)
    info = await host.info(spec.instance_id)
    assert (info.status, info.generation) == (InstanceStatus.RUNNING, 1)
    assert engine.away_for == 0


async def test_what_cannot_be_reached_is_given_up_and_ended(
    open_host: Callable[[InstanceStore], Host],
    spec: InstanceSpec,
    engine: SpyEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant 3: given up is not forgotten: every sweep tries to end it until it is gone."""
    monkeypatch.setattr(host_module, "ADOPT_DEADLINE_S", 0.0)
    host = await restarted(open_host, spec, engine, away=2)
    assert (await host.info(spec.instance_id)).status is InstanceStatus.FAILED
    (outcome,) = await host.start([spec])
    assert isinstance(outcome, SandboxLost)
    assert AWAY in outcome.message
    assert [s.instance_id for s in await engine.running()] == [spec.instance_id]
    await host.sweep()
    assert engine.away_for == 0
    await host.sweep()
    assert await engine.running() == []


async def test_an_end_that_failed_is_tried_again(
    host: Host, spec: InstanceSpec, engine: SpyEngine
) -> None:
    """Invariant 3: a release that did not reach the launcher is made up for."""
    await host.start([spec])
    engine.away_for = 1
    with pytest.raises(FabricUnavailable, match=AWAY):
        await host.release([spec.instance_id])
    assert await host.instances() == []
    await host.sweep()
    assert await engine.running() == []


async def test_a_sweep_goes_on_while_an_engine_is_slow(
    host: Host, engine: SpyEngine, spec: InstanceSpec
) -> None:
    """Otherwise no pool of the host is filled, and the host never ends, until it is fast again."""
    await host.start([spec])
    engine.away_for = 2
    engine.refusal = DeadlineExceeded("the launcher did not answer")
    with pytest.raises(DeadlineExceeded):
        await host.release([spec.instance_id])
    await host.sweep()
    assert engine.away_for == 0
    await host.sweep()
    assert await engine.running() == []


async def test_a_host_whose_node_is_going_down_starts_nothing(
    tmp_path: Path, spec: InstanceSpec, engine: SpyEngine
) -> None:
    """Ray lets an actor outlive its raylet for a moment: what it made then would stay."""
    host = Host(
        HOST, node_id="n", density=ActorDensity.SHARED, make_engine=lambda _: engine,
        store=MemoryInstanceStore(), projects_dir=tmp_path, is_node_up=lambda: False,
    )  # fmt: skip
    await host.open()
    with pytest.raises(FabricUnavailable, match="going down"):
        await host.start([spec])
    assert engine.made == []
    await host.close()


async def test_what_was_made_and_not_recorded_is_ended_on_the_engine_that_made_it(
    open_host: Callable[[InstanceStore], Host], spec: InstanceSpec, engine: SpyEngine
) -> None:
    """Invariant 3: a host that dies between the two has left only the engine's name."""
    store = MemoryInstanceStore()
    earlier = open_host(store)
    await earlier.open()
    await earlier.start([spec])
    store.delete([spec.instance_id])
    await earlier.close()
    assert store.engines_used() == {HOST: frozenset({spec.engine})}
    later = open_host(store)
    await later.open()
    assert await engine.running() == []
    assert await later.instances() == []


async def unrecorded(
    open_host: Callable[[InstanceStore], Host], spec: InstanceSpec, engine: SpyEngine
) -> Host:
    """Return a host whose node could not be asked for what an earlier one did not record."""
    store = MemoryInstanceStore()
    earlier = open_host(store)
    await earlier.open()
    await earlier.start([spec])
    store.delete([spec.instance_id])
    await earlier.close()
    engine.away_for = 1
    later = open_host(store)
    await later.open()
    assert [s.instance_id for s in await engine.running()] == [spec.instance_id]
    return later


@pytest.mark.parametrize("refusal", [FabricUnavailable(AWAY), DeadlineExceeded("slow")])
async def test_what_was_not_recorded_is_ended_once_its_node_answers(
    open_host: Callable[[InstanceStore], Host],
    spec: InstanceSpec,
    engine: SpyEngine,
    refusal: AenvError,
) -> None:
    """Invariant 3: a daemon that was down when the host came back is asked again."""
    engine.refusal = refusal
    host = await unrecorded(open_host, spec, engine)
    engine.away_for = 1
    await host.sweep()
    assert len(await engine.running()) == 1
    await host.sweep()
    assert await engine.running() == []


async def test_a_listing_that_comes_too_late_does_not_keep_a_host_from_opening(
    open_host: Callable[[InstanceStore], Host],
    spec: InstanceSpec,
    engine: SpyEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail() -> list[RunningSandbox]:
        raise DeadlineExceeded("waited 60 s for the node's launcher")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "running", fail)
        host = await restarted(open_host, spec, engine, away=0)
        await host.sweep()
    assert [info.id for info in await host.instances()] == [spec.instance_id]


async def test_what_was_not_recorded_is_never_mixed_up_with_what_is_new(
    open_host: Callable[[InstanceStore], Host], spec: InstanceSpec, engine: SpyEngine
) -> None:
    """Nothing is started before the search, which would take it for something left."""
    host = await unrecorded(open_host, spec, engine)
    new = spec.model_copy(update={"instance_id": new_instance_id("probe")})
    engine.away_for = 1
    with pytest.raises(FabricUnavailable, match=AWAY):
        await host.start([new])
    (started,) = await host.start([new])
    assert isinstance(started, InstanceInfo)
    await host.sweep()
    assert [s.instance_id for s in await engine.running()] == [new.instance_id]


async def test_calls_that_stood_in_a_queue_may_wait_for_each_other(
    host: Host, spec: InstanceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller's lone calls never do, however late they come."""
    may_wait: list[bool] = []
    request_json = DoorSandbox.request_json

    async def request(*args: Any, **options: Any) -> bytes:
        may_wait.append(options["may_wait"])
        return await request_json(*args, **options)

    monkeypatch.setattr(DoorSandbox, "request_json", request)
    await host.start([spec])
    now = SystemClock().now()
    for sent_at in (0.0, now + 60.0, now - 1.0):
        message = CallMessage(spec.instance_id, "ping", 30.0, b"{}", sent_at)
        assert (await host.calls.call(message)).json == b"{}"
    assert may_wait == [False, False, True]


async def test_a_host_takes_the_first_engine_that_its_node_can_run(
    open_host: Callable[..., Host], spec: InstanceSpec, engine: SpyEngine
) -> None:
    """Of those that the policy allows; if it can run none, the error names what it can run."""
    host = open_host(
        MemoryInstanceStore(),
        lambda: Policy(engines=("process",)),
        find_engines=lambda: ("kubernetes", "process"),
    )
    await host.open()
    assert host.engines() == ("kubernetes", "process")
    either = spec.model_copy(update={"engines": ("docker", "kubernetes", "process")})
    (outcome,) = await host.start([either])
    assert isinstance(outcome, InstanceInfo)
    assert outcome.engine == "process"
    other = spec.model_copy(
        update={"instance_id": new_instance_id("probe"), "engines": ("docker",)}
    )
    with pytest.raises(FabricUnavailable, match=r"engine docker; .* 1 with kubernetes, process"):
        await host.start([other])
    assert len(engine.made) == 1


async def test_creates_and_losses_are_counted_by_outcome_and_cause(
    host: Host, engine: SpyEngine, spec: InstanceSpec, store: MemoryInstanceStore
) -> None:
    engine.fail_next_start("no fuel")
    await host.start([spec])
    specs = [spec.model_copy(update={"instance_id": new_instance_id("probe")}) for _ in range(3)]
    await host.start(specs)
    engine.kill(specs[0].instance_id)
    engine.kill(specs[1].instance_id, InsideCause.MEMORY)
    await host.release([specs[2].instance_id])
    await eventually(lambda: not host.measures().instances, "all have ended")
    measures = host.measures()
    assert measures.counters.creates == {("fake", "sandbox_start_failed"): 1, ("fake", "ok"): 3}
    assert measures.counters.lost == {("fake", "outside"): 1, ("fake", "memory"): 1}
    assert measures.pods == {}


async def test_lines_about_an_instance_name_its_owner(
    host: Host, spec: InstanceSpec, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logs.events.name)
    mine = spec.model_copy(update={"owner": "ann"})
    await host.start([mine])
    await host.release([mine.instance_id])
    lines = [record for record in caplog.records if record.name == logs.events.name]
    assert [(vars(line)["instance"], vars(line)["owner"]) for line in lines] == [
        (mine.instance_id, "ann")
    ] * 2
    assert [line.getMessage().partition(": ")[2] for line in lines] == ["ok", "it was released"]


async def test_warnings_about_an_instance_name_its_owner(
    open_host: Callable[[InstanceStore], Host],
    spec: InstanceSpec,
    engine: SpyEngine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who searches the logs for an instance or an owner looks for what went wrong."""

    class Full(MemoryInstanceStore):
        def put(self, records: Sequence[InstanceRecord]) -> None:
            if any(record.generation for record in records):
                raise FabricUnavailable("the disk is full")
            super().put(records)

    monkeypatch.setattr(host_module, "ADOPT_DEADLINE_S", 0.0)
    for store, away in (Full(), 0), (MemoryInstanceStore(), 2):
        mine = spec.model_copy(update={"instance_id": new_instance_id("probe"), "owner": "ann"})
        host = await restarted(open_host, mine, engine, away=away, store=store)
        engine.away_for = 0
        await host.release([mine.instance_id])
        (line,) = (one for one in caplog.records if mine.instance_id in one.getMessage())
        assert "disk is full" in line.getMessage() or "cannot be adopted" in line.getMessage()
        assert (vars(line)["instance"], vars(line)["owner"]) == (mine.instance_id, "ann")
        caplog.clear()


async def test_an_instance_keeps_slots_for_its_inner_ones_on_a_successor_too(
    open_host: Callable[..., Host], spec: InstanceSpec
) -> None:
    """Invariant 14: inner instances start however full the host is, and use up no slots."""
    store, others = MemoryInstanceStore(), [new_instance_id("probe") for _ in range(3)]
    outer = spec.model_copy(update={"places": 3})
    earlier = open_host(store, slots=4)
    await earlier.open()
    await earlier.start([outer])
    await earlier.close()
    host = open_host(store, slots=4, on_empty=lambda: None)
    await host.open()
    assert host.load() == (3, 4)
    alone, late, inner = (spec.model_copy(update={"instance_id": i}) for i in others)
    await host.start([alone])
    with pytest.raises(CapacityExceeded):
        await host.start([late])
    (info,) = await host.start([inner.model_copy(update={"places": 0})])  # type: ignore[misc]
    assert isinstance(info, InstanceInfo)
    assert (host.load(), info.places) == ((4, 4), 0)
    await host.release([outer.instance_id, alone.instance_id])
    assert host.load() == (0, 4)


async def test_a_host_with_inner_instances_only_does_not_end(
    open_host: Callable[..., Host], spec: InstanceSpec
) -> None:
    """The outer ones may be on other nodes."""
    ended: list[bool] = []
    store, clock = MemoryInstanceStore(), FakeClock(SystemClock().now())
    host = open_host(store, slots=4, clock=clock, on_empty=lambda: ended.append(True))
    await host.open()
    await host.start([spec.model_copy(update={"places": 0})])
    store.delete([spec.instance_id])
    clock.advance(host_module.LINGER_S + 1)
    await host.sweep()
    assert ended == []
    await host.release([spec.instance_id])
    await host.sweep()
    clock.advance(host_module.LINGER_S + 1)
    await host.sweep()
    assert ended == [True]


async def test_an_instance_takes_its_slot_until_its_sandbox_is_gone(
    host: Host, engine: SpyEngine, spec: InstanceSpec
) -> None:
    """Otherwise a slot is reserved for another instance, and used when that comes."""
    await host.start([spec])
    assert host.load()[0] == 1
    engine.stop_gate.clear()
    releasing = asyncio.create_task(host.release([spec.instance_id]))
    for _ in range(10):
        await asyncio.sleep(0)
        assert host.load()[0] == 1
    engine.stop_gate.set()
    await releasing
    assert host.load()[0] == 0
    engine.away_for = 1
    other = spec.model_copy(update={"instance_id": new_instance_id("probe")})
    await host.start([other])
    with pytest.raises(FabricUnavailable):
        await host.release([other.instance_id])
    assert host.load()[0] == 1, "it may still run"
    await host.sweep()
    assert host.load()[0] == 0


async def test_an_engine_that_does_not_answer_keeps_no_sandbox_of_another_one_alive(
    open_host: Callable[..., Host], engine: SpyEngine, spec: InstanceSpec
) -> None:
    away = SpyEngine()
    engines = {"fake": engine, "away": away}
    host = open_host(MemoryInstanceStore())
    host._engines._make = engines.__getitem__
    await host.open()
    other = {"engine": "away", "instance_id": new_instance_id("probe")}
    specs = [spec.model_copy(update=other), spec]
    await host.start(specs)
    away.away_for = 1
    with pytest.raises(FabricUnavailable):
        await host.release([each.instance_id for each in specs])
    assert await engine.ids() == {other["instance_id"]}  # all fake engines of a host share them
    await host.sweep()
    assert await engine.ids() == set()


async def renewed_late(host: Host, engine: SpyEngine, spec: InstanceSpec, ttl_s: float) -> Any:
    """Return a task that renews an instance, and has moved the deadline of its sandbox only."""
    engine.deadline_gate.clear()
    task = asyncio.create_task(host.renew(spec.instance_id, ttl_s))
    while spec.instance_id not in engine.deadlines:  # noqa: ASYNC110  # turns of the loop
        await asyncio.sleep(0)
    return task


async def test_an_instance_that_ends_while_it_is_renewed_leaves_no_record(
    host: Host, engine: SpyEngine, store: MemoryInstanceStore, spec: InstanceSpec
) -> None:
    """Invariant 4: a record that stays would keep the host, and with it the node, for ever."""
    await host.start([spec])
    renewing = await renewed_late(host, engine, spec, 7200.0)
    await host.release([spec.instance_id])
    engine.deadline_gate.set()
    with pytest.raises(InstanceReleased):
        await renewing
    assert store.list() == []


async def test_of_two_renewals_at_once_the_later_deadline_counts(
    host: Host, engine: SpyEngine, store: MemoryInstanceStore, spec: InstanceSpec
) -> None:
    await host.start([spec])
    renewing = await renewed_late(host, engine, spec, 7200.0)
    shorter = asyncio.create_task(host.renew(spec.instance_id, 600.0))
    for _ in range(10):
        await asyncio.sleep(0)
    engine.deadline_gate.set()
    promised = (await renewing).deadline
    assert (await shorter).deadline == promised
    assert engine.deadlines[spec.instance_id] == promised
    assert [record.deadline for record in store.list()] == [promised]
