"""What environments may call, how deep, and that inner instances end with the outer one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pytest

from aenv_ray.actors.calls.call_batching import Reports
from aenv_ray.actors.calls.json_calls import JsonCall
from aenv_ray.actors.calls.wire import CallMessage
from aenv_ray.actors.host import environment_relay
from aenv_ray.actors.host.environment_relay import MAX_DEPTH, EnvironmentRelay
from aenv_ray.actors.host.host import Host
from aenv_ray.actors.host.instance import EndReason, InstanceLife
from aenv_ray.clock import SystemClock
from aenv_ray.engines.base import EndCause
from aenv_ray.errors import (
    AenvError,
    CallCancelled,
    CallOutcomeUnknown,
    CapacityExceeded,
    ConfigError,
    FabricUnavailable,
    InstanceExpired,
    InstanceReleased,
    PolicyRefused,
    ToolTimeout,
    is_infrastructure,
)
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import ActorDensity, InstanceRecord, InstanceSpec, Isolation
from aenv_ray.project.config import DeployConfig
from aenv_ray.runtime.door.async_calls import Disconnect
from aenv_ray.testing.contract_bench import eventually
from tests.contract.hub.memory_store import MemoryInstanceStore
from tests.fake_clock import FakeClock

LIMIT = 4
DECLARED = DeployConfig(environments=("other@1.0", "third"), inner_instances=LIMIT)


class FakeInstances:
    """Inner instances that note what is done with them, and are their own calls."""

    def __init__(self) -> None:
        self.alive: list[InstanceId] = []
        self.renewed: list[float] = []
        self.cancelled: list[str] = []
        self.called: list[JsonCall] = []
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.is_full = False
        self.waits_for_room = False
        self.places = 1
        """How many inner instances the next one counts for."""
        self.given_up: list[InstanceId] = []
        self.expired: list[InstanceId] = []
        self.may_release = asyncio.Event()
        self.may_release.set()
        self.changed = asyncio.Event()
        self.refusals: list[AenvError] = []
        """What the next attempts to end instances raise."""
        self.silent: list[InstanceId] = []

    @property
    def calls(self) -> FakeInstances:
        return self

    async def create(
        self,
        reference: str,
        instance_id: InstanceId,
        outer: InstanceSpec,
        ttl_s: float,
        *,
        take: Callable[[int], None],
        on_queue: Callable[[bool], None],
    ) -> None:
        assert outer.owner == "ann"
        assert 50.0 < ttl_s <= 60.0
        take(self.places)
        on_queue(self.waits_for_room)
        self.changed.set()
        try:
            await self.may_start.wait()
        except asyncio.CancelledError:
            self.given_up.append(instance_id)
            raise
        if self.is_full:
            raise CapacityExceeded("full")
        self.alive.append(instance_id)

    async def renew(self, instance_ids: Sequence[InstanceId], ttl_s: float) -> None:
        if set(instance_ids) & set(self.expired):
            raise InstanceExpired("its TTL passed")
        self.renewed += [ttl_s for _ in instance_ids]
        self.changed.set()

    async def release(self, instance_ids: Sequence[InstanceId]) -> None:
        await self.may_release.wait()
        if self.refusals:
            raise self.refusals.pop()
        self.alive = [one for one in self.alive if one not in instance_ids]
        self.changed.set()

    async def call(self, call: JsonCall, disconnect: Disconnect, name: str = "") -> bytes:
        self.called.append(call)
        self.changed.set()
        await self.may_answer.wait()
        if call.target in self.silent:
            raise CallOutcomeUnknown("it did not answer")
        if call.target not in self.alive:
            raise InstanceReleased("released")
        return b'{"data":1}'

    def follow(
        self, call: JsonCall, name: str, disconnect: Disconnect
    ) -> AsyncGenerator[Reports | bytes]:
        raise NotImplementedError

    async def cancel(self, target: str, name: str) -> None:
        self.cancelled.append(name)
        self.changed.set()

    async def until_changed(self) -> None:
        async with asyncio.timeout(10):
            await self.changed.wait()
        self.changed.clear()


@pytest.fixture
def inner() -> FakeInstances:
    return FakeInstances()


@pytest.fixture
def store() -> MemoryInstanceStore:
    return MemoryInstanceStore()


@pytest.fixture
def relay(inner: FakeInstances, store: MemoryInstanceStore) -> EnvironmentRelay:
    async def connect() -> FakeInstances:
        return inner

    return EnvironmentRelay(connect, store, SystemClock())


def an_outer(outer: tuple[str, ...] = ()) -> InstanceLife:
    now = SystemClock().now()
    spec = InstanceSpec(
        instance_id=InstanceId("one-aaaaaaaa"), reference="one@1.0.0", digest="d", ttl_s=60.0,
        owner="ann", outer=outer,
    )  # fmt: skip
    record = InstanceRecord(
        spec=spec, host_id=HostId("h"), node_id="n", density=ActorDensity.SHARED, created_at=now,
        deadline=now + 60.0, isolation=Isolation(kind="none"), start_mode="template",
    )  # fmt: skip
    return InstanceLife(record, now)


def params(environment: str = "other@1.0", **fields: Any) -> dict[str, Any]:
    usual = {
        "environment": environment, "key": "", "method": "aenv/function", "params": {"name": "f"},
        "timeout_s": 5.0, "call_id": "c1",
    }  # fmt: skip
    return {**usual, **fields}


async def test_calls_of_one_name_reach_one_inner_instance_and_each_key_has_its_own(
    relay: EnvironmentRelay, inner: FakeInstances, store: MemoryInstanceStore
) -> None:
    outer = an_outer()
    inner.may_start.clear()
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(relay.answer(outer, DECLARED, params()))
        await inner.until_changed()
        (recorded,) = store.list()
        assert list(recorded.inner) == ["other@1.0 "], "recorded before it is created"
        inner.may_start.set()
    assert len(inner.alive) == 1
    assert {call.target for call in inner.called} == set(inner.alive)
    assert await relay.answer(outer, DECLARED, params(key="b")) == b'{"data":1}'
    assert await relay.answer(outer, DECLARED, params("third@2.0")) == b'{"data":1}'
    assert len(inner.alive) == 3


@pytest.mark.parametrize(
    ("environment", "outer", "error", "words"),
    [
        ("unknown@1.0", (), ConfigError, r"may not call unknown@1.0 \(declared: other@1.0, third"),
        ("other@2.0", (), ConfigError, "may not call other@2.0"),
        ("third", ("third@1.0.0",), PolicyRefused, "loop: third@1.0.0 calls one@1.0.0 calls third"),
        (
            "third",
            ("a@1", "b@1", "c@1"),
            PolicyRefused,
            f"nested at most {MAX_DEPTH} deep: a@1 calls b@1",
        ),
    ],
)
async def test_what_is_not_declared_loops_or_is_too_deep_is_refused(
    relay: EnvironmentRelay,
    inner: FakeInstances,
    environment: str,
    outer: tuple[str, ...],
    error: type[AenvError],
    words: str,
) -> None:
    with pytest.raises(error, match=words) as raised:
        await relay.answer(an_outer(outer), DECLARED, params(environment))
    assert raised.value.hint
    assert inner.called == []


async def test_an_instance_has_a_limit_of_inner_ones(
    relay: EnvironmentRelay, inner: FakeInstances
) -> None:
    outer = an_outer()
    for number in range(LIMIT):
        await relay.answer(outer, DECLARED, params(key=str(number)))
    with pytest.raises(PolicyRefused, match=f"may have {LIMIT} inner instances") as raised:
        await relay.answer(outer, DECLARED, params(key="more"))
    assert "deployConfig.innerInstances of one@1.0.0" in str(raised.value.hint)
    assert not is_infrastructure(raised.value), "invariant 14: an agent may choose the keys"
    await relay.answer(outer, DECLARED, params(key="0", method="aenv/release"))
    await relay.answer(outer, DECLARED, params(key="more"))
    await relay.answer(outer, DECLARED, params("", method="aenv/release"))
    assert inner.alive == []
    assert outer.record.inner == {}


@pytest.mark.parametrize(
    "wrong", [{"method": "aenv/exec"}, {"timeout_s": -1}, {"more": 1}, {"call_id": None}]
)
async def test_a_malformed_request_is_refused(
    relay: EnvironmentRelay, inner: FakeInstances, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError):
        await relay.answer(an_outer(), DECLARED, params(**wrong))
    assert inner.alive == []


async def test_an_inner_instance_that_does_not_start_is_tried_again(
    relay: EnvironmentRelay, inner: FakeInstances
) -> None:
    outer = an_outer()
    inner.is_full = True
    with pytest.raises(CapacityExceeded):
        await relay.answer(outer, DECLARED, params(is_for_tool=False))
    inner.is_full = False
    await relay.answer(outer, DECLARED, params())
    assert list(outer.record.inner.values()) == inner.alive


async def test_an_inner_instance_counts_for_those_that_it_may_have(
    relay: EnvironmentRelay, inner: FakeInstances, store: MemoryInstanceStore
) -> None:
    """Otherwise a tree of instances would be larger than what the quotas have counted."""
    outer = an_outer()
    inner.places = LIMIT
    await relay.answer(outer, DECLARED, params())
    inner.places = 1
    for _ in range(2):
        with pytest.raises(PolicyRefused, match=f"has {LIMIT}: no room for 1 more"):
            await relay.answer(outer, DECLARED, params(key="b"))
    (recorded,) = store.list()
    assert recorded.inner_places == {"other@1.0 ": LIMIT}, "a successor of the host counts it"
    await relay.answer(outer, DECLARED, params("", method="aenv/release"))
    await relay.answer(outer, DECLARED, params(key="b"))
    inner.places = LIMIT
    with pytest.raises(PolicyRefused, match=r"for 4 more \(third, 3 of its own included\)"):
        await relay.answer(outer, DECLARED, params("third"))
    assert list(outer.record.inner) == ["other@1.0 b"]
    assert outer.record.inner_places == {"other@1.0 b": 1}


async def test_a_slow_start_is_a_timeout_and_goes_on(
    relay: EnvironmentRelay, inner: FakeInstances
) -> None:
    """Invariant 14: a short deadline voids no episode, and does not start it anew each time."""
    outer = an_outer()
    inner.may_start.clear()
    for _ in range(2):
        with pytest.raises(ToolTimeout, match="did not start within"):
            await relay.answer(outer, DECLARED, params(timeout_s=0.01))
    (started,) = outer.record.inner.values()
    inner.may_start.set()
    assert await relay.answer(outer, DECLARED, params()) == b'{"data":1}'
    assert inner.alive == [started]


@pytest.mark.parametrize("is_for_tool", [False, True])
async def test_a_lack_of_room_is_a_failure_of_the_infrastructure_unless_a_tool_asked(
    relay: EnvironmentRelay, inner: FakeInstances, is_for_tool: bool
) -> None:
    """Invariants 2 and 14: an agent can choose what a tool asks for, and when."""
    outer = an_outer()
    inner.may_start.clear()
    inner.waits_for_room = True
    first = asyncio.create_task(relay.answer(outer, DECLARED, params(timeout_s=60.0)))
    await inner.until_changed()
    error = ToolTimeout if is_for_tool else CapacityExceeded
    with pytest.raises(error, match=r"no room for other@1\.0") as raised:
        await relay.answer(
            outer, DECLARED, params(timeout_s=0.01, call_id="c2", is_for_tool=is_for_tool)
        )
    assert is_infrastructure(raised.value) is not is_for_tool
    inner.may_start.set()
    assert await first == b'{"data":1}'
    inner.is_full = True
    with pytest.raises(error, match="full") as raised:
        await relay.answer(outer, DECLARED, params(key="b", is_for_tool=is_for_tool))
    assert is_infrastructure(raised.value) is not is_for_tool


async def test_an_inner_call_is_cancelled_with_the_outer_one(
    relay: EnvironmentRelay, inner: FakeInstances
) -> None:
    """Invariant 11."""
    outer = an_outer()
    await relay.answer(outer, DECLARED, params())
    inner.may_answer.clear()
    inner.changed.clear()
    asked = asyncio.create_task(relay.answer(outer, DECLARED, params(call_id="c2")))
    await inner.until_changed()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await inner.until_changed()
    assert inner.cancelled == [f"{inner.alive[0]}\nc2"], "no name of another caller's call"


async def test_inner_instances_are_renewed_and_end_with_the_outer_one(
    relay: EnvironmentRelay, inner: FakeInstances
) -> None:
    outer = an_outer()
    await relay.answer(outer, DECLARED, params())
    inner.changed.clear()
    relay.renew(outer, 90.0)
    await inner.until_changed()
    assert inner.renewed == [90.0]
    outer.end(EndReason.LOST, EndCause("killed"), 0.0)
    relay.end(outer.record)
    await inner.until_changed()
    assert inner.alive == []


async def test_one_that_still_starts_when_the_outer_one_ends_is_released(
    relay: EnvironmentRelay, inner: FakeInstances
) -> None:
    outer = an_outer()
    inner.may_start.clear()
    asked = asyncio.create_task(relay.answer(outer, DECLARED, params()))
    await inner.until_changed()
    (starting,) = outer.record.inner.values()
    outer.end(EndReason.RELEASED, EndCause("released"), 0.0)
    relay.end(outer.record)
    with pytest.raises(InstanceReleased):
        await asked
    await relay._tasks.settle(10)
    assert inner.given_up == [starting]
    assert inner.alive == []


async def test_creating_an_inner_instance_takes_from_the_time_of_the_call(
    relay: EnvironmentRelay, inner: FakeInstances
) -> None:
    """Otherwise the code of the environment would stop waiting before the answer."""
    outer = an_outer()
    await relay.answer(outer, DECLARED, params())
    (call,) = inner.called
    assert 0.0 < call.meta["aenv/timeout_s"] < 5.0


async def test_a_call_waits_no_longer_than_its_own_time_for_an_instance_that_another_creates(
    relay: EnvironmentRelay, inner: FakeInstances
) -> None:
    outer = an_outer()
    inner.may_start.clear()
    first = asyncio.create_task(relay.answer(outer, DECLARED, params()))
    await inner.until_changed()
    with pytest.raises(ToolTimeout, match="did not start within"):
        await relay.answer(outer, DECLARED, params(timeout_s=0.01, call_id="c2"))
    inner.may_start.set()
    assert await first == b'{"data":1}'


async def test_one_that_is_released_while_it_starts_is_ended(
    relay: EnvironmentRelay, inner: FakeInstances
) -> None:
    outer = an_outer()
    inner.may_start.clear()
    asked = asyncio.create_task(relay.answer(outer, DECLARED, params()))
    await inner.until_changed()
    (starting,) = outer.record.inner.values()
    await relay.answer(outer, DECLARED, params("", method="aenv/release"))
    with pytest.raises(CallCancelled, match="was released while it was called"):
        await asked
    assert inner.given_up == [starting], "else an agent could pile up starts"
    assert inner.alive == []
    assert outer.record.inner == {}


async def test_releasing_an_inner_instance_during_a_call_of_it_voids_no_episode(
    relay: EnvironmentRelay, inner: FakeInstances
) -> None:
    """Invariant 14: an agent may call two tools at once, one of which releases."""
    outer = an_outer()
    inner.may_answer.clear()
    asked = asyncio.create_task(relay.answer(outer, DECLARED, params()))
    while not inner.called:
        await inner.until_changed()
    await relay.answer(outer, DECLARED, params(method="aenv/release"))
    inner.may_answer.set()
    with pytest.raises(CallCancelled, match="was released while it was called"):
        await asked


async def test_a_release_that_is_cancelled_still_ends(
    relay: EnvironmentRelay, inner: FakeInstances
) -> None:
    """Invariant 14: else the next call would find an ended instance, and void the episode."""
    outer = an_outer()
    await relay.answer(outer, DECLARED, params())
    inner.may_release.clear()
    releasing = asyncio.create_task(relay.answer(outer, DECLARED, params(method="aenv/release")))
    await asyncio.sleep(0)
    assert relay.is_busy
    releasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    inner.changed.clear()
    inner.may_release.set()
    await inner.until_changed()
    assert await relay.answer(outer, DECLARED, params()) == b'{"data":1}'


async def test_an_inner_instance_that_was_lost_otherwise_is_a_failure_of_the_infrastructure(
    relay: EnvironmentRelay, inner: FakeInstances
) -> None:
    """Invariant 2."""
    outer = an_outer()
    await relay.answer(outer, DECLARED, params())
    inner.alive.clear()
    with pytest.raises(InstanceReleased):
        await relay.answer(outer, DECLARED, params())


async def test_one_that_cannot_be_renewed_does_not_keep_others_from_it(
    relay: EnvironmentRelay, inner: FakeInstances
) -> None:
    outer = an_outer()
    await relay.answer(outer, DECLARED, params())
    await relay.answer(outer, DECLARED, params(key="b"))
    inner.expired = inner.alive[:1]
    inner.changed.clear()
    relay.renew(outer, 90.0)
    await inner.until_changed()
    assert inner.renewed == [90.0]


async def test_an_inner_sandbox_that_does_not_answer_voids_no_episode(
    relay: EnvironmentRelay, inner: FakeInstances
) -> None:
    """Invariant 14: an agent can keep it busy, for example with a regular expression."""
    outer = an_outer()
    await relay.answer(outer, DECLARED, params())
    inner.silent = inner.alive
    for method in ("tools/call", "aenv/reward", "aenv/end_processes"):
        with pytest.raises(ToolTimeout, match="did not answer"):
            await relay.answer(outer, DECLARED, params(method=method))


async def test_inner_instances_are_ended_when_the_fabric_answers_again(
    relay: EnvironmentRelay,
    inner: FakeInstances,
    store: MemoryInstanceStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant 3: otherwise they live until their deadline; the host waits for that."""
    monkeypatch.setattr(environment_relay, "_RETRY_S", (0.0,))
    outer = an_outer()
    await relay.answer(outer, DECLARED, params())
    inner.refusals = [FabricUnavailable("the controller restarts") for _ in range(3)]
    relay.end(outer.record)
    assert [record.id for record in store.list()] == [outer.record.id], "if this host dies now"
    await relay._tasks.settle(10)
    assert inner.refusals == []
    assert inner.alive == []
    assert store.list() == []
    assert not relay.is_busy


