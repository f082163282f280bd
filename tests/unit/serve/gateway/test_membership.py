"""Which replicas of the gateway are dead, by the heartbeats in the hub."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aenv_ray.errors import FabricUnavailable
from aenv_ray.serve.gateway import membership
from aenv_ray.serve.gateway.membership import Membership
from tests.fake_clock import FakeClock

EVERY_S = 5.0
SILENCE_S = 20.0


class Documents:
    """The part of a hub that keeps documents; it is away while `here` is not set."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self.here = asyncio.Event()
        self.here.set()

    async def put_document(self, kind: str, name: str, data: Any) -> None:
        del kind
        await self.here.wait()
        self.kept[name] = data

    async def documents(self, kind: str) -> dict[str, Any]:
        del kind
        await self.here.wait()
        return dict(self.kept)

    async def delete_document(self, kind: str, name: str) -> None:
        del kind
        self.kept.pop(name)


@pytest.fixture
def hub() -> Any:
    return Documents()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


async def beats(clock: FakeClock, seconds: float, *replicas: Membership) -> None:
    """Let replicas send heartbeats for some time."""
    for _ in range(int(seconds / EVERY_S)):
        clock.advance(EVERY_S)
        for replica in replicas:
            await replica.heartbeat()


async def test_a_replica_that_is_silent_while_others_are_not_is_dead(
    hub: Any, clock: FakeClock
) -> None:
    mine, other = (Membership(hub, clock, name, EVERY_S) for name in ("mine", "other"))
    await beats(clock, SILENCE_S + EVERY_S, mine, other)
    assert await mine.dead({"mine", "other", "unknown"}) == {"unknown"}
    await beats(clock, SILENCE_S, mine)
    assert await mine.dead({"mine", "other"}) == set()
    await beats(clock, EVERY_S, mine)
    assert await mine.dead({"mine", "other"}) == {"other"}
    await beats(clock, 100 * SILENCE_S, mine)
    await mine.dead(set())
    assert set(hub.kept) == {"mine"}


async def test_no_replica_is_dead_because_the_hub_was_away(hub: Any, clock: FakeClock) -> None:
    """The creates in progress of live ones would be ended."""
    mine, other = (Membership(hub, clock, name, EVERY_S) for name in ("mine", "other"))
    await beats(clock, 2 * SILENCE_S, mine, other)
    clock.advance(SILENCE_S + 1)
    assert await mine.dead({"other"}) == set()  # before the first heartbeat
    await mine.heartbeat()
    assert await mine.dead({"other"}) == set()
    await beats(clock, SILENCE_S, mine)
    assert await mine.dead({"other"}) == set()
    await beats(clock, EVERY_S, mine)
    assert await mine.dead({"other"}) == {"other"}


async def test_a_replica_that_has_just_started_does_not_know_who_is_dead(
    hub: Any, clock: FakeClock
) -> None:
    """The hub may have been away until now."""
    mine = Membership(hub, clock, "mine", EVERY_S)
    await mine.heartbeat()
    assert await mine.dead({"other"}) == set()


async def test_a_heartbeat_that_waits_for_the_hub_does_not_arrive_old(
    hub: Any, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "MIN_SILENCE_S", 0.0)
    mine = Membership(hub, clock, "mine", 0.01)
    hub.here.clear()
    with pytest.raises(FabricUnavailable, match="heartbeat"):
        await mine.heartbeat()
    hub.here.set()
    clock.advance(30.0)
    await mine.heartbeat()
    assert hub.kept["mine"] == {"seen_at": clock.now()}
