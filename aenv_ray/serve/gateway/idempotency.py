"""Idempotency keys of creates: a repeated request finds the instances of the first one.

The hub remembers three things for a key:

- ``create:KEY``: the claim of the first request, with the ids of the instances that it creates. If
  that create failed, the claim of the next request replaces it.
- ``admission:ID`` (ID is the first instance's), set once: ``admitted`` when the instances have
  leases, or ``void`` when the create failed before that. A void create can no longer be admitted.
- ``void:ID``, set once: ``yes`` when the create failed, before or after its admission. The key is
  then free.

If the replica of the first request dies, a repetition of the request sets what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aenv_ray.clock import Clock
from aenv_ray.errors import CapacityExceeded, FabricUnavailable, InstanceNotFound, InstanceReleased
from aenv_ray.hub.api import Hub
from aenv_ray.hub.records import KeyGroup, Lease
from aenv_ray.ids import InstanceId, environment_part, instance_ids
from aenv_ray.models import InstanceStatus
from aenv_ray.serve.gateway.membership import Membership

KEY_TTL_S: Final = 3600.0
"""How long an idempotency key is remembered: clients send one with every create, and repeat a
request within minutes."""
FAILED_TTL_S: Final = 300.0
"""How long the key of a create that failed is remembered."""
MAX_KEYS: Final = 200_000
"""How many keys the hub holds of an owner, about 50 for each second: its memory is that of all
owners, and no quota counts creates whose instances have ended."""
_FULL_RETRY_S: Final = 60.0
_POLL_S: Final = 0.2
_MAX_WAIT_S: Final = 60.0
"""How long a repeated create waits for the instances of the first one."""
_ADMITTED: Final = "admitted"
_VOID: Final = "void"
_YES: Final = "yes"
_UNSET: Final = "open"
"""Reading a value that is not set leaves this placeholder in the hub …"""
_UNSET_S: Final = 0.05
"""… for this long, because the hub offers no plain read."""
_SET_ATTEMPTS: Final = 100
_LIVE: Final = (InstanceStatus.PENDING, InstanceStatus.RUNNING)


@dataclass(frozen=True)
class Claim:
    """The create that has a key.

    Attributes:
        key: The key.
        owner: Who sent it.
        fingerprint: Fingerprint of the create request.
        ids: The ids of the instances.
        replica: The replica that creates them.
        claimed_at: Seconds since the epoch.
        seed: Of the ids, see `instance_ids`.
        stored: The claim as the hub has it.
    """

    key: str
    owner: str
    fingerprint: str
    ids: list[InstanceId]
    replica: str
    claimed_at: float
    seed: str = ""
    stored: str = ""

    def to_json(self) -> str:
        """Return the claim as the hub stores it, without many ids: it is in the memory of Redis."""
        made: dict[str, Any] = {"ids": self.ids}
        if len(self.ids) > 1:
            name = environment_part(self.ids[0])
            made = {"name": name, "seed": self.seed, "count": len(self.ids)}
        return json.dumps(
            {"wish": self.fingerprint, "by": self.replica, "at": self.claimed_at} | made
        )

    @classmethod
    def from_json(cls, key: str, owner: str, text: str) -> Claim:
        """Return the stored claim of an owner's key."""
        found = json.loads(text)
        seed = found.get("seed", "")
        ids = instance_ids(found["name"], seed, found["count"]) if seed else found["ids"]
        return cls(key, owner, found["wish"], ids, found["by"], found["at"], seed, text)


