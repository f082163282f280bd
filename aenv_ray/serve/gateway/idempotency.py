"""What the hub remembers of creates that may be repeated, by their idempotency keys.

Who begins a create claims its key; who repeats it finds the claim, and in it the ids of what is
being made. A claim is settled once and for good: admitted, or void, and the key is then free again.
Nobody's death leaves one unsettled for long, for those who repeat the create settle it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from aenv_ray.clock import Clock
from aenv_ray.errors import FabricUnavailable, InstanceNotFound, InstanceReleased
from aenv_ray.hub.api import Hub
from aenv_ray.hub.records import Lease
from aenv_ray.ids import InstanceId
from aenv_ray.models import InstanceStatus
from aenv_ray.serve.gateway.membership import Replicas

KEY_TTL_S: Final = 24 * 3600.0
"""An idempotency key is known for so long."""
_LOOK_S: Final = 0.2
_KEY_DEADLINE_S: Final = 60.0
"""How long a repeated create waits for the first one's instances."""
_OPEN: Final = "open"
"""What a look at a state that nobody settled leaves there for a moment."""
_OPEN_S: Final = 0.05
_SETTLE_TRIES: Final = 100


@dataclass(frozen=True)
class Claim:
    """What the hub remembers of the first create under a key.

    Attributes:
        wish: Fingerprint of what is made.
        ids: Of the instances.
        by: The replica that makes them.
        at: When it began, seconds since 1970.
    """

    wish: str
    ids: list[InstanceId]
    by: str
    at: float


class CreateKeys:
    """The keys of a gateway's creates, as one of its replicas sees them.

    Args:
        hub: Which remembers.
        clock: For the age of claims.
        replicas: The others may die with claims.
    """

    def __init__(self, hub: Hub, clock: Clock, replicas: Replicas) -> None:
        self._hub = hub
        self._clock = clock
        self._replicas = replicas
        self._open: set[str] = set()

    @contextlib.asynccontextmanager
    async def claimed(self, key: str, wish: str, ids: Sequence[InstanceId]) -> AsyncIterator[Claim]:
        """Claim a key, and give the claim that the hub has: this one or an earlier one.

        While the block runs, whoever repeats the create waits for what it makes.
        """
        claim = Claim(wish, list(ids), self._replicas.name, self._clock.now())
        self._open.add(ids[0])
        try:
            kept = await self._hub.remember(f"create:{key}", json.dumps(asdict(claim)), KEY_TTL_S)
            yield Claim(**json.loads(kept))
        finally:
            # Should the hub have taken it without our hearing so, it is nobody's from now on.
            self._open.discard(ids[0])

    async def admit(self, first_id: str) -> bool:
        """Settle that what began with this id is made; False when somebody settled otherwise.

        Raises:
            FabricUnavailable: The hub does not answer.
        """
        return await self._settle(f"admission:{first_id}", "admitted")

    async def void(self, first_id: str) -> None:
        """Let later creates under the same key try anew: what began with this id came to nothing.

        Raises:
            FabricUnavailable: The hub does not answer.
        """
        await self._settle(f"admission:{first_id}", "void")
        await self._settle(f"void:{first_id}", "yes")

    async def made(self, claim: Claim, patience_s: float) -> list[Lease] | None:
        """Return the leases that an earlier create made; None when it came to nothing.

        Args:
            claim: The earlier create's.
            patience_s: After this long, leases are returned as they are.

        Raises:
            InstanceReleased: What was made has ended.
            FabricUnavailable: It is still under way, or the hub does not answer.
        """
        ids = claim.ids
        until = self._clock.now() + min(patience_s, _KEY_DEADLINE_S)
        while True:
            leases = await self._leases(ids)
            if not leases:
                if await self._hub.remember(f"void:{ids[0]}", _OPEN, _OPEN_S) == "yes":
                    return None
                if await self._hub.remember(f"admission:{ids[0]}", _OPEN, _OPEN_S) == "admitted":
                    leases = await self._leases(ids)  # it may have been so only since the last look
                    if not leases:
                        raise InstanceReleased(
                            "what was made under the Idempotency-Key has ended", instance_id=ids[0]
                        )
            is_late = self._clock.now() >= until
            if leases and (is_late or all(o.status is InstanceStatus.RUNNING for o in leases)):
                return leases
            if not leases and await self._is_abandoned(claim):
                # Should whoever began it live after all, it now finds that it may not go on.
                if await self._settle(f"admission:{ids[0]}", "void"):
                    await self._settle(f"void:{ids[0]}", "yes")
                    return None
            elif is_late:
                raise FabricUnavailable("the first request with this key is still under way")
            await asyncio.sleep(_LOOK_S)

    async def _is_abandoned(self, claim: Claim) -> bool:
        """Whether nobody is about to admit what was claimed.

        Its replica died before, or gave up when the hub took the claim and could not answer.
        """
        if claim.by == self._replicas.name:
            return claim.ids[0] not in self._open
        age_s = self._clock.now() - claim.at
        return age_s > self._replicas.silence_s and claim.by not in await self._replicas.alive()

    async def _leases(self, ids: Sequence[str]) -> list[Lease]:
        """Return the leases of instances that are admitted together; none if one has no lease."""
        try:
            return [await self._hub.lease(i) for i in ids]
        except InstanceNotFound:
            return []

    async def _settle(self, name: str, value: str) -> bool:
        """Keep a value for good under a name; False when another was settled before."""
        for _ in range(_SETTLE_TRIES):
            kept = await self._hub.remember(name, value, KEY_TTL_S)
            if kept != _OPEN:
                return kept == value
            await asyncio.sleep(_OPEN_S)  # somebody looked: what looking leaves is soon gone
        raise FabricUnavailable("the hub does not take the state of a create")
