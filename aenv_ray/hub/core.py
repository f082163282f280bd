"""The hub over Redis: tokens, idempotency keys and documents; for the hub actor and for tests."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import aenv_ray
from aenv_ray.errors import CatalogConflict, ConfigError, Unauthorized
from aenv_ray.hub import catalog
from aenv_ray.hub.base import to_json
from aenv_ray.hub.environments import ARCHIVES, StoredEnvironments
from aenv_ray.hub.keys import AUDIT_STREAMS, LAYOUT
from aenv_ray.hub.leases import Leases
from aenv_ray.hub.records import (
    ArtifactsHeld,
    AuditRecord,
    EnvironmentQuery,
    KeyGroup,
    LeaseQuery,
    Role,
    TokenRecord,
)
from aenv_ray.hub.redis.connection import redis_errors

AUDIT_KEPT: Final = {
    "audit": 50_000, "audit:publisher": 50_000, "audit:user": 10_000, "audit:refused": 10_000,
}  # fmt: skip
"""How many records each stream keeps. What a role can do must not displace what a higher one did,
and refused attempts nothing that was done."""
MAX_AGENT_TOKENS: Final = 100
"""Number of tokens of one instance."""
LEAVING_S: Final = 600.0
"""An artifact whose deletion was interrupted can be kept again after this long."""
NONCE_S: Final = 150.0
"""An audit record is recognized for this long; `HubClient` repeats one for `AWAY_S`."""
_AUDIT_ID: Final = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")

KEEP_TOKEN: Final = """
local root = KEYS[1]
local id, hash, record, instance, expires_at, most, made_by = unpack(ARGV)
if made_by ~= '' and redis.call('HEXISTS', root..'token:records', made_by) == 0 then return -1 end
if instance ~= '' then
    local ids = redis.call('SMEMBERS', root..'token:of:'..instance)
    local others = 0
    for _, other in ipairs(ids) do
        if redis.call('HEXISTS', root..'token:records', other) == 0 then  -- it has expired
            redis.call('SREM', root..'token:of:'..instance, other)
        elseif other ~= id then
            others = others + 1
        end
    end
    if others >= tonumber(most) then return 0 end
end
redis.call('HSET', root..'token:hashes', hash, id)
redis.call('HSET', root..'token:secrets', id, hash)
redis.call('HSET', root..'token:records', id, record)
if instance ~= '' then redis.call('SADD', root..'token:of:'..instance, id) end
if expires_at ~= '' then redis.call('ZADD', root..'token:expiry', expires_at, id) end
return 1
"""
"""Arguments: token id, hash of its secret, its record, its instance or "", its expiry or "", how
many an instance may have, the token that created it or "". Returns whether it was stored; -1: the
token that created it is gone."""

FIND_TOKEN: Final = """
local id = redis.call('HGET', KEYS[1]..'token:hashes', ARGV[1])
return id and redis.call('HGET', KEYS[1]..'token:records', id)
"""
"""Argument: hash of a secret. Returns the record, or nothing."""

REVOKE_TOKEN: Final = """
local root, id, instance = KEYS[1], ARGV[1], ARGV[2]
local function remove(id, instance)
    local hash = redis.call('HGET', root..'token:secrets', id)
    if hash then redis.call('HDEL', root..'token:hashes', hash) end
    redis.call('HDEL', root..'token:records', id)
    redis.call('HDEL', root..'token:secrets', id)
    redis.call('ZREM', root..'token:expiry', id)
    if instance ~= '' then redis.call('SREM', root..'token:of:'..instance, id) end
end
local may_have_made = instance == '' and redis.call('HEXISTS', root..'token:records', id) == 1
remove(id, instance)
if may_have_made then
    for _, text in ipairs(redis.call('HVALS', root..'token:records')) do
        local record = cjson.decode(text)
        if record.made_by == id then remove(record.id, record.instance_id) end
    end
end
return 1
"""
"""Arguments: token id, its instance or "". The agent tokens that it created are revoked, too."""

_HELD: Final = """
local root = KEYS[1]
local function of(owner) return root..'artifact:of:'..owner end
local function size_of(kept) return kept and tonumber(string.match(kept, '^%S+')) or 0 end
local function held_by(owner)
    local number = redis.call('HLEN', of(owner))
    local noted = redis.call('HGET', root..'artifact:held', owner) or ''
    local bytes, counted = string.match(noted, '^(%S+) (%S+)$')
    if counted and tonumber(counted) == number then return tonumber(bytes), number end
    -- An earlier version, which notes no sums, changed them.
    bytes = 0
    for _, kept in ipairs(redis.call('HVALS', of(owner))) do bytes = bytes + size_of(kept) end
    return bytes, number
