"""The create protocol, blocking as in a driver and awaiting as in the gateway."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aenv_ray.actors.controller.placement import HostLoad, Need
from aenv_ray.actors.fabric import create_protocol
from aenv_ray.actors.fabric import waits as waits_module
from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.actors.fabric.create_protocol import Created, CreateProtocol
from aenv_ray.actors.fabric.quota_client import QuotaClient
from aenv_ray.actors.fabric.waits import (
    NOTICE_EVERY_S,
    AsyncWaits,
    BlockingWaits,
    OnWait,
    WaitNotices,
    Waits,
)
from aenv_ray.actors.host.start_messages import (
    ProjectMissing,
    StartAnswer,
    decode_specs,
    encode_answer,
)
from aenv_ray.actors.ray_shell.nodes import NodeFacts
from aenv_ray.blocking import run_blocking
from aenv_ray.errors import (
    AenvError,
    CapacityExceeded,
    FabricUnavailable,
    QuotaExceeded,
    SandboxStartFailed,
)
from aenv_ray.hub import hub_actor
from aenv_ray.hub.records import Lease
from aenv_ray.models import (
    ActorDensity,
    InstanceInfo,
    InstanceSpec,
    InstanceStatus,
    Isolation,
    Lifetime,
)
from aenv_ray.policy import Policy
from aenv_ray.project import project
from aenv_ray.project.project import Project


@pytest.fixture
def source(tmp_path: Path) -> Project:
    (tmp_path / "config.json").write_text(
        '{"name": "demo", "version": "1.0.0", "deployConfig": {"network": "none"}}'
    )
    return project.load(tmp_path)


class Remote:
    """A method of an actor: `remote` runs it and returns what the caller is to wait for."""

    def __init__(self, function: Callable[..., Any], *, is_async: bool) -> None:
        self._function = function
        self._is_async = is_async

    def remote(self, *args: Any) -> Any:
        try:
            value, error = self._function(*args), None
        except AenvError as exc:
            value, error = None, exc
        if not self._is_async:
            return value, error
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.set_exception(error) if error else future.set_result(value)
        return future


def info_of(spec: InstanceSpec) -> InstanceInfo:
    return InstanceInfo(
        id=spec.instance_id, reference=spec.reference, status=InstanceStatus.RUNNING,
        engine="process", node_id="n", host="h", density=ActorDensity.SHARED, created_at=1.0,
        deadline=2.0, idle_timeout_s=None, lifetime=Lifetime.JOB, owner=None, labels={},
        isolation=Isolation(kind="none", missing=()), start_mode="template", calls=0, generation=0,
    )  # fmt: skip


def answered(outcomes: Any) -> StartAnswer | ProjectMissing:
    return outcomes if isinstance(outcomes, ProjectMissing) else [(one, None) for one in outcomes]


class FakeNode:
    """What the hosts of a node share: the projects that were sent to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.projects: set[str] = set()
        self.received = 0


class FakeHost:
    """A host without sandboxes; `failures` are raised or returned by the next starts."""

    def __init__(self, node: FakeNode, *, is_async: bool) -> None:
        self.node = node
        self.failures: list[AenvError] = []
        self.started: list[str] = []
        self.start = Remote(self._start, is_async=is_async)
        self.has_project = Remote(self._has_project, is_async=is_async)
        self.put_project = Remote(self._put_project, is_async=is_async)

    def answer(self, specs: list[InstanceSpec]) -> Any:
        if not self.node.projects >= {spec.digest for spec in specs}:
            return ProjectMissing(self.node.name)
        if self.failures:
            failure = self.failures.pop()
            if isinstance(failure, CapacityExceeded | FabricUnavailable):
                raise failure
            return [failure] + [info_of(spec) for spec in specs[1:]]
        self.started += [spec.instance_id for spec in specs]
        return [info_of(spec) for spec in specs]

    def _start(self, specs: bytes, scope: str) -> bytes:
        del scope
        return encode_answer(answered(self.answer(decode_specs(specs))))

    def _has_project(self, digest: str) -> bool:
        return digest in self.node.projects

    def _put_project(self, digest: str, archive: bytes) -> None:
        assert archive
        self.node.received += 1
        self.node.projects.add(digest)


