"""The hub's leases and quotas over Redis."""

from __future__ import annotations

import json
from abc import ABC
from collections.abc import Sequence
from typing import Any, Final

from aenv_ray import ids
from aenv_ray.errors import ConfigError, InstanceNotFound, QuotaExceeded
from aenv_ray.hub import catalog_scripts, lease_scripts
from aenv_ray.hub.base import HubBase, from_cursor, listing, to_cursor, to_json
from aenv_ray.hub.records import Lease, LeaseQuery, Page, Quota
from aenv_ray.models import InstanceStatus

OVERDUE_S: Final = 10.0
"""So long after its deadline nothing of an instance is left (invariant 3): its place is free."""
KEPT_S: Final = 600.0
"""A lease that ended and that nobody forgot says why for so long."""
RETRY_S: Final = 1.0
"""A caller who was refused asks again after this much for each caller before him, and himself."""
MAX_RETRY_S: Final = 10.0
PLACE_KEPT_S: Final = 5.0
"""His place in the queue is kept for so much longer; who does not come back loses it."""
SWEEP_AT_ONCE: Final = 500
_STATE: Final = frozenset({"status", "deadline", "reason", "engine"})


class Leases(HubBase, ABC):
    """Who has which instances until when, and how many a subject may have."""

    async def admit(self, leases: Sequence[Lease]) -> None:  # noqa: D102
        if not leases:
            return
        now = self._clock.now()
        outcome, *facts = await self._run(
            lease_scripts.ADMIT,
            to_json([_wire(lease) for lease in leases]),
            leases[0].owner,
            now,
            now - OVERDUE_S,
            now + KEPT_S,
            RETRY_S + PLACE_KEPT_S,
        )
        if outcome == "never":
            subject, limit, need = facts
            raise QuotaExceeded(
                f"{subject} may have {limit} instances at once and {need} were asked for",
                retry_after_s=MAX_RETRY_S,
                hint="ask for fewer at once, or have the quota raised: it never fits",
            )
        if outcome == "full":
            subject, limit, need, live, ahead = facts
            queue = f" and {ahead} others wait" if ahead else ""
            raise QuotaExceeded(
                f"{subject} has {live} of {limit} instances{queue}: there is no room for {need}",
                retry_after_s=min(RETRY_S * (1 + ahead), MAX_RETRY_S),
                hint="end instances that are no longer used, or try again",
            )

    async def exchange(self, instance_ids: Sequence[str], leases: Sequence[Lease]) -> None:
        """Let leases take the places of others, which are forgotten; no quota is asked again.

        For instances that came to be under other ids than those that were admitted.
        """
        wire = to_json([_wire(lease) for lease in leases])
        await self._run(lease_scripts.EXCHANGE, to_json(list(instance_ids)), wire)

    async def lease(self, instance_id: str) -> Lease:  # noqa: D102
        return await self._lease(instance_id, InstanceNotFound(
            f"there is no instance {instance_id}", instance_id=instance_id,
            hint="it ended some time ago, or never was",
        ))  # fmt: skip

    async def lease_of_capability(self, capability: str) -> Lease:  # noqa: D102
        # The name is a credential: no error repeats it.
        unknown = InstanceNotFound(
            "no instance has this address", hint="use the one that creating the instance returned"
        )
        key = self._keys.root + "lease:capabilities"
        instance_id = await self._ask("hget", key, capability)
        if instance_id is None:
            raise unknown
        return await self._lease(instance_id, unknown)

    async def leases(self, query: LeaseQuery) -> Page[Lease]:  # noqa: D102
        after = from_cursor(query.cursor)
        argument = listing(_indexes(query), after=after, limit=query.limit)
        total, *members = await self._run(catalog_scripts.LIST, argument)
        page = members[: query.limit]
        found = await self._read_leases([member.split(" ", 1)[1] for member in page])
        cursor = to_cursor(page[-1]) if len(members) > query.limit else None
        return Page(items=tuple(found), cursor=cursor, total=total)

    async def update_lease(  # noqa: D102
        self,
        instance_id: str,
        *,
        status: InstanceStatus | None = None,
        deadline: float | None = None,
        reason: str | None = None,
        engine: str | None = None,
    ) -> Lease:
        given = {
            "status": status,
            "deadline": None if deadline is None else repr(float(deadline)),
            "reason": reason,
            "engine": engine,
        }
        change = {key: value for key, value in given.items() if value is not None}
        forget_at = self._clock.now() + KEPT_S
        row = await self._run(lease_scripts.UPDATE, instance_id, to_json(change), forget_at)
        if not row:
            raise InstanceNotFound(
                f"there is no instance {instance_id}",
                instance_id=instance_id,
                hint="it ended some time ago, or never was",
            )
        return _lease(row)

    async def end_leases(self, instance_ids: Sequence[str]) -> None:  # noqa: D102
        if instance_ids:
            await self._run(lease_scripts.END, *instance_ids)

    async def sweep(self) -> int:
        """End what is overdue and forget what ended long ago.

        Returns:
            How many leases and tokens; `SWEEP_AT_ONCE` or more: there may be more to do.
        """
        now = self._clock.now()
        return int(
            await self._run(
                lease_scripts.SWEEP, now, now - OVERDUE_S, now + KEPT_S, str(SWEEP_AT_ONCE)
            )
        )

    async def set_quota(self, quota: Quota) -> None:  # noqa: D102
        kind, colon, rest = quota.subject.partition(":")
        if not colon or not rest or kind not in ("owner", "label"):
            raise _bad_subject(quota.subject)
        if kind == "label" and (not rest.partition("=")[0] or "=" not in rest):
            raise _bad_subject(quota.subject)
        await self._ask("hset", self._keys.limits, quota.subject, str(quota.max_instances))

    async def delete_quota(self, subject: str) -> None:  # noqa: D102
        await self._ask("hdel", self._keys.limits, subject)

    async def quotas(self) -> dict[str, tuple[int, int]]:  # noqa: D102
        rows = await self._run(lease_scripts.QUOTAS)
        return {rows[i]: (rows[i + 1], rows[i + 2]) for i in range(0, len(rows), 3)}

    async def _lease(self, instance_id: str, unknown: InstanceNotFound) -> Lease:
        found = await self._read_leases([instance_id])
        if not found:
            raise unknown
        return found[0]

    async def _read_leases(self, instance_ids: list[str]) -> list[Lease]:
        """Return the leases of these ids that are there, in their order."""
        if not instance_ids:
            return []
        rows = await self._run(lease_scripts.READ_LEASES, *instance_ids)
        return [_lease(row) for row in rows if row[0]]


