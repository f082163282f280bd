"""Leases and quotas in Redis."""

from __future__ import annotations

import json
import re
from abc import ABC
from collections.abc import Sequence
from typing import Any, Final

from aenv_ray import ids
from aenv_ray.errors import ConfigError, InstanceNotFound, QuotaExceeded, QuotaTooSmall
from aenv_ray.hub.base import LIST, HubBase, from_cursor, listing, to_cursor, to_json
from aenv_ray.hub.records import Lease, LeaseQuery, Page, Quota, unknown_address, unknown_instance
from aenv_ray.models import InstanceStatus
from aenv_ray.units import counted

OVERDUE_S: Final = 10.0
"""A lease ends this long after its deadline, when nothing of the instance is left (invariant 3)."""
KEPT_S: Final = 600.0
"""How long an ended lease is kept, so that its reason can be read."""
RETRY_S: Final = 1.0
"""A refused caller should ask again after this long for each caller ahead of it, plus one."""
MAX_RETRY_S: Final = 10.0
PLACE_KEPT_S: Final = 5.0
"""How much longer a refused caller keeps its place in the queue."""
SWEEP_AT_ONCE: Final = 500
_STATE: Final = frozenset({"status", "deadline", "reason", "engine"})


_LEASE: Final = """
local root = KEYS[1]
local function is_live(status) return status == 'Pending' or status == 'Running' end
local function of(id) return root..'lease:one:'..id end
-- Leases of earlier versions have no places.
local function places_of(lease) return lease.places or 1 end
local function change_places(command, id, lease)
    for _, subject in ipairs(lease.subjects) do
        for place = 1, places_of(lease) do
            local member = place == 1 and id or id..'/'..place
            redis.call(command, root..'lease:live:'..subject, member)
        end
    end
end
local function vacate(id, lease)
    redis.call('ZREM', root..'lease:deadlines', id)
    redis.call('SREM', root..'lease:live-ref:'..lease.reference, id)
    change_places('SREM', id, lease)
end
local function set_status(id, lease, old, new)
    redis.call('HSET', of(id), 'status', new)
    redis.call('ZREM', root..'lease:in:status:'..old, lease.member)
    redis.call('ZADD', root..'lease:in:status:'..new, 0, lease.member)
end
local function finish(id, lease, old, new, forget_at)
    set_status(id, lease, old, new)
    vacate(id, lease)
    redis.call('ZADD', root..'lease:ended', forget_at, id)
    -- Agent tokens of the instance end with it.
    for _, token in ipairs(redis.call('SMEMBERS', root..'token:of:'..id)) do
        local hash = redis.call('HGET', root..'token:secrets', token)
        if hash then redis.call('HDEL', root..'token:hashes', hash) end
        redis.call('HDEL', root..'token:records', token)
        redis.call('HDEL', root..'token:secrets', token)
        redis.call('ZREM', root..'token:expiry', token)
    end
    redis.call('DEL', root..'token:of:'..id)
end
local function forget(id)
    local known = redis.call('HMGET', of(id), 'names', 'status')
    if not known[1] then return end
    local lease = cjson.decode(known[1])
    finish(id, lease, known[2], known[2], 0)
    redis.call('ZREM', root..'lease:in:status:'..known[2], lease.member)
    redis.call('ZREM', root..'lease:in:all', lease.member)
    redis.call('ZREM', root..'lease:in:env:'..lease.name, lease.member)
    redis.call('ZREM', root..'lease:in:ref:'..lease.reference, lease.member)
    for _, subject in ipairs(lease.subjects) do
        redis.call('ZREM', root..'lease:in:'..subject, lease.member)
    end
    redis.call('HDEL', root..'lease:capabilities', lease.capability)
    redis.call('ZREM', root..'lease:ended', id)
    redis.call('DEL', of(id))
end
local function place(lease)
    local id = lease.id
    redis.call('HSET', of(id), 'record', lease.record, 'names', lease.names,
        'status', lease.status, 'deadline', lease.deadline, 'reason', lease.reason,
        'engine', lease.engine)
    redis.call('ZADD', root..'lease:in:all', 0, lease.member)
    redis.call('ZADD', root..'lease:in:status:'..lease.status, 0, lease.member)
    redis.call('ZADD', root..'lease:in:env:'..lease.name, 0, lease.member)
    redis.call('ZADD', root..'lease:in:ref:'..lease.reference, 0, lease.member)
    for _, subject in ipairs(lease.subjects) do
        redis.call('ZADD', root..'lease:in:'..subject, 0, lease.member)
    end
    change_places('SADD', id, lease)
    redis.call('SADD', root..'lease:live-ref:'..lease.reference, id)
    redis.call('HSET', root..'lease:capabilities', lease.capability, id)
    redis.call('ZADD', root..'lease:deadlines', lease.deadline, id)
end
local function end_overdue(before, forget_at, most)
    local overdue = redis.call(
        'ZRANGEBYSCORE', root..'lease:deadlines', '-inf', before, 'LIMIT', 0, most)
    for _, id in ipairs(overdue) do
        local known = redis.call('HMGET', of(id), 'names', 'status', 'reason')
        if known[3] == '' then redis.call('HSET', of(id), 'reason', 'its deadline passed') end
        finish(id, cjson.decode(known[1]), known[2], 'Terminated', forget_at)
    end
    return #overdue
end
"""