class FakeController:
    def __init__(self, hosts: dict[str, FakeHost], *, is_async: bool) -> None:
        self.hosts = hosts
        self.dedicated: dict[str, FakeHost] = {}
        self.released: list[str] = []
        self.waited_for_room: list[str] = []
        self.needs: list[Need] = []
        self._is_async = is_async
        for name in (
            "shared_hosts", "reserve", "create_dedicated", "start_dedicated", "release",
            "queue_reason", "is_queued",
        ):  # fmt: skip
            setattr(self, name, Remote(getattr(self, f"_{name}"), is_async=is_async))

    def _shared_hosts(self, patience_s: float, wanted: int, need: Need) -> Any:
        return [(HostLoad(n, h.node.name, 0, 100), h) for n, h in self.hosts.items()]

    def _reserve(
        self,
        ids: list[str],
        owner: str,
        job_id: str | None,
        wait_s: float,
        is_divisible: bool,
        need: Need,
    ) -> Any:
        self.needs.append(need)
        self.waited_for_room += ids
        name, host = next(iter(self.hosts.items()))
        return [(name, host, ids[:1] if is_divisible else ids)]

    def _create_dedicated(self, specs: list[InstanceSpec], wait_s: float) -> Any:
        nodes = [host.node for host in self.hosts.values()]
        for n, spec in enumerate(specs):
            host = FakeHost(nodes[n % len(nodes)], is_async=self._is_async)
            self.dedicated[spec.instance_id] = host
        return self._start_dedicated(specs)

    def _start_dedicated(self, specs: list[InstanceSpec]) -> Any:
        def first(answer: Any) -> Any:
            return answer if isinstance(answer, ProjectMissing) else answer[0]

        hosts = [self.dedicated[spec.instance_id] for spec in specs]
        return [(h, first(h.answer([spec]))) for h, spec in zip(hosts, specs, strict=True)]

    def _release(self, ids: list[str]) -> None:
        self.released += ids

    def _is_queued(self, ids: list[str]) -> bool:
        raise FabricUnavailable("the controller restarts")

    def _queue_reason(self) -> str:
        return "0 of 4 slots are free"


def blocking_result(reference: Any, *_: Any) -> Any:
    value, error = reference
    if error is not None:
        raise error
    return value


