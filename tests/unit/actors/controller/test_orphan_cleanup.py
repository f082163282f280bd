"""What a gone host left is ended even when the first attempt fails, and each for itself."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from aenv_ray.actors.controller import orphan_cleanup
from aenv_ray.actors.controller.orphan_cleanup import OrphanCleanup, end_each
from aenv_ray.config import read_settings
from aenv_ray.engines.base import RunningSandbox
from aenv_ray.engines.fake.engine import FakeEngine
from aenv_ray.engines.node.directory import node_directory
from aenv_ray.errors import FabricUnavailable
from aenv_ray.hub.store import FileInstanceStore
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import ActorDensity, InstanceRecord
from aenv_ray.testing.contract_bench import Bench
from tests.contract.hub.memory_store import MemoryInstanceStore
from tests.contract.hub.store_contract import record as a_record


class Nodes:
    """Nodes that are up, some of which cannot be reached, and what was asked of them."""

    def __init__(self, *up: str) -> None:
        self.up = set(up)
        self.unreachable: set[str] = set()
        self.asked: list[tuple[str, list[str]]] = []
        self.orphans = OrphanCleanup(self.end_on, self.alive)

    async def alive(self) -> set[str]:
        return set(self.up)

    async def end_on(self, node: str, ids: list[str]) -> None:
        self.asked.append((node, ids))
        if node in self.unreachable:
            raise FabricUnavailable(f"node {node} does not answer")

    async def asked_again(self, calls: int = 1) -> list[tuple[str, list[str]]]:
        self.asked.clear()
        for _ in range(calls):
            await self.orphans.retry()
        return list(self.asked)


async def test_a_failed_attempt_is_made_again_until_it_succeeds() -> None:
    """Invariant 3: orphans whose cleanup failed once are ended later."""
    nodes = Nodes("a", "b", "c")
    nodes.unreachable = {"a"}
    await nodes.orphans.end({"a", "b"}, ["x"])
    assert sorted(nodes.asked) == [("a", ["x"]), ("b", ["x"])]
    await nodes.orphans.end({"a"}, ["y"])
    assert await nodes.asked_again() == [("a", ["x", "y"])]
    nodes.unreachable.clear()
    assert await nodes.asked_again(2) == [("a", ["x", "y"])]
    assert await nodes.asked_again(9) == [], "it succeeded"


async def test_none_is_every_node_that_is_up() -> None:
    nodes = Nodes("a", "b")
    await nodes.orphans.end({None}, ())
    assert sorted(nodes.asked) == [("a", []), ("b", [])]
    assert await nodes.asked_again() == []


async def test_a_node_that_died_is_not_asked_again() -> None:
    nodes = Nodes("a")
    nodes.unreachable = {"a"}
    await nodes.orphans.end({"a"}, ())
    nodes.up.clear()
    assert await nodes.asked_again(9) == []
    nodes.up.add("a")
    assert await nodes.asked_again(99) == []


async def test_what_fails_for_ever_is_tried_ever_less_often() -> None:
    nodes = Nodes("a")
    nodes.unreachable = {"a"}
    await nodes.orphans.end({"a"}, ())
    assert len(await nodes.asked_again(1000)) < 30


def records(*ids: str) -> list[InstanceRecord]:
    return [a_record(instance_id) for instance_id in ids]


async def test_one_record_that_cannot_be_ended_keeps_no_other() -> None:
    store = MemoryInstanceStore()
    left = records("env-aaaaaaaa", "env-bbbbbbbb", "env-cccccccc")
    store.put(left)

    async def end(record: InstanceRecord) -> None:
        if record.id == "env-aaaaaaaa":
            raise OSError("its engine is broken")
        store.delete([record.id])

    ended, failed = await end_each(left, end)
    assert sorted(ended) == ["env-bbbbbbbb", "env-cccccccc"]
    assert [record.id for record in store.list()] == ["env-aaaaaaaa"], "kept for the next time"
    (reason,) = failed
    assert "env-aaaaaaaa" in reason
    assert "its engine is broken" in reason


async def test_a_record_whose_engine_hangs_is_given_up_for_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant 9: the wait for one has a deadline, and the others do not wait for it."""
    monkeypatch.setattr(orphan_cleanup, "END_DEADLINE_S", 0.01)

    async def end(record: InstanceRecord) -> None:
        if record.id == "env-aaaaaaaa":
            await asyncio.Event().wait()

    ended, failed = await end_each(records("env-aaaaaaaa", "env-bbbbbbbb"), end)
    assert ended == ["env-bbbbbbbb"]
    assert "TimeoutError" in failed[0]


# --- what no record names ------------------------------------------------------------------------

SHARED, DEDICATED, PRESENT = (
    HostId(name) for name in ("aenv-host-gone-0", "env-cccccccc", "aenv-host-here-0")
)
PROJECT = Path(orphan_cleanup.__file__).parents[2] / "testing" / "contract_environment"