async def test_inner_instances_beyond_their_deadline_are_not_ended_again(
    inner: FakeInstances, store: MemoryInstanceStore
) -> None:
    """Their hosts end them: what cannot be ended must not keep this host for ever."""

    async def connect() -> FakeInstances:
        return inner

    outer = an_outer()
    clock = FakeClock(SystemClock().now())
    relay = EnvironmentRelay(connect, store, clock)
    await relay.answer(outer, DECLARED, params())
    inner.refusals = [FabricUnavailable("the controller is gone") for _ in range(3)]
    clock.advance(100.0)
    relay.end(outer.record)
    await relay._tasks.settle(10)
    assert not relay.is_busy
    assert len(inner.refusals) == 2
    assert store.list() == []


async def test_the_processes_of_tools_end_in_every_inner_instance_that_runs(
    relay: EnvironmentRelay, inner: FakeInstances
) -> None:
    """Invariant 14: before a reward of the outer one, which may look at what they change."""
    outer = an_outer()
    ending = params("", method="aenv/end_processes", params={})
    assert await relay.answer(outer, DECLARED, ending) == b"{}", "it has none"
    for key in ("", "b", "c"):
        await relay.answer(outer, DECLARED, params(key=key))
    gone = inner.alive.pop()
    inner.may_start.clear()
    inner.changed.clear()
    starting = asyncio.create_task(relay.answer(outer, DECLARED, params(key="d")))
    await inner.until_changed()
    inner.called.clear()
    assert await relay.answer(outer, DECLARED, ending) == b"{}"
    called = {(call.target, call.method) for call in inner.called}
    assert called == {(one, "aenv/end_processes") for one in (*inner.alive, gone)}
    inner.may_start.set()
    await starting