end
local function note_held(owner, bytes)
    local number = redis.call('HLEN', of(owner))
    local sums = string.format('%.0f %.0f', bytes, number)
    redis.call('HSET', root..'artifact:held', owner, sums)
end
local function remove(owner, digest)
    local kept = redis.call('HGET', of(owner), digest)
    if not kept then return end
    local bytes = held_by(owner) - size_of(kept)
    redis.call('HDEL', of(owner), digest)
    note_held(owner, bytes)
end
"""

KEEP_ARTIFACT: Final = (
    _HELD
    + """
local owner, digest = ARGV[1], ARGV[2]
local size, now, quota, most = tonumber(ARGV[3]), ARGV[4], ARGV[5], tonumber(ARGV[6])
if redis.call('EXISTS', root..'artifact:leaving:'..digest) == 1 then return {'leaving'} end
local held, number = held_by(owner)
local kept = redis.call('HGET', of(owner), digest)
held = held - size_of(kept)
if quota ~= '' and held + size > tonumber(quota) then return {'full', held, number} end
if not kept and number >= most then return {'full', held, number} end
redis.call('HSET', of(owner), digest, string.format('%.0f', size)..' '..now)
redis.call('SADD', root..'artifact:owners', owner)
note_held(owner, held + size)
return {'kept'}
"""
)
"""Arguments: owner, digest, size, now, quota or "", the largest number. Returns an outcome;
``full``: and the bytes and the number that the owner has; ``leaving``: it is being deleted."""

ARTIFACTS_HELD: Final = _HELD + "return {held_by(ARGV[1])}"
"""Argument: owner. Returns the bytes and the number of the owner's artifacts."""

ARTIFACTS_BEFORE: Final = (
    ARCHIVES
    + """
local found = {}
for _, owner in ipairs(redis.call('SMEMBERS', KEYS[1]..'artifact:owners')) do
    local kept = redis.call('HGETALL', KEYS[1]..'artifact:of:'..owner)
    for i = 1, #kept, 2 do
        local is_old = tonumber(string.match(kept[i + 1], '%S+$')) < tonumber(ARGV[1])
        if is_old and not is_published(kept[i]) then
            found[#found + 1] = kept[i]
        end
    end
end
return found
"""
)
"""Argument: a moment. Returns the digests that an owner kept before it and no version refers to."""

FORGET_ARTIFACT: Final = (
    _HELD
    + ARCHIVES
    + """
local digest, before, only, leaving_ms = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local others = 0
for _, owner in ipairs(redis.call('SMEMBERS', root..'artifact:owners')) do
    local kept = redis.call('HGET', of(owner), digest)
    if kept then
        local is_old = tonumber(string.match(kept, '%S+$')) < before
        local is_meant = owner == only or (only == '' and is_old)
        if not is_meant then others = others + 1 end
    end
end
local versions = versions_of(digest, 100)
if others == 0 and #versions == 0 then
    redis.call('SET', root..'artifact:leaving:'..digest, '1', 'PX', leaving_ms)
    return 1
end
for _, member in ipairs(versions) do
    local name = string.match(member, ' (.-)@')
    if redis.call('HGET', root..'env:owners', name) == only then return 0 end
end
-- The archive of a version stays accounted for, or nothing would collect it.
if only ~= '' and others > 0 then remove(only, digest) end
return 0
"""
)
"""Arguments: digest, a moment, an owner or "", how long nobody may keep it. Returns whether it may
be deleted."""

ARTIFACT_DELETED: Final = (
    _HELD
    + ARCHIVES
    + """
local digest = ARGV[1]
if redis.call('DEL', root..'artifact:leaving:'..digest) == 0 then return 0 end
if is_published(digest) then return 0 end  -- again: it was restored from a backup
for _, owner in ipairs(redis.call('SMEMBERS', root..'artifact:owners')) do
    remove(owner, digest)
end
return 1
"""
)
"""Argument: the digest of an artifact that may be deleted."""

RECORD: Final = """
local root, name, kept, record = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local mark, kept_ms = root..'once:audit:'..ARGV[4], ARGV[5]
if redis.call('EXISTS', mark) == 1 then return 0 end
local function is_taken(id)
    for i = 6, #ARGV do
        local stream = root..ARGV[i]
        if ARGV[i] ~= name and #redis.call('XRANGE', stream, id, id) > 0 then return true end
    end
end
local id
repeat
    if id then redis.call('XDEL', root..name, id) end
    id = redis.call('XADD', root..name, 'MAXLEN', '~', kept, '*', 'record', record)
until not is_taken(id)
redis.call('SET', mark, '1', 'PX', kept_ms)
return 1
"""
"""Arguments: the stream, number of records to keep, the record, its nonce, how long that is known,
all streams. Its id is new in all streams. Returns whether it was new."""

