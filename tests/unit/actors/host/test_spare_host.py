"""A spare host: it waits for one instance, which gets the id of the host."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from aenv_ray.actors.host.host import LINGER_S, Host
from aenv_ray.errors import CapacityExceeded, FabricUnavailable, InstanceReleased
from aenv_ray.ids import HostId, InstanceId, new_instance_id
from aenv_ray.models import ActorDensity, InstanceInfo, InstanceSpec
from aenv_ray.project.project import Project
from tests.contract.hub.memory_store import MemoryInstanceStore
from tests.unit.actors.host.spy_engine import SpyEngine

SPARE_S = 1000.0
ANOTHER = InstanceId("probe-another1")


class StoppedClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = time.time()  # the engine's own clock goes on

    def now(self) -> float:
        return self.time


class Spares:
    """Makes spare hosts of one node; each is a successor of the one before."""

    def __init__(self, directory: Path, engine: SpyEngine, source: Project) -> None:
        self._directory, self._engine, self._source = directory, engine, source
        self.name = HostId(new_instance_id("probe"))
        self.store, self.clock = MemoryInstanceStore(), StoppedClock()
        self.ended: list[Host] = []
        self.hosts: list[Host] = []

    async def open(self) -> Host:
        host = Host(
            self.name, node_id="n", density=ActorDensity.DEDICATED, spare_s=SPARE_S,
            make_engine=lambda _: self._engine, store=self.store, clock=self.clock,
            projects_dir=self._directory, on_empty=lambda: self.ended.append(host),
        )  # fmt: skip
        self.hosts.append(host)
        await host.put_project(self._source.digest, self._source.archive())
        await host.open()
        return host


@pytest.fixture
async def spares(tmp_path: Path, engine: SpyEngine, source: Project) -> AsyncIterator[Spares]:
    made = Spares(tmp_path / "projects", engine, source)
    yield made
    for host in made.hosts:
        await host.close()


async def test_its_instance_has_its_id_and_answers_to_the_requested_id(
    spares: Spares, spec: Callable[..., InstanceSpec]
) -> None:
    host, wanted = await spares.open(), spec()
    host.claim(wanted.instance_id)
    (info,) = await host.start([wanted])  # type: ignore[misc]
    assert isinstance(info, InstanceInfo)
    assert (info.id, info.requested_id, info.host) == (spares.name, wanted.instance_id, spares.name)
    assert await host.info(wanted.instance_id) == await host.info(info.id)
    assert await host.start([wanted]) == [info]  # Ray repeats a start
    assert await host.release([wanted.instance_id]) == [wanted.instance_id]
    assert await host.instances() == []


async def test_nobody_else_gets_a_claimed_host(
    spares: Spares, spec: Callable[..., InstanceSpec]
) -> None:
    host, wanted = await spares.open(), spec()
    host.claim(wanted.instance_id)
    host.claim(wanted.instance_id)
    with pytest.raises(FabricUnavailable, match=f"claimed for {wanted.instance_id}"):
        host.claim(ANOTHER)
    await host.start([wanted])
    with pytest.raises(CapacityExceeded):
        await host.start([spec()])
    with pytest.raises(FabricUnavailable, match="claimed for"):
        host.claim(ANOTHER)


async def test_a_host_that_was_restarted_knows_for_whom_it_is(
    spares: Spares, spec: Callable[..., InstanceSpec]
) -> None:
    host, wanted = await spares.open(), spec()
    host.claim(wanted.instance_id)
    await host.start([wanted])
    await host.close()
    later = await spares.open()
    assert later.retire() == wanted.instance_id
    with pytest.raises(FabricUnavailable, match="claimed for"):
        later.claim(ANOTHER)
    assert [info.id for info in await later.instances()] == [spares.name]


async def test_a_host_that_was_restarted_before_the_start_is_for_what_it_starts(
    spares: Spares, spec: Callable[..., InstanceSpec]
) -> None:
    host, wanted = await spares.open(), spec()
    await host.start([wanted])
    assert host.retire() == wanted.instance_id


async def test_an_unclaimed_host_ends_after_its_time(spares: Spares) -> None:
    """Invariant 3: nothing that we started outlives its deadline."""
    host = await spares.open()
    spares.clock.time += SPARE_S
    await host.sweep()
    assert spares.ended == []
    spares.clock.time += 1
    await host.sweep()
    assert spares.ended == [host]
    with pytest.raises(FabricUnavailable, match="is ending"):
        host.claim(ANOTHER)


async def test_a_claimed_host_that_gets_no_instance_ends_soon(spares: Spares) -> None:
    """Invariant 3: its creator may have died after the claim."""
    host = await spares.open()
    spares.clock.time += SPARE_S
    host.claim(ANOTHER)
    await host.sweep()
    assert spares.ended == []
    spares.clock.time += LINGER_S + 1
    await host.sweep()
    assert spares.ended == [host]


async def test_a_retired_host_ends_unless_it_is_claimed(spares: Spares) -> None:
    claimed, unclaimed = await spares.open(), await spares.open()
    claimed.claim(ANOTHER)
    assert claimed.retire() == ANOTHER
    assert unclaimed.retire() is None
    for host in (claimed, unclaimed):
        await host.sweep()
    assert spares.ended == [unclaimed]


async def test_a_host_does_not_end_while_its_instance_starts(
    spares: Spares, engine: SpyEngine, spec: Callable[..., InstanceSpec]
) -> None:
    """A start may take minutes: it may install requirements or pull an image."""
    host, wanted = await spares.open(), spec()
    host.claim(wanted.instance_id)
    engine.gate.clear()
    starting = asyncio.create_task(host.start([wanted]))
    await engine.at_gate.wait()
    spares.clock.time += SPARE_S + LINGER_S + 1
    await host.sweep()
    assert spares.ended == []
    engine.gate.set()
    (info,) = await starting  # type: ignore[misc]
    assert isinstance(info, InstanceInfo)


async def test_an_instance_released_before_its_start_stays_released(
    spares: Spares, spec: Callable[..., InstanceSpec]
) -> None:
    """Invariant 4: the creator knows only the id that it asked for."""
    host, wanted = await spares.open(), spec()
    host.claim(wanted.instance_id)
    await host.release([wanted.instance_id])
    (outcome,) = await host.start([wanted])  # type: ignore[misc]
    assert isinstance(outcome, InstanceReleased)
    assert await host.instances() == []