@pytest.fixture(params=["blocking", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "async")


class Bench:
    """A protocol between a fake controller and fake hosts, run in either way."""

    def __init__(self, *, is_async: bool) -> None:
        self.is_async = is_async
        self.nodes = [FakeNode("node-a"), FakeNode("node-b")]
        self.hosts = {f"h{n}": FakeHost(self.nodes[n // 2], is_async=is_async) for n in range(4)}
        self.controller = FakeController(self.hosts, is_async=is_async)
        self.protocol: CreateProtocol | None = None

    def create(
        self,
        source: Project,
        count: int,
        density: ActorDensity,
        *,
        queue_s: float = 5.0,
        node_ids: tuple[str, ...] = (),
        **options: Any,
    ) -> list[Created]:
        specs = CreateOptions(node_ids=node_ids).specs(source, count, job_id=None, policy=Policy())

        async def work() -> list[Created]:
            waits: Waits = AsyncWaits() if self.is_async else BlockingWaits(blocking_result)
            if self.protocol is None or self.is_async:  # its locks belong to one event loop
                self.protocol = CreateProtocol(self.controller, waits)
            return await self.protocol.create(source, specs, density, queue_s, **options)

        runner: Callable[[Coroutine[Any, Any, list[Created]]], list[Created]]
        runner = asyncio.run if self.is_async else run_blocking
        return runner(work())

    @property
    def received(self) -> list[int]:
        return [node.received for node in self.nodes]


@pytest.fixture
def bench(is_async: bool) -> Bench:
    return Bench(is_async=is_async)


@pytest.mark.parametrize("density", list(ActorDensity))
def test_a_project_is_packed_and_sent_once_to_each_node_that_lacks_it(
    bench: Bench, source: Project, density: ActorDensity, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bench.create(source, 8, density)
    assert len(first) == 8
    assert bench.received == [1, 1]

    def fail(self: Project) -> bytes:
        raise AssertionError("the project was packed again")

    monkeypatch.setattr(Project, "archive", fail)
    again = bench.create(source, 8, density)
    assert len(again) == 8
    assert bench.received == [1, 1]


@pytest.mark.parametrize("is_queued", [True, False, None])
def test_a_dedicated_create_tells_that_it_waits_for_room(
    source: Project, monkeypatch: pytest.MonkeyPatch, is_queued: bool | None
) -> None:
    """In the controller's queue; a slow start is no such wait, nor a controller that restarts."""
    monkeypatch.setattr(
        create_protocol.ray_api, "wait", lambda reference, *_, **__: blocking_result(reference)
    )
    bench, told = Bench(is_async=False), list[bool]()
    if is_queued is not None:
        answer = Remote(lambda _: is_queued, is_async=False)
        monkeypatch.setattr(bench.controller, "is_queued", answer)

    def result(reference: Any, what: str, _: float, on_wait: OnWait | None) -> Any:
        if on_wait is not None and not told and what.startswith("creating"):
            on_wait(5.0)
        return blocking_result(reference)

    bench.protocol = CreateProtocol(bench.controller, BlockingWaits(result))
    assert len(bench.create(source, 2, ActorDensity.DEDICATED, on_queue=told.append)) == 2
    assert told == [bool(is_queued), False]


def test_nodes_that_lack_the_project_start_together(source: Project) -> None:
    """A start that installs requirements takes minutes: not one node after another."""
    bench = Bench(is_async=True)
    all_start = asyncio.Event()
    starting: list[FakeHost] = []

    def slow(host: FakeHost) -> Any:
        async def start(specs: bytes) -> bytes:
            answer = host.answer(decode_specs(specs))
            if not isinstance(answer, ProjectMissing):
                starting.append(host)
                if len(starting) == len(bench.hosts):
                    all_start.set()
                waited = asyncio.create_task(all_start.wait())
                done, _ = await asyncio.wait([waited], timeout=10.0)
                assert done, "the others do not start at the same time"
            return encode_answer(answered(answer))

        return SimpleNamespace(remote=lambda specs, _: asyncio.ensure_future(start(specs)))

    for host in bench.hosts.values():
        host.start = slow(host)
    assert len(bench.create(source, 8, ActorDensity.SHARED)) == 8


@pytest.mark.parametrize("density", list(ActorDensity))
def test_a_project_that_was_deleted_on_a_node_is_sent_again(
    bench: Bench, source: Project, density: ActorDensity
) -> None:
    bench.create(source, 4, density)
    for node in bench.nodes:
        node.projects.clear()
    assert len(bench.create(source, 4, density)) == 4
    assert bench.received == [2, 2]


def test_the_failure_of_one_instance_releases_the_others(bench: Bench, source: Project) -> None:
    bench.create(source, 1, ActorDensity.SHARED)
    bench.hosts["h0"].failures = [SandboxStartFailed("it does not load", instance_id="x")]
    with pytest.raises(SandboxStartFailed, match="1 of 4 instances failed, so none was created"):
        bench.create(source, 4, ActorDensity.SHARED)
    started = [i for host in bench.hosts.values() for i in host.started]
    assert set(bench.controller.released) == set(started[1:])


def test_the_share_of_a_failed_host_is_started_elsewhere_under_new_ids(
    bench: Bench, source: Project
) -> None:
    bench.create(source, 8, ActorDensity.SHARED)
    bench.hosts["h1"].failures = [FabricUnavailable("h1 died")]
    created = bench.create(source, 4, ActorDensity.SHARED)
    assert len(created) == 4
    (lost,) = bench.controller.released
    assert lost not in {one.info.id for one in created}
    assert bench.hosts["h1"] not in [one.host for one in created]


def test_a_create_whose_ids_are_fixed_fails_with_its_host(bench: Bench, source: Project) -> None:
    bench.create(source, 8, ActorDensity.SHARED)
    bench.hosts["h1"].failures = [FabricUnavailable("h1 died")]
    with pytest.raises(FabricUnavailable, match="h1 died"):
        bench.create(source, 4, ActorDensity.SHARED, may_rename=False)


@pytest.mark.parametrize("queue_s", [0.0, 5.0])
def test_what_a_full_host_refuses_waits_in_the_queue_if_it_may(
    bench: Bench, source: Project, queue_s: float
) -> None:
    bench.create(source, 8, ActorDensity.SHARED)
    bench.hosts["h2"].failures = [CapacityExceeded("h2 is full")]
    if not queue_s:
        with pytest.raises(CapacityExceeded, match="h2 is full"):
            bench.create(source, 4, ActorDensity.SHARED, queue_s=queue_s)
        return
    assert len(bench.create(source, 4, ActorDensity.SHARED, queue_s=queue_s)) == 4
    assert len(bench.controller.waited_for_room) == 1


def test_a_group_that_a_host_refuses_although_it_had_reserved_slots_waits_again(
    bench: Bench, source: Project
) -> None:
    bench.create(source, 8, ActorDensity.SHARED)
    bench.hosts["h2"].failures = [CapacityExceeded("h2 is full")]
    bench.hosts["h0"].failures = [CapacityExceeded("h0 is full, after all")]
    assert len(bench.create(source, 1, ActorDensity.SHARED)) == 1
    for host in bench.hosts.values():
        host.failures = [CapacityExceeded("full"), CapacityExceeded("full")]
    assert len(bench.create(source, 1, ActorDensity.SHARED)) == 1
    assert len(bench.controller.waited_for_room) >= 2


def test_an_instance_that_may_be_on_one_node_only_waits_for_room_there(
    bench: Bench, source: Project
) -> None:
    """Otherwise a service with storage would never start while others wait for room."""
    bench.hosts["h0"].failures = [CapacityExceeded("its slots are held for others")]
    bench.hosts["h1"].failures = [CapacityExceeded("its slots are held for others")]
    bench.create(source, 1, ActorDensity.SHARED, node_ids=("node-a",))
    (need,) = bench.controller.needs
    assert need.node_ids == ("node-a",)


class _Outcomes:
    """What became of independent instances."""

    def __init__(self) -> None:
        self.created: list[Created] = []
        self.failed: list[AenvError] = []
        self.queued = 0

    def on_outcome(self, outcome: Created | AenvError) -> None:
        if isinstance(outcome, AenvError):
            self.failed.append(outcome)
        else:
            self.created.append(outcome)

    def on_queued(self, count: int) -> None:
        self.queued += count

    def on_placed(self, count: int) -> None:
        self.queued -= count


async def _create_each(
    bench: Bench, source: Project, count: int, queue_s: float = 5.0
) -> _Outcomes:
    for node in bench.nodes:
        node.projects.add(source.digest)
    outcomes, protocol = _Outcomes(), CreateProtocol(bench.controller, AsyncWaits())
    specs = CreateOptions().specs(source, count, job_id=None, policy=Policy())
    await protocol.create_each(source, specs, ActorDensity.SHARED, queue_s, outcomes)
    return outcomes


async def test_independent_instances_fail_alone(source: Project) -> None:
    bench = Bench(is_async=True)
    bench.hosts["h0"].failures = [SandboxStartFailed("it does not load", instance_id="x")]
    outcomes = await _create_each(bench, source, 8)
    assert (len(outcomes.created), [type(e) for e in outcomes.failed]) == (7, [SandboxStartFailed])
    assert bench.controller.released == []


async def test_independent_instances_move_from_a_failed_host_under_new_ids(source: Project) -> None:
    bench = Bench(is_async=True)
    bench.hosts["h1"].failures = [FabricUnavailable("h1 died")]
    outcomes = await _create_each(bench, source, 8)
    assert len(outcomes.created) == 8
    assert not {one.info.id for one in outcomes.created} & set(bench.controller.released)
    assert bench.hosts["h1"] not in [one.host for one in outcomes.created]


@pytest.mark.parametrize(
    "failures",
    [
        [FabricUnavailable("its node is drained"), CapacityExceeded("its slots are held")],
        [CapacityExceeded("its slots are held"), FabricUnavailable("its node is drained")],
        [CapacityExceeded("full"), CapacityExceeded("full although they were reserved")],
    ],
)
async def test_an_instance_that_one_host_refuses_and_another_is_too_full_for_starts_all_the_same(
    source: Project, failures: list[AenvError]
) -> None:
    """Episodes would count it as a lost instance."""
    bench = Bench(is_async=True)
    left = list(failures)
    for host in bench.hosts.values():
        answer = host.answer

        def refuse(specs: list[InstanceSpec], answer: Any = answer) -> Any:
            if left:
                raise left.pop(0)
            return answer(specs)

        host.answer = refuse  # type: ignore[method-assign]
    outcomes = await _create_each(bench, source, 1)
    assert (len(outcomes.created), outcomes.failed, left) == (1, [], [])


async def test_independent_instances_take_slots_as_they_become_free(source: Project) -> None:
    """The queue gives one place at a time; the others are asked for again."""
    bench = Bench(is_async=True)
    outcomes = await _create_each(bench, source, 403)
    assert (len(outcomes.created), outcomes.failed, outcomes.queued) == (403, [], 0)
    assert len(bench.controller.waited_for_room) == 3 + 2 + 1
    assert len({one.info.id for one in outcomes.created}) == 403


async def test_independent_instances_without_room_fail_if_they_may_not_wait(
    source: Project,
) -> None:
    outcomes = await _create_each(Bench(is_async=True), source, 402, queue_s=0.0)
    assert len(outcomes.created) == 400
    assert [type(error) for error in outcomes.failed] == [CapacityExceeded] * 2


class FakeHub:
    """The leases of a hub with one quota. A request that is cancelled has been sent already.

    Args:
        limit: The quota; None if nobody is limited.
        error: Raised instead of replacing leases.
        released: Leases that count until the hub compares them with the running instances.
    """

    def __init__(
        self, limit: int | None = 5, error: AenvError | None = None, released: int = 0
    ) -> None:
        self.limit, self.error = limit, error
        self._leases: dict[str, InstanceStatus] = {}
        self._released = released
        self._late: list[Callable[[], None]] = []
        self.interrupted = ""
        """The request during which `interrupt` is awaited, once."""
        self.interrupt: Callable[[], Awaitable[None]]
        self.answered = threading.Event()
        """Set once that request has been carried out."""

    def ids(self, status: InstanceStatus) -> list[str]:
        while self._late:
            self._late.pop()()
        return [one for one, of in self._leases.items() if of is status]

    @property
    def pending(self) -> list[str]:
        return self.ids(InstanceStatus.PENDING)

    @property
    def running(self) -> list[str]:
        return self.ids(InstanceStatus.RUNNING)

    async def quotas(self) -> dict[str, tuple[int, int]]:
        used = len(self._leases) + self._released
        return {} if self.limit is None else {"label:team=a": (used, self.limit)}

    async def admit(self, leases: Sequence[Lease]) -> None:
        assert self.limit is not None
        if len(self._leases) + self._released + len(leases) > self.limit:
            raise QuotaExceeded("the quota of team=a is used up", retry_after_s=1.0)
        await self._carry_out("admit", lambda: self._add(leases))

    async def compare(self) -> None:
        await self._carry_out("compare", lambda: None)
        self._released = 0

    async def exchange(self, instance_ids: Sequence[str], leases: Sequence[Lease]) -> None:
        if self.error is not None:
            raise self.error

        def replace() -> None:
            self._end(instance_ids)
            self._add(leases)

        await self._carry_out("exchange", replace)

    async def end_leases(self, instance_ids: Sequence[str]) -> None:
        self._end(instance_ids)

    async def _carry_out(self, method: str, change: Callable[[], None]) -> None:
        if method != self.interrupted:
            change()
            return
        self.interrupted = ""
        try:
            await self.interrupt()
        except asyncio.CancelledError:
            self._late.append(change)  # a hub may carry out a later request first
            raise
        change()
        self.answered.set()

    def _add(self, leases: Sequence[Lease]) -> None:
        self._leases |= {lease.id: lease.status for lease in leases}

    def _end(self, instance_ids: Sequence[str]) -> None:
        for one in instance_ids:
            self._leases.pop(one, None)


SUBJECTS = frozenset({"label:team=a"})


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(create_protocol.ray_api, "is_connected", lambda: True)


def _quotas(hub: FakeHub) -> QuotaClient:
    """Return the quotas of a process that has found this hub."""
    quotas = QuotaClient()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub_actor, "find_hub", lambda: hub)
        quotas.claim([], SUBJECTS, 0.0)
    return quotas


async def _create_counted(
    bench: Bench, source: Project, hub: FakeHub, count: int
) -> tuple[_Outcomes, list[Created]]:
    """Create independent instances, or a group if `count` is negative, that count in quotas."""
    protocol = CreateProtocol(bench.controller, AsyncWaits(), quotas=_quotas(hub))
    specs = CreateOptions().specs(source, abs(count), job_id=None, policy=Policy())
    outcomes, shared = _Outcomes(), ActorDensity.SHARED
    if count > 0:
        await protocol.create_each(source, specs, shared, 5.0, outcomes, SUBJECTS)
        return outcomes, []
    return outcomes, await protocol.create(source, specs, shared, 5.0, subjects=SUBJECTS)


@pytest.mark.usefixtures("connected")
async def test_instances_count_in_quotas_under_their_actual_ids(source: Project) -> None:
    bench, hub = Bench(is_async=True), FakeHub()
    _, group = await _create_counted(bench, source, hub, -3)
    assert (hub.running, hub.pending) == ([one.info.id for one in group], [])
    outcomes, _ = await _create_counted(bench, source, hub, 4)
    assert [type(error) for error in outcomes.failed] == [QuotaExceeded] * 2
    assert hub.running[3:] == [one.info.id for one in outcomes.created]
    assert (len(hub.running), hub.pending, bench.controller.released) == (5, [], [])
    outcomes, _ = await _create_counted(bench, source, FakeHub(None), 4)
    assert len(outcomes.created) == 4


@pytest.mark.usefixtures("connected")
async def test_what_fails_counts_in_no_quota(source: Project) -> None:
    bench, hub = Bench(is_async=True), FakeHub()
    bench.hosts["h0"].failures = [SandboxStartFailed("it does not load", instance_id="x")]
    with pytest.raises(SandboxStartFailed):
        await _create_counted(bench, source, hub, -4)
    assert (hub.running, hub.pending) == ([], [])


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize("count", [4, -4])
async def test_instances_whose_leases_are_not_recorded_are_released(
    source: Project, count: int
) -> None:
    bench = Bench(is_async=True)
    hub = FakeHub(error=FabricUnavailable("the hub does not answer"))
    if count < 0:
        with pytest.raises(FabricUnavailable, match="the hub"):
            await _create_counted(bench, source, hub, count)
    else:
        outcomes, _ = await _create_counted(bench, source, hub, count)
        assert (outcomes.created, outcomes.failed) == ([], [hub.error] * 4)
    assert (len(set(bench.controller.released)), hub.pending) == (4, [])


REQUESTS = ["admit", "compare", "exchange"]


def _warm(bench: Bench) -> None:
    """Have the hosts answer with instances of warm pools, which keep their ids."""
    for host in bench.hosts.values():
        answer = host.answer

        def renamed(specs: list[InstanceSpec], answer: Any = answer) -> Any:
            outcomes = answer(specs)
            if isinstance(outcomes, ProjectMissing):
                return outcomes
            return [one.model_copy(update={"id": f"{one.id}-warm"}) for one in outcomes]

        host.answer = renamed  # type: ignore[method-assign]


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("count", [1, 3, -1, -3])
async def test_a_create_that_is_cancelled_while_it_asks_the_hub_counts_in_no_quota(
    source: Project, request_: str, count: int
) -> None:
    """Otherwise the owner's next creates would be refused for minutes."""
    bench, loop = Bench(is_async=True), asyncio.get_running_loop()
    _warm(bench)
    hub = FakeHub(released=5 if request_ == "compare" else 0)

    async def cancelled(creating: asyncio.Task[Any]) -> None:
        for _ in range(2):  # whoever ends a task may repeat it
            creating.cancel()
            await asyncio.wait([creating], timeout=0.1)

    async def interrupt() -> None:  # in a thread
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(cancelled(creating), loop))

    hub.interrupt, hub.interrupted = interrupt, request_
    creating = asyncio.create_task(_create_counted(bench, source, hub, count))
    with pytest.raises(asyncio.CancelledError):
        await creating
    await asyncio.to_thread(hub.answered.wait)
    assert (hub.interrupted, hub.pending, hub.running) == ("", [], [])
    started = {i for host in bench.hosts.values() for i in host.started}
    assert {f"{one}-warm" for one in started} == set(bench.controller.released)


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("count", [1, 3])
def test_a_blocking_create_that_is_interrupted_while_it_asks_the_hub_counts_in_no_quota(
    source: Project, request_: str, count: int
) -> None:
    """Ctrl-C in a driver."""
    bench = Bench(is_async=False)
    _warm(bench)
    hub = FakeHub(released=5 if request_ == "compare" else 0)

    async def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)
        for _ in range(5):
            await asyncio.sleep(0)

    hub.interrupt, hub.interrupted = interrupt, request_
    bench.protocol = CreateProtocol(
        bench.controller, BlockingWaits(blocking_result), quotas=_quotas(hub)
    )
    with pytest.raises(KeyboardInterrupt):
        bench.create(source, count, ActorDensity.SHARED, subjects=SUBJECTS)
    assert (hub.interrupted, hub.pending, hub.running) == ("", [], [])
    started = {i for host in bench.hosts.values() for i in host.started}
    assert {f"{one}-warm" for one in started} == set(bench.controller.released)


@pytest.mark.parametrize("is_cleanup", [True, False])
async def test_of_the_functions_of_a_cancelled_caller_that_wait_for_a_thread_cleanups_run(
    monkeypatch: pytest.MonkeyPatch, is_cleanup: bool
) -> None:
    monkeypatch.setattr(waits_module, "_THREADS", 1)
    waits, is_free, ran = AsyncWaits(), threading.Event(), list[str]()
    busy = asyncio.create_task(waits.run(is_free.wait))
    late = asyncio.create_task(waits.run(lambda: ran.append("it"), is_cleanup=is_cleanup))
    for _ in range(3):
        await asyncio.sleep(0)
        late.cancel()
    is_free.set()
    assert await busy
    with pytest.raises(asyncio.CancelledError):
        await late
    assert ran == ["it"] * is_cleanup


def test_waiting_creates_are_logged_together_and_seldom(caplog: pytest.LogCaptureFixture) -> None:
    """Kubernetes review: dozens of lines in one run said that the cluster is busy."""
    now = 100.0
    notices = WaitNotices(lambda: now)
    reasons: list[str] = []

    def reason() -> str:
        reasons.append("asked")
        return "0 of 4 slots are free"

    with (
        caplog.at_level(logging.WARNING, "aenv_ray"),
        notices.waiting(reason) as first,
        notices.waiting(reason) as second,
        notices.waiting(reason),
    ):
        now += 5.0
        for _ in range(10):
            first(5.0)
            second(5.0)
        assert [r.getMessage() for r in caplog.records] == [
            "3 creates wait, the longest for 5 s: 0 of 4 slots are free"
        ]
        assert reasons == ["asked"], "the controller is not asked for a line that is not logged"
        now += NOTICE_EVERY_S
        second(65.0)
    assert len(caplog.records) == 2


def test_a_group_that_never_fits_is_refused_before_its_specs_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(is_async=False)
    protocol = CreateProtocol(bench.controller, BlockingWaits(blocking_result))
    monkeypatch.setattr(create_protocol.ray_api, "alive_nodes", lambda: {"n": NodeFacts(4)})
    for density in ActorDensity:
        with pytest.raises(CapacityExceeded, match="no room for 10000000 instances"):
            run_blocking(protocol.check_size(10_000_000, density))
        run_blocking(protocol.check_size(8, density))
