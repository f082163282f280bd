"""How what a host keeps ready comes to be, ends, and outlives the host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from aenv_ray.actors.host import host as host_module
from aenv_ray.actors.host.host import Host
from aenv_ray.actors.host.pool import WarmRequest
from aenv_ray.actors.host.warm_pools import WarmRequestFile
from aenv_ray.errors import DeadlineExceeded, SandboxStartFailed
from aenv_ray.hub.store import InstanceStore
from aenv_ray.models import InstanceInfo
from aenv_ray.project import project
from aenv_ray.testing.contract_bench import eventually
from tests.contract.hub.memory_store import MemoryInstanceStore
from tests.unit.actors.host.pools import WAIT_S, Spec, is_warm, keep, pooled, start_one
from tests.unit.actors.host.spy_engine import SpyEngine

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


async def test_a_slow_start_keeps_no_other_pool_empty(
    open_host: Callable[[InstanceStore], Host], engine: SpyEngine, spec: Spec
) -> None:
    """A pod without a node, or an image that is pulled, may take minutes."""
    slow = SpyEngine()
    host = open_host(MemoryInstanceStore())
    host._engines._make = {"fake": engine, "slow": slow}.__getitem__
    await host.open()
    slow.gate.clear()
    await host.warm(WarmRequest(spec=spec(engine="slow"), count=1, idle_timeout_s=600.0), None)
    await slow.at_gate.wait()
    for _ in range(3):
        assert await keep(host, spec(), 1) == 1
        assert is_warm(await start_one(host, spec()))
    slow.gate.set()
    assert await keep(host, spec(engine="slow"), 1) == 1
    assert await keep(host, spec(engine="slow"), 0) == 0


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
    with pytest.raises(DeadlineExceeded, match="2 warm sandboxes are not ready"):
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
    with pytest.raises(DeadlineExceeded, match="5 warm sandboxes"):
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
