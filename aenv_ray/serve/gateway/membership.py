"""Finds the dead replicas of a gateway by their heartbeats, and elects one for a periodic task."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final

from aenv_ray.clock import Clock
from aenv_ray.errors import FabricUnavailable
from aenv_ray.hub.api import Hub
from aenv_ray.hub.keys import GATEWAY_REPLICA

MISSED_HEARTBEATS: Final = 4
"""A replica is dead after missing this many heartbeats …"""
MIN_SILENCE_S: Final = 15.0
"""… and at least this long: on a busy machine a live replica may pause for seconds."""
_REMEMBERED_ROUNDS: Final = 10
"""An election is remembered for this many rounds, so that clocks may differ."""
_FORGET_AFTER: Final = 100
"""A dead replica's document is deleted after this many times the silence that makes it dead."""


class Membership:
    """The replicas of a gateway, as one of them sees them.

    While the hub is away, no replica can write a heartbeat, and live ones would look dead when it
    answers again. So the silence of another replica counts only after this one's own heartbeats
    have been regular for as long.
    """

    def __init__(self, hub: Hub, clock: Clock, name: str, every_s: float) -> None:
        self.name = name
        self.silence_s = max(MISSED_HEARTBEATS * every_s, MIN_SILENCE_S)
        """A replica without a heartbeat for this long is dead."""
        self._hub = hub
        self._clock = clock
        self._beat_at = self._regular_since = clock.now()
        """The latest heartbeat, and the first of those without a long pause between them."""

    async def heartbeat(self) -> None:
        """Tell the other replicas that this one is alive.

        Raises:
            FabricUnavailable: The hub does not answer soon. It would get an old heartbeat later.
        """
        deadline_s = self.silence_s / MISSED_HEARTBEATS
        try:
            async with asyncio.timeout(deadline_s):
                seen = {"seen_at": self._clock.now()}
                await self._hub.put_document(GATEWAY_REPLICA, self.name, seen)
        except TimeoutError:
            raise FabricUnavailable(
                f"the hub did not store a heartbeat within {deadline_s:g} s",
                hint="check whether the hub answers: aenv hub status",
            ) from None
        now = self._clock.now()
        if self._is_late(now):
            self._regular_since = now
        self._beat_at = now

    async def is_elected(self, task: str, every_s: float) -> bool:
        """Elect a replica for this round of a task that one of them runs; return if it is this."""
        round_name = f"{task}:{int(self._clock.now() / every_s)}"
        ttl_s = _REMEMBERED_ROUNDS * every_s
        return await self._hub.remember(round_name, self.name, ttl_s) == self.name

    async def dead(self, names: Collection[str]) -> set[str]:
        """Return those of the replicas that are dead; delete the documents of those long dead."""
        now = self._clock.now()
        documents = await self._hub.documents(GATEWAY_REPLICA)
        ages = {name: now - float(d.get("seen_at", 0.0)) for name, d in documents.items()}
        for name, age_s in ages.items():
            if age_s > _FORGET_AFTER * self.silence_s:
                await self._hub.delete_document(GATEWAY_REPLICA, name)
        if self._is_late(now) or now - self._regular_since <= self.silence_s:
            return set()
        alive = {name for name, age_s in ages.items() if age_s <= self.silence_s} | {self.name}
        return set(names) - alive

    def _is_late(self, now: float) -> bool:
        return now - self._beat_at > self.silence_s / 2