ADMIT: Final = (
    _LEASE
    + """
local leases = cjson.decode(ARGV[1])
local owner, now, before, forget_at, lapse_s =
    ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5], tonumber(ARGV[6])
end_overdue(before, forget_at, 100)
local new, needs, seen = {}, {}, {}
for _, lease in ipairs(leases) do
    if not seen[lease.id] and redis.call('EXISTS', of(lease.id)) == 0 then
        seen[lease.id] = true
        new[#new + 1] = lease
        local places = places_of(lease)
        for _, subject in ipairs(lease.subjects) do
            if places > 0 then needs[subject] = (needs[subject] or 0) + places end
        end
    end
end
local limited = {}
for subject, need in pairs(needs) do
    local limit = tonumber(redis.call('HGET', root..'quota:limits', subject))
    if limit then
        if need > limit then return {'never', subject, limit, need} end
        limited[#limited + 1] = {subject, limit, need}
    end
end
table.sort(limited, function(a, b) return a[1] < b[1] end)
for _, entry in ipairs(limited) do
    local subject, limit, need = entry[1], entry[2], entry[3]
    local waiting = root..'quota:waiting:'..subject
    local tickets, mine = redis.call('HGETALL', waiting), nil
    local reserved, ahead = 0, 0
    local others = {}
    for i = 1, #tickets, 2 do
        local since, till, places = string.match(tickets[i + 1], '(%S+) (%S+) (%S+)')
        if tonumber(till) < now then
            redis.call('HDEL', waiting, tickets[i])
        elseif tickets[i] == owner then
            mine = tonumber(since)
        else
            others[#others + 1] = {tonumber(since), tickets[i], tonumber(places)}
        end
    end
    for _, other in ipairs(others) do
        if not mine or other[1] < mine or (other[1] == mine and other[2] < owner) then
            reserved, ahead = reserved + other[3], ahead + 1
        end
    end
    local live = redis.call('SCARD', root..'lease:live:'..subject)
    if live + reserved + need > limit then
        local ticket = string.format('%.6f %.6f %d', mine or now, now + lapse_s * (ahead + 1), need)
        redis.call('HSET', waiting, owner, ticket)
        return {'full', subject, limit, need, live, ahead}
    end
end
for _, entry in ipairs(limited) do redis.call('HDEL', root..'quota:waiting:'..entry[1], owner) end
for _, lease in ipairs(new) do place(lease) end
return {'ok'}
"""
)
"""Arguments: leases as JSON, the owner, now, the latest overdue deadline, when to forget overdue
leases, how long a place in the queue lasts. Returns an outcome, and the figures of a refusal."""

UPDATE: Final = (
    _LEASE
    + """
local id, change, forget_at = ARGV[1], cjson.decode(ARGV[2]), ARGV[3]
local known = redis.call('HMGET', of(id), 'names', 'status')
if not known[1] then return {} end
local lease, old = cjson.decode(known[1]), known[2]
if change.reason then redis.call('HSET', of(id), 'reason', change.reason) end
if change.engine then redis.call('HSET', of(id), 'engine', change.engine) end
if is_live(old) then
    if change.deadline then
        redis.call('HSET', of(id), 'deadline', change.deadline)
        redis.call('ZADD', root..'lease:deadlines', change.deadline, id)
    end
    if change.status and is_live(change.status) then
        set_status(id, lease, old, change.status)
    elseif change.status then
        finish(id, lease, old, change.status, forget_at)
    end
end
return redis.call('HMGET', of(id), 'record', 'status', 'deadline', 'reason', 'engine')
"""
)
"""Arguments: id, changes as JSON, when to forget the lease if it ends. Returns the fields of the
lease, or nothing if there is none. A late report does not revive an ended lease."""