NOTE_LAYOUT: Final = """
local key = KEYS[1]..'layout'
local found = redis.call('GET', key)
if found then return found end
redis.call('SET', key, ARGV[1]..' '..ARGV[2])
return redis.call('GET', key)
"""
"""Arguments: `LAYOUT`, the version of aenv-ray. Returns the layout of the data, and the
version that noted it. Writes only once, because a Redis without memory or disk refuses writes."""

_IN_GROUP: Final = """
local ms, group, most = ARGV[1], KEYS[1]..'once:group:'..ARGV[2], tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if most then redis.call('ZREMRANGEBYSCORE', group, '-inf', now) end
local function is_full() return most and redis.call('ZCARD', group) >= most end
local function store(name, value)
  redis.call('SET', KEYS[1]..'once:'..name, value, 'PX', ms)
  if not most then return end
  redis.call('ZADD', group, now + ms, name)
  if redis.call('PTTL', group) < tonumber(ms) then redis.call('PEXPIRE', group, ms) end
end
"""
"""Arguments: milliseconds; a group, how many keys it may have ("": any number)."""

REMEMBER: Final = (
    _IN_GROUP
    + """
local stored = {}
for i = 4, #ARGV, 2 do
  local key = KEYS[1]..'once:'..ARGV[i]
  if redis.call('EXISTS', key) == 0 and not is_full() then store(ARGV[i], ARGV[i + 1]) end
  stored[#stored + 1] = redis.call('GET', key) or ''
end
return stored
"""
)
"""Arguments: as `_IN_GROUP`, then key and value alternating. Returns the stored values; "" if the
group is full."""

REPLACE_REMEMBERED: Final = (
    _IN_GROUP
    + """
local kept = redis.call('GET', KEYS[1]..'once:'..ARGV[4])
if kept and kept ~= ARGV[5] then return kept end
if not kept and is_full() then return '' end
store(ARGV[4], ARGV[6])
return ARGV[6]
"""
)
"""Arguments: as `_IN_GROUP`, then the key, the old value, the new one. Returns the stored value;
"" if the group is full."""

SHORTEN: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i = 3, #ARGV do
  local key = KEYS[1]..'once:'..ARGV[i]
  if redis.call('PTTL', key) > tonumber(ARGV[1]) then
    redis.call('PEXPIRE', key, ARGV[1])
    if ARGV[2] ~= '' then
      redis.call('ZADD', KEYS[1]..'once:group:'..ARGV[2], 'XX', now + ARGV[1], ARGV[i])
    end
  end
