"""What a host does with sandboxes that it keeps ready, on the fake engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from aenv_ray import project
from aenv_ray.actors import host as host_module
from aenv_ray.actors.host import Host
from aenv_ray.actors.wire import CallMessage
from aenv_ray.engines.base import Sandbox
from aenv_ray.engines.fake import FakeEngine
from aenv_ray.errors import (
    DeadlineExceeded,
    FabricUnavailable,
    InstanceNotFound,
    InstanceReleased,
    SandboxStartFailed,
)
from aenv_ray.hub.store import InstanceStore, MemoryInstanceStore
from aenv_ray.hub.warm_requests import WarmRequest, WarmRequestFile
from aenv_ray.ids import HostId, InstanceId, new_instance_id
from aenv_ray.models import (
    ActorDensity,
    InstanceInfo,
    InstanceSpec,
    Lifetime,
)
from aenv_ray.testing.contract_bench import eventually

HOST = HostId("aenv-host-n-0")
WAIT_S = 30.0
TOOLS = """
from aenv_ray.runtime import register_tool
_calls = []
@register_tool
def count() -> int:
    _calls.append(1)
    return len(_calls)
"""


class SpyEngine(FakeEngine):
    """A fake engine that remembers what it made, and whose sandboxes can die unnoticed."""

    def __init__(self) -> None:
        super().__init__(HOST)
        self.made: list[InstanceId] = []
        self.deadlines: dict[InstanceId, float] = {}
        self.dead: set[InstanceId] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.at_gate = asyncio.Event()
        self.away_for = 0
        """How many more stops meet nobody."""

    async def start_many(self, specs: Any) -> Any:
        self.at_gate.set()
        await self.gate.wait()
        self.made += [spec.instance_id for spec in specs]
        return await super().start_many(specs)

    async def set_deadline(self, instance_id: InstanceId, deadline: float) -> None:
        if instance_id in self.dead:
            self.kill(instance_id)
        self.deadlines[instance_id] = deadline
        await super().set_deadline(instance_id, deadline)

    async def stop(self, instance_ids: Any) -> None:
        if self.away_for:
            self.away_for -= 1
            raise FabricUnavailable("the node's launcher is away")
        await super().stop(instance_ids)

    async def ids(self) -> set[InstanceId]:
        return {sandbox.instance_id for sandbox in await self.running()}


@pytest.fixture
def source(tmp_path: Path) -> project.Project:
    root = tmp_path / "probe"
    (root / "src").mkdir(parents=True)
    (root / "config.json").write_text('{"name": "probe", "deployConfig": {"network": "host"}}')
    (root / "src" / "tools.py").write_text(TOOLS)
    return project.resolve(root)


@pytest.fixture
async def engine() -> AsyncIterator[SpyEngine]:
    made = SpyEngine()
    yield made
    await made.stop(made.made)
    await made.close()


@pytest.fixture
async def open_host(
    tmp_path: Path, source: project.Project, engine: SpyEngine
) -> AsyncIterator[Callable[[InstanceStore], Host]]:
    opened: list[Host] = []

    def make(store: InstanceStore) -> Host:
        opened.append(
            Host(
                HOST, node_id="n", density=ActorDensity.SHARED, make_engine=lambda _: engine,
                store=store, projects_dir=tmp_path / "projects",
                requests_path=tmp_path / "pools" / "host.json",
            )
        )  # fmt: skip
        return opened[-1]

    await make(MemoryInstanceStore()).put_project(source.digest, source.archive())
    yield make
    for host in opened:
        await host.close()


@pytest.fixture
def store() -> MemoryInstanceStore:
    return MemoryInstanceStore()


@pytest.fixture
async def host(open_host: Callable[[InstanceStore], Host], store: MemoryInstanceStore) -> Host:
    made = open_host(store)
    await made.open()
    return made


@pytest.fixture
def spec(source: project.Project) -> Callable[..., InstanceSpec]:
    def make(**fields: Any) -> InstanceSpec:
        values: dict[str, Any] = {
            "instance_id": new_instance_id("probe"), "reference": source.reference,
            "digest": source.digest, "ttl_s": 60.0, "engine": "fake", "job_id": "j1",
        }  # fmt: skip
        return InstanceSpec(**{**values, **fields})

    return make


Spec = Callable[..., InstanceSpec]


async def keep(host: Host, spec: InstanceSpec, count: int) -> int:
    request = WarmRequest(spec=spec, count=count, idle_timeout_s=600.0)
    return await host.warm(request, WAIT_S if count else None)


async def start_one(host: Host, spec: InstanceSpec) -> InstanceInfo:
    (outcome,) = await host.start([spec])
    assert isinstance(outcome, InstanceInfo)
    return outcome


async def count_calls(host: Host, instance_id: InstanceId) -> int:
    params = b'{"name":"count","arguments":{},"_meta":{"aenv/call_id":"c%d"}}' % id(object())
    result = await host.calls.call(CallMessage(instance_id, "tools/call", 30.0, params))
    _, (_, data) = result.__reduce__()
    return int(json.loads(data)["structuredContent"]["result"])


def pooled(store: InstanceStore) -> list[InstanceId]:
    return [record.id for record in store.list() if record.is_pooled]


def is_warm(info: InstanceInfo) -> bool:
    return info.start_mode.startswith("warm, ")


# --- taking --------------------------------------------------------------------------------------


async def test_a_taken_sandbox_is_the_takers_in_all_but_its_id(
    host: Host, engine: SpyEngine, store: MemoryInstanceStore, spec: Spec
) -> None:
    """Design D9: TTL, idle timeout, owner and job are assigned when it is taken, and recorded."""
    assert await keep(host, spec(), 1) == 1
    (kept,) = await engine.ids()
    wanted = spec(ttl_s=5.0, idle_timeout_s=3.0, owner="me", job_id=None)
    info = await start_one(host, wanted)
    assert (info.id, is_warm(info), info.calls) == (kept, True, 0)
    assert (info.owner, info.idle_timeout_s, info.lifetime) == ("me", 3.0, Lifetime.DETACHED)
    assert info.deadline == info.created_at + 5.0 == engine.deadlines[kept]
    record = store.get(kept)
    assert record is not None
    assert (record.is_pooled, record.requested_id) == (False, wanted.instance_id)
    assert record.deadline == info.deadline
    assert [one.id for one in await host.instances()] == [kept]


async def test_a_taken_sandbox_was_never_called(host: Host, spec: Spec) -> None:
    await keep(host, spec(), 2)
    first, second = [await start_one(host, spec()) for _ in range(2)]
    assert await count_calls(host, first.id) == 1
    assert await count_calls(host, second.id) == 1
    assert first.id != second.id


async def test_what_is_kept_ready_is_no_instance(host: Host, engine: SpyEngine, spec: Spec) -> None:
    """Nobody lists it, counts it, or calls it before it is taken."""
    await keep(host, spec(), 1)
    (kept,) = await engine.ids()
    assert await host.instances() == []
    assert host.load()[0] == 0
    with pytest.raises(InstanceNotFound):
        await count_calls(host, kept)
    assert await host.release([kept]) == []
    assert await engine.ids() == {kept}


@pytest.mark.parametrize(
    "fields",
    [{"environment_variables": {"A": "1"}}, {"arguments": ("-v",)}, {"labels": {"a": "1"}},
     {"datasource": "x"}],
)  # fmt: skip
async def test_what_its_code_may_have_read_already_makes_a_miss(
    host: Host, spec: Spec, fields: dict[str, Any]
) -> None:
    await keep(host, spec(), 1)
    assert not is_warm(await start_one(host, spec(**fields)))
    await keep(host, spec(**fields), 1)
    info = await start_one(host, spec(**fields))
    assert is_warm(info)
    assert info.labels == fields.get("labels", {})


async def test_a_group_takes_what_there_is_and_starts_the_rest(
    host: Host, engine: SpyEngine, spec: Spec
) -> None:
    await keep(host, spec(), 3)
    kept = await engine.ids()
    specs = [spec() for _ in range(5)]
    outcomes = await host.start(specs)
    infos = [outcome for outcome in outcomes if isinstance(outcome, InstanceInfo)]
    assert kept <= {info.id for info in infos if is_warm(info)}
    assert len({info.id for info in infos}) == 5
    for one, info in zip(specs, infos, strict=True):
        assert is_warm(info) == (info.id != one.instance_id)
        assert await count_calls(host, info.id) == 1


async def test_a_dead_one_is_never_handed_out(host: Host, engine: SpyEngine, spec: Spec) -> None:
    """One whose death was seen is gone from the pool; one that dies unseen fails its last check."""
    await keep(host, spec(), 3)
    seen, unseen, _ = sorted(await engine.ids())
    engine.kill(seen)
    engine.dead.add(unseen)
    infos = [await start_one(host, spec()) for _ in range(3)]
    assert not {seen, unseen} & {info.id for info in infos}
    for info in infos:
        assert await count_calls(host, info.id) == 1


async def test_one_that_hangs_is_not_handed_out_and_is_ended(
    host: Host, engine: SpyEngine, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    await keep(host, spec(), 1)
    (kept,) = await engine.ids()
    monkeypatch.setattr("aenv_ray.actors.warm_pools.CHECK_S", 0.01)

    async def hang(*_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(Sandbox, "request", hang)
    info = await start_one(host, spec())
    assert info.id != kept
    await host.sweep()
    assert kept not in await engine.ids()


# --- starts that are repeated, released, cancelled -----------------------------------------------


async def test_a_start_that_is_sent_again_takes_no_second_one(
    host: Host, engine: SpyEngine, spec: Spec
) -> None:
    """Ray sends an interrupted task again, with the id that the creator made up."""
    await keep(host, spec(), 2)
    wanted = spec()
    first, again = [await start_one(host, wanted) for _ in range(2)]
    assert first.id == again.id != wanted.instance_id
    assert host.load()[0] == 1


async def test_a_start_that_is_sent_again_to_a_new_host_takes_no_second_one(
    open_host: Callable[[InstanceStore], Host], store: MemoryInstanceStore, spec: Spec
) -> None:
    first = open_host(store)
    await first.open()
    await keep(first, spec(), 2)
    wanted = spec()
    taken = await start_one(first, wanted)
    await first.close()
    later = open_host(store)
    await later.open()
    again = await start_one(later, wanted)
    assert (again.id, again.generation) == (taken.id, 1)
    assert is_warm(again)


async def test_a_creator_that_gives_up_ends_what_it_got_unseen(
    host: Host, engine: SpyEngine, spec: Spec
) -> None:
    """Invariant 4: it knows only the id that it made up."""
    await keep(host, spec(), 1)
    (kept,) = await engine.ids()
    wanted = spec()
    await start_one(host, wanted)
    assert await host.release([wanted.instance_id]) == [wanted.instance_id]
    assert kept not in await engine.ids()
    for outcome in await host.start([wanted]):
        assert isinstance(outcome, InstanceReleased)
    with pytest.raises(InstanceReleased):
        await count_calls(host, kept)


async def test_one_that_is_renewed_by_the_made_up_id_lives_on(
    host: Host, engine: SpyEngine, spec: Spec
) -> None:
    await keep(host, spec(), 1)
    wanted = spec()
    await start_one(host, wanted)
    info = await host.renew(wanted.instance_id, 500.0)
    assert info.id != wanted.instance_id
    assert engine.deadlines[info.id] == info.deadline
    assert await count_calls(host, wanted.instance_id) == 1


# --- filling and draining ------------------------------------------------------------------------


async def test_asking_for_none_ends_all_that_nobody_took(
    host: Host, engine: SpyEngine, store: MemoryInstanceStore, spec: Spec
) -> None:
    await keep(host, spec(), 3)
    taken = await start_one(host, spec())
    assert await keep(host, spec(), 0) == 0
    assert await engine.ids() == {taken.id}
    assert [record.id for record in store.list()] == [taken.id]


async def test_what_a_job_asked_for_ends_with_it(
    host: Host, engine: SpyEngine, tmp_path: Path, spec: Spec
) -> None:
    await keep(host, spec(job_id="j1"), 2)
    await keep(host, spec(job_id=None), 3)
    assert await host.release_jobs(["j1"]) == []
    await host.sweep()
    assert len(await engine.ids()) == 3
    (left,) = WarmRequestFile(tmp_path / "pools" / "host.json").load()
    assert (left.spec.job_id, left.count) == (None, 3)


async def test_what_starts_while_nobody_wants_it_any_more_is_ended_when_it_is_up(
    host: Host, engine: SpyEngine, store: MemoryInstanceStore, spec: Spec
) -> None:
    engine.gate.clear()
    await host.warm(WarmRequest(spec=spec(), count=2, idle_timeout_s=600.0), None)
    await engine.at_gate.wait()
    async with asyncio.TaskGroup() as group:
        draining = group.create_task(keep(host, spec(), 0))
        await asyncio.sleep(0)
        engine.gate.set()
    assert draining.result() == 0
    assert len(engine.made) == 2
    assert (await engine.ids(), store.list()) == (set(), [])


async def test_an_end_that_failed_is_tried_again(host: Host, engine: SpyEngine, spec: Spec) -> None:
    """Invariant 3: what is not in the pool any more is not forgotten."""
    await keep(host, spec(), 2)
    engine.away_for = 1
    assert await keep(host, spec(), 0) == 0
    await host.sweep()
    assert (await engine.ids(), engine.away_for) == (set(), 0)


async def test_a_failure_is_told_to_whoever_waits_for_it(
    host: Host, engine: SpyEngine, spec: Spec
) -> None:
    engine.fail_next_start("no fuel")
    with pytest.raises(SandboxStartFailed, match="no fuel"):
        await keep(host, spec(), 1)
    assert await keep(host, spec(), 1) == 1


async def test_waiting_for_a_pool_has_a_deadline_that_says_how_many_are_missing(
    host: Host, engine: SpyEngine, spec: Spec
) -> None:
    """Invariant 9."""
    engine.gate.clear()
    request = WarmRequest(spec=spec(), count=2, idle_timeout_s=600.0)
    with pytest.raises(DeadlineExceeded, match="2 sandboxes are not ready"):
        await host.warm(request, 0.01)
    engine.gate.set()
    assert await host.warm(request, WAIT_S) == 2


async def test_what_is_kept_ready_gives_way_when_the_host_is_full(
    open_host: Callable[[InstanceStore], Host],
    engine: SpyEngine,
    spec: Spec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_module, "HOST_CAPACITY", 4)
    host = open_host(MemoryInstanceStore())
    await host.open()
    request = WarmRequest(spec=spec(), count=9, idle_timeout_s=600.0)
    with pytest.raises(DeadlineExceeded, match="5 sandboxes"):
        await host.warm(request, 0.5)
    others = [spec(arguments=("other",)) for _ in range(3)]
    outcomes = await host.start(others)
    assert all(isinstance(outcome, InstanceInfo) for outcome in outcomes)
    assert len(await engine.ids()) == 4
    assert is_warm(await start_one(host, spec()))


async def test_the_projects_config_keeps_some_ready(
    open_host: Callable[[InstanceStore], Host],
    store: MemoryInstanceStore,
    source: project.Project,
    spec: Spec,
) -> None:
    config = source.path / "config.json"
    config.write_text('{"name": "probe", "deployConfig": {"network": "host", "warm": 2}}')
    changed = project.resolve(source.path)
    host = open_host(store)
    await host.open()
    await host.put_project(changed.digest, changed.archive())
    assert not is_warm(await start_one(host, spec(digest=changed.digest)))
    await host.sweep()
    await eventually(lambda: len(pooled(store)) == 2, "two are ready")
    assert is_warm(await start_one(host, spec(digest=changed.digest)))


# --- restarts ------------------------------------------------------------------------------------


async def test_a_restarted_host_keeps_its_pools_and_goes_on_filling_them(
    open_host: Callable[[InstanceStore], Host],
    engine: SpyEngine,
    store: MemoryInstanceStore,
    spec: Spec,
) -> None:
    first = open_host(store)
    await first.open()
    await keep(first, spec(), 3)
    kept = await engine.ids()
    await first.close()
    engine.kill(min(kept))
    later = open_host(store)
    await later.open()
    assert await later.instances() == []
    assert await later.warm(WarmRequest(spec=spec(), count=3, idle_timeout_s=600.0), WAIT_S) == 3
    outcomes = await later.start([spec() for _ in range(3)])
    ids = {outcome.id for outcome in outcomes if isinstance(outcome, InstanceInfo)}
    assert len(ids & kept) == 2
    assert store.get(min(kept)) is None


async def test_a_restarted_host_knows_what_it_was_asked_for(
    open_host: Callable[[InstanceStore], Host],
    engine: SpyEngine,
    store: MemoryInstanceStore,
    spec: Spec,
) -> None:
    first = open_host(MemoryInstanceStore())
    await first.open()
    await keep(first, spec(environment_variables={"A": "1"}), 1)
    await first.close()
    await engine.stop(engine.made)
    later = open_host(store)
    await later.open()
    await later.sweep()
    await eventually(lambda: pooled(store), "one is ready")
    assert is_warm(await start_one(later, spec(environment_variables={"A": "1"})))


def test_requests_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    assert WarmRequestFile(path).load() == []
    path.write_text('[{"of another": "version"}]')
    assert WarmRequestFile(path).load() == []
    assert WarmRequestFile(None).load() == []


def test_requests_are_readable_for_their_owner_alone(tmp_path: Path, spec: Spec) -> None:
    """Invariant 10: variables may be secrets."""
    request = WarmRequest(
        spec=spec(environment_variables={"TOKEN": "hush"}), count=1, idle_timeout_s=1.0
    )
    file = WarmRequestFile(tmp_path / "pools" / "host.json")
    file.save([request])
    assert file.load() == [request]
    assert (tmp_path / "pools" / "host.json").stat().st_mode & 0o077 == 0
    assert "hush" not in repr(request)