def _bad_subject(subject: str) -> ConfigError:
    return ConfigError(
        f"quota subject {subject[:80]!r} is not valid",
        hint="write owner:NAME or label:KEY=VALUE, for example label:experiment=a",
    )


def label_subject(key: str, value: str) -> str:
    """Return the subject of a label. A ``=`` in its key is escaped: no two labels are one."""
    escaped = key.replace("%", "%25").replace("=", "%3D")
    return f"label:{escaped}={value}"


def _subjects(lease: Lease) -> list[str]:
    return [f"owner:{lease.owner}", *(label_subject(k, v) for k, v in lease.labels.items())]


def _member(lease: Lease) -> str:
    """Return the member of sorted sets under which a lease comes before older ones."""
    age = 10**17 - int(lease.created_at * 1_000_000)  # microseconds, falling, until the year 5138
    return f"{age:018d} {lease.id}"


def _wire(lease: Lease) -> dict[str, Any]:
    """Return a lease as the scripts take it: text alone, for Lua's numbers lose digits."""
    name, _ = ids.split_reference(lease.reference)
    names = {
        "member": _member(lease),
        "name": name,
        "reference": lease.reference,
        "capability": lease.capability,
        "subjects": _subjects(lease),
    }
    return {
        **names,
        "id": lease.id,
        "names": to_json(names),
        "record": lease.model_dump_json(exclude=set(_STATE)),
        "status": lease.status,
        "deadline": repr(float(lease.deadline)),
        "reason": lease.reason,
        "engine": lease.engine,
    }


def _lease(row: Sequence[str]) -> Lease:
    record, status, deadline, reason, engine = row
    state = {"status": status, "deadline": deadline, "reason": reason, "engine": engine}
    return Lease.model_validate(json.loads(record) | state)


def _indexes(query: LeaseQuery) -> list[str]:
    keys = ["lease:in:all"]
    if query.owner is not None:
        keys.append(f"lease:in:owner:{query.owner}")
    if query.label is not None:
        keys.append(f"lease:in:{label_subject(*query.label)}")
    if query.status is not None:
        keys.append(f"lease:in:status:{query.status}")
    if query.name is not None and query.version is not None:
        keys.append(f"lease:in:ref:{query.name}@{query.version}")
    elif query.name is not None:
        keys.append(f"lease:in:env:{query.name}")
    # The set of all is needed where nothing else says what is wanted.
    return keys[1:] or keys