async def test_an_inner_instance_is_told_what_the_outer_reward_lets_run(
    relay: EnvironmentRelay, inner: FakeInstances
) -> None:
    """Invariant 14: it tells calls of a tool from before the reward from those of the reward."""
    outer = an_outer()
    await relay.answer(outer, DECLARED, params(rewards=0))
    await relay.answer(outer, DECLARED, params())
    beginning = params("", method="aenv/end_processes", params={}, rewards=1, held_s=9.0)
    assert await relay.answer(outer, DECLARED, beginning) == b"{}"
    ended = params("", method="aenv/after_reward", params={}, rewards=1)
    assert await relay.answer(outer, DECLARED, ended) == b"{}"
    own: list[tuple[str, dict[str, Any]]] = []
    for call in inner.called:
        meta = json.loads(CallMessage.decode(call.message()).params)["_meta"]
        kept = {key: meta[key] for key in ("aenv/rewards", "aenv/held_s") if key in meta}
        own.append((call.method, kept))
    assert own == [
        ("aenv/function", {"aenv/rewards": 0}),
        ("aenv/function", {"aenv/rewards": -1}),
        ("aenv/end_processes", {"aenv/rewards": 1, "aenv/held_s": 9.0}),
        ("aenv/after_reward", {"aenv/rewards": 1}),
    ]