@pytest.fixture
def run_on_fake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[dict[HostId, list[str]]], FileInstanceStore]]:
    """Return what starts sandboxes on the fake engine that their hosts did not record."""
    runtime_dir = Path(tempfile.mkdtemp(prefix="ae-", dir="/tmp"))  # sockets need a short path
    directory = node_directory(runtime_dir, "scope")
    store = FileInstanceStore(directory / "records")
    monkeypatch.setattr(orphan_cleanup.ray_api, "session_scope", lambda: "scope")
    monkeypatch.setattr(orphan_cleanup.ray_api, "actor_names", lambda: [PRESENT])
    settings = read_settings().model_copy(update={"runtime_dir": runtime_dir})
    monkeypatch.setattr(orphan_cleanup, "settings", lambda: settings)
    monkeypatch.setattr(
        orphan_cleanup, "make_engine_factory", lambda host: lambda _: FakeEngine(host)
    )
    started: dict[HostId, list[str]] = {}

    async def make(wanted: dict[HostId, list[str]]) -> None:
        for host, ids in wanted.items():
            engine = FakeEngine(host)
            bench = Bench(engine, tmp_path)
            for name in ids:
                await engine.start(replace(bench.spec(PROJECT), instance_id=InstanceId(name)))
            await engine.close()

    async def end_all() -> None:
        for host, ids in started.items():
            engine = FakeEngine(host)
            await engine.stop([InstanceId(name) for name in ids])

    def start(wanted: dict[HostId, list[str]]) -> FileInstanceStore:
        started.update(wanted)
        asyncio.run(make(wanted))
        for host in wanted:
            store.note_engine(host, "fake")
        return store

    yield start
    asyncio.run(end_all())
    shutil.rmtree(runtime_dir)


def alive(host: HostId) -> list[str]:
    return sorted(sandbox.instance_id for sandbox in asyncio.run(FakeEngine(host).running()))


def test_of_a_shared_host_that_is_gone_only_what_is_named_ends(
    run_on_fake: Callable[[dict[HostId, list[str]]], FileInstanceStore],
) -> None:
    """The rest is its own again when it is made again under its name."""
    store = run_on_fake(
        {
            SHARED: ["env-named000", "env-kept0000"],
            DEDICATED: ["env-cccccccc"],
            PRESENT: ["env-here0000"],
        }
    )
    named = ["env-named000", "env-here0000", "env-unknown0"]
    assert sorted(orphan_cleanup.end_orphans(named).ended) == ["env-cccccccc", "env-named000"]
    assert alive(SHARED) == ["env-kept0000"]
    assert alive(DEDICATED) == []
    assert alive(PRESENT) == ["env-here0000"], "a host that is there ends its own"
    assert set(store.engines_used()) == {SHARED, PRESENT}, "a dedicated one never comes back"


def test_an_engine_that_cannot_be_asked_is_asked_again(
    run_on_fake: Callable[[dict[HostId, list[str]]], FileInstanceStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant 3: it is told, the others are ended, and what the host used is not forgotten."""
    store = run_on_fake({SHARED: ["env-named000"], DEDICATED: ["env-cccccccc"]})

    async def away(engine: FakeEngine) -> list[RunningSandbox]:
        if engine._host_id == DEDICATED:
            raise FabricUnavailable("the daemon is away")
        return await running(engine)

    running = FakeEngine.running
    monkeypatch.setattr(FakeEngine, "running", away)
    with pytest.raises(FabricUnavailable, match=rf"unrecorded sandboxes of {DEDICATED}.*is away"):
        orphan_cleanup.end_orphans(["env-named000"])
    assert DEDICATED in store.engines_used()
    monkeypatch.setattr(FakeEngine, "running", running)
    assert alive(SHARED) == []
    assert orphan_cleanup.end_orphans([]).ended == ["env-cccccccc"]
    assert alive(DEDICATED) == []


def test_inner_instances_of_an_orphan_are_reported_after_a_failed_attempt(
    run_on_fake: Callable[[dict[HostId, list[str]]], FileInstanceStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant 3: only the record names them, and a failed attempt reports nothing."""
    store = run_on_fake({DEDICATED: ["env-cccccccc"]})
    inner = {"other ": InstanceId("other-aaaaaaaa")}
    orphan = a_record(
        "env-cccccccc", host_id=DEDICATED, density=ActorDensity.DEDICATED, inner=inner
    )
    store.put([orphan])

    async def away(engine: FakeEngine) -> list[RunningSandbox]:
        raise FabricUnavailable("the daemon is away")

    running = FakeEngine.running
    monkeypatch.setattr(FakeEngine, "running", away)
    with pytest.raises(FabricUnavailable, match="is away"):
        orphan_cleanup.end_orphans([])
    monkeypatch.setattr(FakeEngine, "running", running)
    for _ in range(2):  # the controller may die before it has ended them
        found = orphan_cleanup.end_orphans([])
        assert (found.inner, found.outer) == (["other-aaaaaaaa"], ["env-cccccccc"])
    orphan_cleanup.forget_orphans(found.outer)
    assert store.list() == []
    assert alive(DEDICATED) == []


def test_inner_instances_whose_host_died_while_it_ended_them_are_reported(
    run_on_fake: Callable[[dict[HostId, list[str]]], FileInstanceStore],
) -> None:
    """Invariant 3: the outer instance has ended, and its record remains."""
    store = run_on_fake({})
    inner = {"other ": InstanceId("other-aaaaaaaa")}
    store.put(
        [
            a_record(
                "env-cccccccc", host_id=DEDICATED, density=ActorDensity.DEDICATED, inner=inner,
                has_ended=True,
            )
        ]
    )  # fmt: skip
    assert orphan_cleanup.end_orphans([]).inner == ["other-aaaaaaaa"]
