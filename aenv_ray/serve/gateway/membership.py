"""Which replicas of the gateway live: each says so in the hub, and is believed for a while."""

from __future__ import annotations

from typing import Final

from aenv_ray.clock import Clock
from aenv_ray.hub.api import Hub

REPLICAS: Final = "gateway-replica"
"""Kind of the documents by which replicas say that they live."""
MISSED_BEATS: Final = 4
"""A replica that said nothing for so many beats is dead …"""
LEAST_SILENCE_S: Final = 15.0
"""… but not before so long: on a busy machine a live one may be silent for seconds."""
_FORGOTTEN_AFTER: Final = 100
"""Silences after which nothing tells any more that there was such a replica."""


class Replicas:
    """The replicas of a gateway, as seen by one of them.

    Args:
        hub: With what they said.
        clock: For the age of that.
        name: This replica.
        every_s: Seconds between two of its beats.
    """

    def __init__(self, hub: Hub, clock: Clock, name: str, every_s: float) -> None:
        self.name = name
        self.silence_s = max(MISSED_BEATS * every_s, LEAST_SILENCE_S)
        """A replica that said nothing for so long is dead."""
        self._hub = hub
        self._clock = clock

    async def beat(self) -> None:
        """Tell the other replicas that this one lives."""
        await self._hub.put_document(REPLICAS, self.name, {"seen_at": self._clock.now()})

    async def alive(self) -> set[str]:
        """Return the replicas that live, this one among them; forget those that are long dead."""
        now = self._clock.now()
        documents = await self._hub.documents(REPLICAS)
        ages = {name: now - float(d.get("seen_at", 0.0)) for name, d in documents.items()}
        for name, age_s in ages.items():
            if age_s > _FORGOTTEN_AFTER * self.silence_s:
                await self._hub.delete_document(REPLICAS, name)
        return {name for name, age_s in ages.items() if age_s <= self.silence_s} | {self.name}
