"""What is taken of what a host keeps ready: never called, never dead, never by two."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from aenv_ray.actors.host.host import Host
from aenv_ray.engines.base import Sandbox, SandboxSpec
from aenv_ray.engines.door import DoorSandbox
from aenv_ray.errors import AenvError, FabricUnavailable, InstanceNotFound, InstanceReleased
from aenv_ray.hub.store import InstanceStore
from aenv_ray.models import InstanceInfo, Lifetime
from aenv_ray.runtime.door.dispatch import REHEARSAL_METHOD
from tests.contract.hub.memory_store import MemoryInstanceStore
from tests.unit.actors.host.pools import Spec, count_calls, is_warm, keep, start_one
from tests.unit.actors.host.spy_engine import AWAY, SpyEngine

# --- taking --------------------------------------------------------------------------------------


async def test_a_taken_sandbox_is_the_takers_in_all_but_its_id(
    host: Host, engine: SpyEngine, store: MemoryInstanceStore, spec: Spec
) -> None:
    """TTL, idle timeout, owner and job are assigned when it is taken, and recorded."""
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


async def test_a_warm_sandbox_has_answered_before_it_is_taken(
    host: Host, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork copies pages when it first answers, which the taker's call need not wait for."""
    asked: list[str] = []
    request = DoorSandbox.request

    async def noted(sandbox: DoorSandbox, method: str, *args: Any, **options: Any) -> Any:
        asked.append(method)
        return await request(sandbox, method, *args, **options)

    monkeypatch.setattr(DoorSandbox, "request", noted)
    await keep(host, spec(), 2)
    assert asked.count("tools/list") == 2
    assert asked.count(REHEARSAL_METHOD) == 2
    assert await count_calls(host, (await start_one(host, spec())).id) == 1


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
    monkeypatch.setattr("aenv_ray.actors.host.warm_pools.CHECK_S", 0.01)

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


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["failed", "cancelled"])
async def test_one_that_is_released_in_a_start_that_fails_ends(
    host: Host, engine: SpyEngine, spec: Spec, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    """Invariant 4: the release was acknowledged while the sandbox was being handed over."""
    await keep(host, spec(), 1)
    (kept,) = await engine.ids()
    specs = [spec(), spec(environment_variables={"COLD": "yes"})]
    engine.deadline_gate.clear()
    starting = asyncio.create_task(host.start(specs))
    while not engine.deadlines:  # noqa: ASYNC110  # turns of the loop
        await asyncio.sleep(0)
    ids = [each.instance_id for each in specs]
    assert await host.release(ids) == ids

    async def fail(_: Sequence[SandboxSpec]) -> list[Sandbox | AenvError]:
        if is_cancelled:
            starting.cancel()
            await asyncio.sleep(0)
        raise FabricUnavailable(AWAY)

    monkeypatch.setattr(engine, "start_many", fail)
    engine.deadline_gate.set()
    with pytest.raises(asyncio.CancelledError if is_cancelled else FabricUnavailable):
        await starting
    assert await host.instances() == []
    await host.sweep()
    assert kept not in await engine.ids()
    assert [record for record in host._store.list() if not record.is_pooled] == []
    for outcome in await host.start(specs[:1]):
        assert isinstance(outcome, InstanceReleased)