end
return 1
"""
"""Arguments: milliseconds, the group of the keys or "", then keys."""

REPLACE_DOCUMENT: Final = """
local key = KEYS[1]..'doc:'..ARGV[1]
local kept = redis.call('HGET', key, ARGV[2]) or ''
if kept == ARGV[4] then return 1 end
if kept ~= ARGV[3] then return 0 end
redis.call('HSET', key, ARGV[2], ARGV[4])
return 1
"""
"""Arguments: kind, name, the old document or "", the new one. Returns whether the new one is
stored, also when repeated after a lost answer."""

DELETE_DOCUMENT: Final = """
local key = KEYS[1]..'doc:'..ARGV[1]
if redis.call('HGET', key, ARGV[2]) ~= ARGV[3] then return 0 end
return redis.call('HDEL', key, ARGV[2])
"""
"""Arguments: kind, name, the document. Returns whether it was deleted."""


def _in_group(ttl_s: float, group: KeyGroup | None) -> tuple[str, str, str]:
    """Return the arguments of `_IN_GROUP`."""
    if not ttl_s > 0:
        raise ConfigError(f"the TTL of a remembered value must be positive, not {ttl_s:g} s")
    name, most = ("", "") if group is None else (group.name, str(group.most))
    return str(max(1, int(ttl_s * 1000))), name, most


def _stream_of(entry: AuditRecord) -> str:
    """Return the stream of an audit record: by what was done, and by whom."""
    if entry.outcome != "ok":
        return "audit:refused"
    if entry.role == Role.PUBLISHER and not entry.action.startswith("token."):
        return "audit:publisher"
    if entry.role in (Role.PUBLISHER, Role.USER, Role.AGENT):
        return "audit:user"
    return "audit"


class HubCore(StoredEnvironments, Leases):
    """`Hub` over Redis 6.2 or newer, or Valkey; any number may share one Redis."""

    async def keep_token(self, hashed: str, record: TokenRecord) -> None:  # noqa: D102
        is_kept = await self._run(
            KEEP_TOKEN,
            record.id,
            hashed,
            record.model_dump_json(),
            record.instance_id or "",
            "" if record.expires_at is None else record.expires_at,
            str(MAX_AGENT_TOKENS),
            getattr(record, "made_by", ""),  # a record of an earlier version has none
        )
        if is_kept < 0:
            raise Unauthorized(
                "the token that was to create an agent token has expired or was revoked",
                hint="use another token",
            )
        if not is_kept:
            raise CatalogConflict(
                f"instance {record.instance_id} has {MAX_AGENT_TOKENS} tokens, as many as it may",
                hint="revoke some with aenv token revoke, or create them with a TTL",
            )

    async def check_hash(self, hashed: str) -> TokenRecord | None:  # noqa: D102
        return self._valid(await self._run(FIND_TOKEN, hashed))

    async def token(self, token_id: str) -> TokenRecord | None:  # noqa: D102
        return self._valid(await self._ask("hget", self._keys.token_records, token_id))

    def _valid(self, text: str | None) -> TokenRecord | None:
        record = TokenRecord.model_validate_json(text) if text else None
        return record if record is not None and self._is_valid(record) else None

    def _is_valid(self, record: TokenRecord) -> bool:
        return record.expires_at is None or self._clock.now() < record.expires_at

    async def tokens(self, owner: str | None = None) -> tuple[TokenRecord, ...]:  # noqa: D102
        texts = await self._ask("hvals", self._keys.token_records)
        records = [TokenRecord.model_validate_json(text) for text in texts]
        mine = [r for r in records if owner in (None, r.owner) and self._is_valid(r)]
        return tuple(sorted(mine, key=lambda r: (-r.created_at, r.id)))

    async def revoke_token(self, token_id: str) -> None:  # noqa: D102
        text = await self._ask("hget", self._keys.token_records, token_id)
        instance_id = TokenRecord.model_validate_json(text).instance_id if text else None
        await self._run(REVOKE_TOKEN, token_id, instance_id or "")

    async def keep_artifact(  # noqa: D102
        self, owner: str, digest: str, size_bytes: int, quota_bytes: int | None = None
    ) -> None:
        quota = "" if quota_bytes is None else str(quota_bytes)
        now = repr(self._clock.now())
        arguments = (owner, digest, str(size_bytes), now, quota, str(catalog.MAX_ARTIFACTS))
        outcome, *facts = await self._run(KEEP_ARTIFACT, *arguments)
        if outcome == "full":
            raise catalog.artifacts_full(owner, ArtifactsHeld(*facts), size_bytes, quota_bytes)
        if outcome == "leaving":
            raise catalog.being_deleted(digest)

    async def has_artifact(self, owner: str, digest: str) -> bool:  # noqa: D102
        return bool(await self._ask("hexists", f"{self._keys.root}artifact:of:{owner}", digest))

    async def artifacts_held(self, owner: str) -> ArtifactsHeld:  # noqa: D102
        return ArtifactsHeld(*await self._run(ARTIFACTS_HELD, owner))

    async def artifacts_before(self, moment: float) -> frozenset[str]:  # noqa: D102
        return frozenset(await self._run(ARTIFACTS_BEFORE, moment))

    async def forget_artifact(  # noqa: D102
        self, digest: str, *, before: float, owner: str | None = None
    ) -> bool:
        leaving_ms = str(int(LEAVING_S * 1000))
        return bool(await self._run(FORGET_ARTIFACT, digest, before, owner or "", leaving_ms))

    async def artifact_deleted(self, digest: str) -> None:  # noqa: D102
        await self._run(ARTIFACT_DELETED, digest)

    async def artifact_stays(self, digest: str) -> None:  # noqa: D102
        await self._ask("delete", f"{self._keys.root}artifact:leaving:{digest}")

    async def remember_all(  # noqa: D102
        self, values: Mapping[str, str], ttl_s: float, group: KeyGroup | None = None
    ) -> dict[str, str]:
        pairs = [text for pair in values.items() for text in pair]
        stored = await self._run(REMEMBER, *_in_group(ttl_s, group), *pairs)
        return dict(zip(values, map(str, stored), strict=True))

    async def replace_remembered(  # noqa: D102
        self, key: str, old: str, new: str, ttl_s: float, group: KeyGroup | None = None
    ) -> str:
        return str(await self._run(REPLACE_REMEMBERED, *_in_group(ttl_s, group), key, old, new))

    async def shorten(  # noqa: D102
        self, keys: Sequence[str], ttl_s: float, group: KeyGroup | None = None
    ) -> None:
        name = "" if group is None else group.name
        await self._run(SHORTEN, str(max(1, int(ttl_s * 1000))), name, *keys)

    async def keep_record(self, entry: AuditRecord, nonce: str) -> None:  # noqa: D102
        text = entry.model_copy(update={"at": self._clock.now()}).model_dump_json(exclude={"id"})
        stream = _stream_of(entry)
        kept, nonce_ms = str(AUDIT_KEPT[stream]), str(int(NONCE_S * 1000))
        await self._run(RECORD, stream, kept, text, nonce, nonce_ms, *AUDIT_STREAMS)

    async def audit_log(  # noqa: D102
        self, limit: int, before: str | None = None
    ) -> tuple[AuditRecord, ...]:
        if before is not None and not _AUDIT_ID.fullmatch(before):
            raise ConfigError(
                f"invalid id of an audit record {before[:40]!r}", hint="pass an id of the log"
            )
        newest = "+" if before is None else f"({before}"
        rows = []
        with redis_errors(self._where):
            for stream in self._keys.audit:
                rows += await self._redis.xrevrange(stream, max=newest, count=limit)
        rows.sort(key=lambda row: tuple(map(int, row[0].split("-"))), reverse=True)
        return tuple(
            AuditRecord.model_validate_json(fields["record"]).model_copy(update={"id": number})
            for number, fields in rows[:limit]
        )

    async def put_document(  # noqa: D102
        self, kind: str, name: str, document: dict[str, Any]
    ) -> None:
        await self._ask("hset", self._keys.documents + kind, name, to_json(document))

    async def replace_document(  # noqa: D102
        self, kind: str, name: str, old: dict[str, Any] | None, new: dict[str, Any]
    ) -> bool:
        before = "" if old is None else to_json(old)
        return bool(await self._run(REPLACE_DOCUMENT, kind, name, before, to_json(new)))

    async def documents(self, kind: str) -> dict[str, dict[str, Any]]:  # noqa: D102
        rows = await self._ask("hgetall", self._keys.documents + kind)
        return {name: json.loads(text) for name, text in sorted(rows.items())}

    async def delete_document(  # noqa: D102
        self, kind: str, name: str, old: dict[str, Any] | None = None
    ) -> bool:
        if old is not None:
            return bool(await self._run(DELETE_DOCUMENT, kind, name, to_json(old)))
        await self._ask("hdel", self._keys.documents + kind, name)
        return True

    async def check_layout(self) -> None:
        """Check that this version reads the data in Redis; note the layout if there is none yet.

        Data without a note has layout 1.

        Raises:
            ConfigError: Another version of aenv-ray wrote it.
            FabricUnavailable: Redis does not answer.
        """
        note = await self._run(NOTE_LAYOUT, str(LAYOUT), aenv_ray.__version__)
        found, _, software = note.partition(" ")
        if found != str(LAYOUT):
            raise ConfigError(
                f"the hub's data in Redis at {self._where} has layout {found}, written by aenv-ray "
                f"{software}; aenv-ray {aenv_ray.__version__} reads layout {LAYOUT}",
                hint=f"install aenv-ray {software} on the head, or restore a backup of this "
                "version into a Redis or an AENV_REDIS_PREFIX that is empty",
            )

    async def renew_indexes(self) -> None:
        """Have the indexes of archives and of grants made anew at their next use.

        An earlier version of aenv-ray, which did not know them, may have changed what they find.
        """
        for name in ("archives", "granted"):
            await self._ask("delete", f"{self._keys.root}env:{name}")

    async def ping(self) -> None:
        """Check that Redis answers.

        Raises:
            FabricUnavailable: It does not.
            ConfigError: It refuses the password.
        """
        with redis_errors(self._where):
            await self._redis.ping()

    async def status(self) -> dict[str, Any]:  # noqa: D102
        with redis_errors(self._where):
            facts = await self._redis.info()
        if "redis_version" not in facts:  # a Redis Cluster: the facts of each node
            facts = next(iter(facts.values()))
        environments = await self.environments(EnvironmentQuery(limit=1))
        leases = await self.leases(LeaseQuery(limit=1))
        return {
            "redis": self._where,
            # A client of Redis takes a version of two parts for a number.
            "redis_version": str(facts.get("valkey_version") or facts["redis_version"]),
            "append_only": bool(facts.get("aof_enabled")),
            "memory_bytes": facts.get("used_memory", 0),
            "redis_uptime_s": facts.get("uptime_in_seconds", 0),
            "environment_versions": environments.total,
            "leases": leases.total,
        }

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()