async def test_a_failure_to_end_processes_is_no_success(
    relay: EnvironmentRelay, inner: FakeInstances, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = an_outer()
    await relay.answer(outer, DECLARED, params())

    async def call(*_: Any) -> bytes:
        raise FabricUnavailable("Ray has ended")

    monkeypatch.setattr(inner, "call", call)
    with pytest.raises(FabricUnavailable):
        await relay.answer(outer, DECLARED, params("", method="aenv/end_processes"))


async def test_a_successor_ends_inner_instances_that_the_host_was_still_ending(
    open_host: Callable[..., Host],
    spec: Callable[..., InstanceSpec],
    inner: FakeInstances,
    store: MemoryInstanceStore,
) -> None:
    """Invariant 3: the host dies after the outer sandbox has ended."""

    async def connect() -> FakeInstances:
        return inner

    async def connect_again() -> FakeInstances:
        return later

    first = open_host(store, inner_instances=connect)
    await first.open()
    outer = spec(owner="ann")
    await first.start([outer])
    assert first._environment_relay is not None
    life = first._lives[outer.instance_id]
    await first._environment_relay.answer(life, DECLARED, params())
    inner.may_release.clear()
    await first.release([outer.instance_id])
    (left,) = store.list()
    assert left.has_ended
    later = FakeInstances()
    later.alive = list(inner.alive)
    later.changed.clear()
    second = open_host(store, inner_instances=connect_again)
    await second.open()
    await later.until_changed()
    assert later.alive == []
    await eventually(lambda: not store.list(), "its record is deleted")
