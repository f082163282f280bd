"""What a gone host left is ended even when the first attempt fails, and each for itself."""

from __future__ import annotations

import asyncio

import pytest

from aenv_ray.actors import janitor
from aenv_ray.actors.janitor import end_each
from aenv_ray.actors.orphans import Orphans
from aenv_ray.errors import FabricUnavailable
from aenv_ray.hub.store import MemoryInstanceStore
from aenv_ray.models import InstanceRecord
from aenv_ray.testing.store_contract import record as a_record


class Nodes:
    """Nodes that are up, some of which cannot be reached, and what was asked of them."""

    def __init__(self, *up: str) -> None:
        self.up = set(up)
        self.unreachable: set[str] = set()
        self.asked: list[tuple[str, list[str]]] = []
        self.orphans = Orphans(self.end_on, self.alive)

    async def alive(self) -> set[str]:
        return set(self.up)

    async def end_on(self, node: str, ids: list[str]) -> None:
        self.asked.append((node, ids))
        if node in self.unreachable:
            raise FabricUnavailable(f"node {node} does not answer")

    async def asked_again(self, calls: int = 1) -> list[tuple[str, list[str]]]:
        self.asked.clear()
        for _ in range(calls):
            await self.orphans.end_again()
        return list(self.asked)


async def test_a_failed_attempt_is_made_again_until_it_succeeds() -> None:
    """Invariant 3: a janitor that could not run is no reason to leave what it was to end."""
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
    monkeypatch.setattr(janitor, "END_DEADLINE_S", 0.01)

    async def end(record: InstanceRecord) -> None:
        if record.id == "env-aaaaaaaa":
            await asyncio.Event().wait()

    ended, failed = await end_each(records("env-aaaaaaaa", "env-bbbbbbbb"), end)
    assert ended == ["env-bbbbbbbb"]
    assert "TimeoutError" in failed[0]