class IdempotencyKeys:
    """The idempotency keys of creates, as one replica sees them."""

    def __init__(self, hub: Hub, clock: Clock, membership: Membership) -> None:
        self._hub = hub
        self._clock = clock
        self._membership = membership
        self._active: set[str] = set()
        """First ids of the claims of this process that are being worked on."""

    @contextlib.asynccontextmanager
    async def claim(
        self,
        key: str,
        owner: str,
        fingerprint: str,
        ids: Sequence[InstanceId],
        seed: str,
        failed: Claim | None = None,
    ) -> AsyncIterator[Claim]:
        """Claim a key, and yield the claim that the hub has: this one or another one.

        Requests that repeat the create wait for it while the block runs.

        Args:
            key: The key.
            owner: As `Claim.owner`.
            fingerprint: As `Claim.fingerprint`.
            ids: As `Claim.ids`.
            seed: As `Claim.seed`.
            failed: The claim of a create that failed, which is replaced.

        Raises:
            CapacityExceeded: The key is new, and the hub holds too many of the owner.
            FabricUnavailable: The hub does not answer.
        """
        by, now = self._membership.name, self._clock.now()
        claim = Claim(key, owner, fingerprint, list(ids), by, now, seed)
        name, text, group = f"create:{key}", claim.to_json(), _group(owner)
        self._active.add(ids[0])
        try:
            if failed is None:
                stored = await self._hub.remember(name, text, KEY_TTL_S, group)
            else:
                stored = await self._hub.replace_remembered(
                    name, failed.stored, text, KEY_TTL_S, group
                )
            if not stored:
                raise _too_many(owner)
            yield Claim.from_json(key, owner, stored)
        finally:
            # If the hub stored the claim but its answer was lost, the claim is abandoned now.
            self._active.discard(ids[0])

    async def mark_admitted(self, first_id: str) -> bool:
        """Note that the instances have leases; False: the create was marked as failed before.

        Raises:
            FabricUnavailable: The hub does not answer.
        """
        return await self._set(f"admission:{first_id}", _ADMITTED)

    async def mark_failed(self, first_id: str, claim: Claim | None = None) -> None:
        """Free the key of a create that failed.

        Args:
            first_id: Id of its first instance.
            claim: Its claim, if it is known: it is forgotten soon, since there may be any number.

        Raises:
            FabricUnavailable: The hub does not answer.
        """
        marks = (f"admission:{first_id}", f"void:{first_id}")
        await self._set(marks[0], _VOID)
        await self._set(marks[1], _YES)
        if claim is not None:
            # Another request may have the key by now, whose claim stays. The marks must outlive
            # this one.
            name, stored = f"create:{claim.key}", claim.stored
            await self._hub.replace_remembered(
                name, stored, stored, FAILED_TTL_S, _group(claim.owner)
            )
            await self._hub.shorten(marks, FAILED_TTL_S)

    async def wait(self, claim: Claim, wait_s: float) -> list[Lease] | None:
        """Return the leases of an earlier create; None: it failed, and the key is free.

        Args:
            claim: The earlier create's.
            wait_s: The leases are returned as they are after this time, also if some are Pending.

        Raises:
            InstanceReleased: The instances have ended.
            FabricUnavailable: There are no leases yet, or the hub does not answer.
        """
        until = self._clock.now() + min(wait_s, _MAX_WAIT_S)
        while True:
            leases = await self._leases(claim.ids)
            if not leases or any(lease.status not in _LIVE for lease in leases):
                # The hub keeps the leases of some that failed or have ended, for their reasons.
                if await self._get(f"void:{claim.ids[0]}") == _YES:
                    return None
                if leases:
                    raise _ended(claim)
                leases = await self._admitted_leases(claim)
            is_late = self._clock.now() >= until
            if leases:
                is_starting = any(lease.status is InstanceStatus.PENDING for lease in leases)
                if is_late or not is_starting:
                    return leases
            elif await self._is_abandoned(claim):
                # If its replica is alive after all, this stops it: `mark_admitted` returns False.
                if await self._set(f"admission:{claim.ids[0]}", _VOID):
                    await self._set(f"void:{claim.ids[0]}", _YES)
                    return None
            elif is_late:
                raise FabricUnavailable(
                    "the first create with this Idempotency-Key is still in progress",
                    hint="repeat the request with the same key",
                )
            await asyncio.sleep(_POLL_S)

    async def _admitted_leases(self, claim: Claim) -> list[Lease]:
        """Return the leases of an admitted create, or none if it is not admitted yet.

        Raises:
            InstanceReleased: It was admitted, and the leases have ended.
        """
        if await self._get(f"admission:{claim.ids[0]}") != _ADMITTED:
            return []
        leases = await self._leases(claim.ids)  # it may have been admitted a moment ago
        if not leases:
            raise _ended(claim)
        return leases

    async def _is_abandoned(self, claim: Claim) -> bool:
        """Whether nobody is working on a claim any more.

        Its replica died, or lost the hub's answer to the claim and gave up.
        """
        if claim.replica == self._membership.name:
            return claim.ids[0] not in self._active
        age_s = self._clock.now() - claim.claimed_at
        if age_s <= self._membership.silence_s:
            return False
        return bool(await self._membership.dead({claim.replica}))

    async def _leases(self, ids: Sequence[str]) -> list[Lease]:
        """Return the leases of instances; none if any of them has no lease."""
        try:
            return [await self._hub.lease(instance_id) for instance_id in ids]
        except InstanceNotFound:
            return []

    # --- values in the hub, set once --------------------------------------------------------------

    async def _get(self, name: str) -> str | None:
        """Return a value; None: it is not set."""
        value = await self._hub.remember(name, _UNSET, _UNSET_S)
        return None if value == _UNSET else value

    async def _set(self, name: str, value: str) -> bool:
        """Set a value; False: another one was set before."""
        for _ in range(_SET_ATTEMPTS):
            stored = await self._hub.remember(name, value, KEY_TTL_S)
            if stored != _UNSET:
                return stored == value
            await asyncio.sleep(_UNSET_S)  # until the placeholder of a concurrent `_get` expires
        raise FabricUnavailable(f"the hub did not store {name} in {_SET_ATTEMPTS} attempts")


def _group(owner: str) -> KeyGroup:
    """Return the group of an owner's keys; each has one or two marks, which are not counted."""
    return KeyGroup(name=f"creates:{owner}", most=MAX_KEYS)


def _too_many(owner: str) -> CapacityExceeded:
    return CapacityExceeded(
        f"{owner} has used {MAX_KEYS} Idempotency-Keys within an hour",
        retry_after_s=_FULL_RETRY_S,
        hint="create several instances with one request, or create without a key; such a create is "
        "undone when its client disconnects",
    )


def _ended(claim: Claim) -> InstanceReleased:
    return InstanceReleased(
        "instances created under this Idempotency-Key have ended",
        instance_id=claim.ids[0],
        hint="use a new key for a new create",
    )