EXCHANGE: Final = (
    _LEASE
    + """
for _, id in ipairs(cjson.decode(ARGV[1])) do forget(id) end
for _, lease in ipairs(cjson.decode(ARGV[2])) do
    if redis.call('EXISTS', of(lease.id)) == 0 then place(lease) end
end
return 1
"""
)
"""Arguments: ids, and the leases that replace them, as JSON."""

END: Final = (
    _LEASE
    + """
for _, id in ipairs(ARGV) do forget(id) end
return 1
"""
)
"""Arguments: ids."""

READ_LEASES: Final = """
local rows = {}
for i, id in ipairs(ARGV) do
    rows[i] = redis.call('HMGET', KEYS[1]..'lease:one:'..id,
        'record', 'status', 'deadline', 'reason', 'engine')
end
return rows
"""
"""Arguments: ids. Returns the fields of each lease; empty for unknown ids."""

SWEEP: Final = (
    _LEASE
    + """
local now, before, forget_at, most = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local ended = end_overdue(before, forget_at, most)
local old = redis.call('ZRANGEBYSCORE', root..'lease:ended', '-inf', now, 'LIMIT', 0, most)
for _, id in ipairs(old) do forget(id) end
local tokens = redis.call('ZRANGEBYSCORE', root..'token:expiry', '-inf', now, 'LIMIT', 0, most)
for _, token in ipairs(tokens) do
    local hash = redis.call('HGET', root..'token:secrets', token)
    if hash then redis.call('HDEL', root..'token:hashes', hash) end
    redis.call('HDEL', root..'token:records', token)
    redis.call('HDEL', root..'token:secrets', token)
    redis.call('ZREM', root..'token:expiry', token)
end
return ended + #old + #tokens
"""
)
"""Arguments: now, the latest overdue deadline, when to forget overdue leases, how many at most.
Returns how many leases and tokens it ended or deleted."""

QUOTAS: Final = """
local root = KEYS[1]
local rows = {}
local limits = redis.call('HGETALL', root..'quota:limits')
for i = 1, #limits, 2 do
    rows[#rows + 1] = limits[i]
    rows[#rows + 1] = redis.call('SCARD', root..'lease:live:'..limits[i])
    rows[#rows + 1] = tonumber(limits[i + 1])
end
return rows
"""
"""Returns the subject, use and limit of each quota as one flat list."""


