"""A host whose records cannot be written: what runs goes on, and errors are typed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from aenv_ray.actors.host.host import Host
from aenv_ray.errors import FabricUnavailable
from aenv_ray.hub.store import FileInstanceStore, InstanceStore
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import InstanceInfo, InstanceSpec, InstanceStatus
from aenv_ray.testing.contract_bench import eventually
from tests.full_disk import full_disk
from tests.unit.actors.host.spy_engine import SpyEngine

Spec = Callable[..., InstanceSpec]


@pytest.fixture
def store(tmp_path: Path) -> FileInstanceStore:
    return FileInstanceStore(tmp_path / "records")


async def test_the_end_of_an_instance_is_noted(host: Host, engine: SpyEngine, spec: Spec) -> None:
    """Its record must stay until its inner instances have ended."""
    one, other = spec(), spec()
    await host.start([one, other])
    life = host._lives[one.instance_id]
    life.record = life.record.model_copy(update={"inner": {"n": InstanceId("inner-00000000")}})
    with full_disk():
        engine.kill(one.instance_id)
        await host.release([other.instance_id])
        await eventually(lambda: bool(host.measures().counters.lost), "it is counted as lost")
    assert (await host.info(one.instance_id)).status is InstanceStatus.FAILED
    assert (await host.info(other.instance_id)).status is InstanceStatus.TERMINATED
    assert [record.id for record in host._store.list()] == [one.instance_id]


async def test_a_successor_adopts_its_instances(
    open_host: Callable[[InstanceStore], Host], store: FileInstanceStore, spec: Spec
) -> None:
    earlier = open_host(store)
    await earlier.open()
    specs = [spec(), spec()]
    await earlier.start(specs)
    await earlier.close()
    later = open_host(store)
    with full_disk():
        await later.open()
    assert {info.id for info in await later.instances()} == {each.instance_id for each in specs}


async def test_a_start_and_a_renewal_say_that_they_cannot_be_recorded(
    host: Host, engine: SpyEngine, spec: Spec
) -> None:
    wanted, kept = spec(), spec()
    (started,) = await host.start([kept])
    assert isinstance(started, InstanceInfo)
    with full_disk():
        for refused in (host.start([wanted]), host.renew(kept.instance_id, 7200.0)):
            with pytest.raises(FabricUnavailable, match="cannot be written"):
                await refused
    await host.release([wanted.instance_id])
    assert await engine.ids() == {kept.instance_id}


async def test_a_host_that_cannot_open_is_closed(
    open_host: Callable[[InstanceStore], Host],
    store: FileInstanceStore,
    engine: SpyEngine,
    spec: Spec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another attempt builds another host: connections of the first would stay open."""
    earlier = open_host(store)
    await earlier.open()
    await earlier.start([spec()])
    await earlier.close()

    def fail() -> dict[HostId, frozenset[str]]:
        raise OSError("the directory cannot be read")

    monkeypatch.setattr(store, "engines_used", fail)
    closed: list[bool] = []
    close = engine.close

    async def note() -> None:
        closed.append(True)
        await close()

    monkeypatch.setattr(engine, "close", note)
    with pytest.raises(OSError, match="cannot be read"):
        await open_host(store).open()
    assert closed == [True]
