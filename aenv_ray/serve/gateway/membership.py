"""Finds the live replicas of the gateway by the heartbeats that they write to the hub."""

from __future__ import annotations

from typing import Final

from aenv_ray.clock import Clock
from aenv_ray.hub.api import Hub
from aenv_ray.hub.keys import GATEWAY_REPLICA

MISSED_HEARTBEATS: Final = 4
"""A replica is dead after missing this many heartbeats …"""
MIN_SILENCE_S: Final = 15.0
"""… and at least this long: on a busy machine a live replica may pause for seconds."""
_FORGET_AFTER: Final = 100
"""A dead replica's document is deleted after this many times the silence that makes it dead."""


class Replicas:
    """The replicas of a gateway, as one of them sees them."""

    def __init__(self, hub: Hub, clock: Clock, name: str, every_s: float) -> None:
        self.name = name
        self.silence_s = max(MISSED_HEARTBEATS * every_s, MIN_SILENCE_S)
        """A replica without a heartbeat for this long is dead."""
        self._hub = hub
        self._clock = clock

    async def heartbeat(self) -> None:
        """Tell the other replicas that this one is alive."""
        await self._hub.put_document(GATEWAY_REPLICA, self.name, {"seen_at": self._clock.now()})

    async def alive(self) -> set[str]:
        """Return the replicas that are alive, this one included; delete those long dead."""
        now = self._clock.now()
        documents = await self._hub.documents(GATEWAY_REPLICA)
        ages = {name: now - float(d.get("seen_at", 0.0)) for name, d in documents.items()}
        for name, age_s in ages.items():
            if age_s > _FORGET_AFTER * self.silence_s:
                await self._hub.delete_document(GATEWAY_REPLICA, name)
        return {name for name, age_s in ages.items() if age_s <= self.silence_s} | {self.name}