class Leases(HubBase, ABC):
    """Leases of instances, and quotas for their owners and labels."""

    async def admit(self, leases: Sequence[Lease]) -> None:  # noqa: D102
        if not leases:
            return
        now = self._clock.now()
        outcome, *facts = await self._run(
            ADMIT,
            to_json([_wire(lease) for lease in leases]),
            leases[0].owner,
            now,
            now - OVERDUE_S,
            now + KEPT_S,
            RETRY_S + PLACE_KEPT_S,
        )
        if outcome == "never":
            subject, limit, need = facts
            raise QuotaTooSmall(
                f"the quota of {subject} is {counted(limit, 'instance')}, and {need} were "
                "requested at once"
                f"{_with_inner(leases)}",
                retry_after_s=MAX_RETRY_S,
                hint="request fewer at once, or have the quota raised",
            )
        if outcome == "full":
            subject, limit, need, live, ahead = facts
            queue = f" and {ahead} owners wait ahead" if ahead else ""
            raise QuotaExceeded(
                f"{subject} has {live} of {counted(limit, 'instance')}{queue}: "
                f"no room for {need} more"
                f"{_with_inner(leases)}",
                retry_after_s=min(RETRY_S * (1 + ahead), MAX_RETRY_S),
                hint="end unused instances, or try again",
            )

    async def exchange(  # noqa: D102
        self, instance_ids: Sequence[str], leases: Sequence[Lease]
    ) -> None:
        wire = to_json([_wire(lease) for lease in leases])
        await self._run(EXCHANGE, to_json(list(instance_ids)), wire)

    async def lease(self, instance_id: str) -> Lease:  # noqa: D102
        return await self._lease(instance_id, unknown_instance(instance_id))

    async def lease_of_capability(self, capability: str) -> Lease:  # noqa: D102
        key = self._keys.root + "lease:capabilities"
        instance_id = await self._ask("hget", key, capability)
        if instance_id is None:
            raise unknown_address()
        return await self._lease(instance_id, unknown_address())

    async def leases(self, query: LeaseQuery) -> Page[Lease]:  # noqa: D102
        after = from_cursor(query.cursor)
        argument = listing(_indexes(query), after=after, limit=query.limit)
        total, *members = await self._run(LIST, argument)
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
        row = await self._run(UPDATE, instance_id, to_json(change), forget_at)
        if not row:
            raise unknown_instance(instance_id)
        return _lease(row)

    async def end_leases(self, instance_ids: Sequence[str]) -> None:  # noqa: D102
        if instance_ids:
            await self._run(END, *instance_ids)

    async def sweep(self) -> int:
        """End overdue leases, and delete old leases and expired tokens.

        Returns:
            The number of leases and tokens; at `SWEEP_AT_ONCE` or more, call it again.
        """
        now = self._clock.now()
        return int(await self._run(SWEEP, now, now - OVERDUE_S, now + KEPT_S, str(SWEEP_AT_ONCE)))

    async def set_quota(self, quota: Quota) -> None:  # noqa: D102
        _check_subject(quota.subject)
        await self._ask("hset", self._keys.limits, quota.subject, str(quota.max_instances))

    async def delete_quota(self, subject: str) -> None:  # noqa: D102
        _check_subject(subject)
        await self._ask("hdel", self._keys.limits, subject)

    async def quotas(self) -> dict[str, tuple[int, int]]:  # noqa: D102
        rows = await self._run(QUOTAS)
        return {rows[i]: (rows[i + 1], rows[i + 2]) for i in range(0, len(rows), 3)}

    async def _lease(self, instance_id: str, unknown: InstanceNotFound) -> Lease:
        found = await self._read_leases([instance_id])
        if not found:
            raise unknown
        return found[0]

    async def _read_leases(self, instance_ids: list[str]) -> list[Lease]:
        """Return the existing leases with these ids, in order."""
        if not instance_ids:
            return []
        rows = await self._run(READ_LEASES, *instance_ids)
        return [_lease(row) for row in rows if row[0]]


def _with_inner(leases: Sequence[Lease]) -> str:
    """Return a remark for a refusal if leases count as more than one instance each."""
    if all(lease.places <= 1 for lease in leases):
        return ""
    return ", inner instances (deployConfig.innerInstances) included"


def _check_subject(subject: str) -> None:
    if not re.fullmatch(r"owner:.+|label:[^=]+=.*", subject, re.DOTALL):
        raise ConfigError(
            f"invalid quota subject {subject[:80]!r}",
            hint="use owner:NAME or label:KEY=VALUE, for example label:experiment=a",
        )


def label_subject(key: str, value: str) -> str:
    """Return the quota subject of a label; ``=`` in the key is escaped to keep it unique."""
    escaped = key.replace("%", "%25").replace("=", "%3D")
    return f"label:{escaped}={value}"


def _subjects(lease: Lease) -> list[str]:
    return [f"owner:{lease.owner}", *(label_subject(k, v) for k, v in lease.labels.items())]


def _member(lease: Lease) -> str:
    """Return a lease as a member of sorted sets, which sorts before older leases."""
    age = 10**17 - int(lease.created_at * 1_000_000)  # falling microseconds, until the year 5138
    return f"{age:018d} {lease.id}"


def _wire(lease: Lease) -> dict[str, Any]:
    """Return a lease for the scripts, with numbers as text."""
    name, _ = ids.split_reference(lease.reference)
    names = {
        "member": _member(lease),
        "name": name,
        "reference": lease.reference,
        "capability": lease.capability,
        "subjects": _subjects(lease),
        "places": lease.places,
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
    # The set of all leases is needed only without a filter.
    return keys[1:] or keys
