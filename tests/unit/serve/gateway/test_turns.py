"""Turns: no owner has all of them, and each gets one after another."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from aenv_ray.errors import FabricUnavailable
from aenv_ray.serve.gateway.routes import control
from aenv_ray.serve.gateway.routes.control import Turns


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Queue:
    """Requests of owners that have, or wait for, their turn."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._tasks: list[tuple[str, asyncio.Task[None], asyncio.Event]] = []
        self.begun: list[str] = []

    async def ask(self, *owners: str) -> None:
        for owner in owners:
            end = asyncio.Event()
            self._tasks.append((owner, asyncio.create_task(self._have(owner, end)), end))
        await settled()

    async def _have(self, owner: str, end: asyncio.Event) -> None:
        async with self._turns.turn(owner):
            self.begun.append(owner)
            await end.wait()

    async def end(self, number: int) -> None:
        self._tasks[number][2].set()
        await settled()

    async def leave(self, number: int) -> None:
        self._tasks[number][1].cancel()
        await settled()


async def test_owners_get_their_turns_one_after_another() -> None:
    queue = Queue(Turns(1, "publishes", of_owner=1))
    await queue.ask("ann", "ann", "ann", "ann", "bob", "cy", "bob")
    for number in (0, 4, 5, 1, 6, 2, 3):
        assert len(queue.begun) < 8
        await queue.end(number)
    assert queue.begun == ["ann", "ann", "bob", "cy", "ann", "bob", "ann"]


async def test_an_owner_has_so_many_turns_at_once() -> None:
    queue = Queue(Turns(3, "uploads", of_owner=2))
    await queue.ask("ann", "ann", "ann", "ann")
    assert queue.begun == ["ann"] * 2
    await queue.ask("bob", "bob")
    assert queue.begun == ["ann", "ann", "bob"]
    await queue.end(0)
    assert len(queue.begun) == 4
    await queue.end(1)
    await queue.end(4)
    assert sorted(queue.begun) == ["ann"] * 4 + ["bob"] * 2


async def test_who_leaves_the_queue_takes_no_turn() -> None:
    queue = Queue(Turns(1, "publishes", of_owner=1))
    await queue.ask("ann", "bob", "cy")
    await queue.leave(1)
    await queue.leave(0)
    assert queue.begun == ["ann", "cy"]


async def test_who_waits_too_long_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "TURN_S", 0.01)
    turns = Turns(2, "publishes", of_owner=1)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(turns.turn("ann"))
        with pytest.raises(FabricUnavailable, match="1 of yours"):
            await stack.enter_async_context(turns.turn("ann"))
        await stack.enter_async_context(turns.turn("bob"))
    async with turns.turn("ann"):
        pass
