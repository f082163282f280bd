"""Published environments in Redis."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable
from typing import Any, Final

from aenv_ray import ids
from aenv_ray.errors import (
    ArtifactQuotaExceeded,
    CatalogConflict,
    ConfigError,
    EnvironmentInUse,
    EnvironmentNotFound,
    VersionConflict,
)
from aenv_ray.hub import catalog
from aenv_ray.hub.base import LIST, HubBase, from_cursor, listing, to_cursor, to_json
from aenv_ray.hub.records import (
    EVERYBODY,
    EnvironmentQuery,
    EnvironmentStatus,
    EnvironmentVersion,
    NameRecord,
    Page,
    Right,
)

_ONLY_STATE = frozenset({"status", "updated_at"})
_SCANNED: Final = 1000
"""Members that a listing for one owner reads at once."""
_SOME_VERSIONS: Final = 100
"""Versions of one archive, which is of one version unless somebody publishes without its config."""
_NAMED_VERSIONS = 5
"""Number of versions that a hint names."""
MAX_OWNER_BYTES: Final = 256 * 1024 * 1024
"""Total size of the entries of one owner, which are in the memory of Redis."""
MAX_OWNER_CHARACTERS: Final = 200
"""Longest name of an owner to whom something is granted."""
MAX_GRANTS: Final = 2000
"""Number of grants for all names of one owner."""
DELETED_BYTES: Final = 512
"""Size that a deleted version counts with: Redis keeps its reference and its content's digest."""
MAX_ENTRY_BYTES: Final = 1024 * 1024
"""Largest entry of a version, which every listing reads."""


_LATEST: Final = """
local root = KEYS[1]
local all, latest, failed = root..'env:in:all', root..'env:in:latest', root..'env:in:status:Failed'
local function refresh_latest(name)
    local start, high, best = '['..name..' ', '('..name..'!', nil
    while not best do
        local some = redis.call('ZRANGEBYLEX', all, start, high, 'LIMIT', 0, 64)
        for _, member in ipairs(some) do
            if not redis.call('ZSCORE', failed, member) then best = member; break end
        end
        if #some < 64 then break end
        start = '('..some[#some]
    end
    redis.call('ZREMRANGEBYLEX', latest, '['..name..' ', high)
    if best then redis.call('ZADD', latest, 0, best) end
end
local function indexes(entry)
    local found = {}
    for _, tag in ipairs(entry.tags) do found[#found + 1] = root..'env:in:tag:'..tag end
    for _, word in ipairs(entry.words) do found[#found + 1] = root..'env:in:word:'..word end
    return found
end
"""

_GRANTS: Final = """
local grants, granted = KEYS[1]..'env:grants', KEYS[1]..'env:granted'
if redis.call('ZCARD', granted) ~= redis.call('HLEN', grants) then
    redis.call('DEL', granted)
    for _, field in ipairs(redis.call('HKEYS', grants)) do redis.call('ZADD', granted, 0, field) end
end
local function grant(field, right)
    redis.call('HSET', grants, field, right)
    redis.call('ZADD', granted, 0, field)
end
local function revoke(field)
    redis.call('HDEL', grants, field)
    redis.call('ZREM', granted, field)
end
"""

NAME: Final = (
    _GRANTS
    + """
local found = {redis.call('HGET', KEYS[1]..'env:owners', ARGV[1]) or ''}
local low, high = '['..ARGV[1]..' ', '('..ARGV[1]..'!'
for _, field in ipairs(redis.call('ZRANGEBYLEX', granted, low, high)) do
    local right = redis.call('HGET', grants, field)
    if right then
        found[#found + 1] = string.sub(field, #ARGV[1] + 2)
        found[#found + 1] = right
    end
end
return found
"""
)
"""Argument: name. Returns its recorded owner or "", and then owner and right of each grant."""

GRANT: Final = (
    _GRANTS
    + """
local name, owner, of_all, subject, right, most = unpack(ARGV)
local owners = KEYS[1]..'env:owners'
local recorded = redis.call('HGET', owners, name)
if recorded and recorded ~= owner then return {'moved'} end
local field = name..' '..subject
if right ~= '' and redis.call('HEXISTS', grants, field) == 0 then
    local given, is_mine = 0, {[name] = true}
    for _, other in ipairs(redis.call('HKEYS', grants)) do
        local of = string.match(other, '^%S+')
        if is_mine[of] == nil then is_mine[of] = redis.call('HGET', owners, of) == owner end
        if is_mine[of] then given = given + 1 end
    end
    if given >= tonumber(most) then return {'full', given} end
end
if not recorded then
    redis.call('HSET', owners, name, owner)
    if of_all ~= '' then grant(name..' *', of_all) end
end
if right == '' then revoke(field) else grant(field, right) end
return {'kept'}
"""
)
"""Arguments: name, its owner, what everybody is granted with a new record, or "", to whom what is
granted, or "" to revoke it, how many grants an owner may give. Returns an outcome; ``moved``: the
name has got another owner; ``full``: and the number of grants that the owner has given."""

PUSH: Final = (
    _LATEST
    + _GRANTS
    + """
local entry = cjson.decode(ARGV[1])
local text, state, owner, expected, of_all, most, deleted = unpack(ARGV, 2)
if (redis.call('HGET', root..'env:owners', entry.name) or '') ~= expected then return {'moved'} end
local kept = redis.call('HGET', root..'env:contents', entry.reference)
local old = redis.call('HGET', root..'env:entries', entry.reference)
if kept and kept ~= entry.content then return {old and 'published' or 'deleted'} end
if redis.call('EXISTS', root..'artifact:leaving:'..entry.archive) == 1 then return {'leaving'} end
local held = tonumber(redis.call('HGET', root..'env:bytes', entry.owner) or 0)
if not old and entry.owner ~= '' then
    local size = kept and #text - tonumber(deleted) or #text
    if held + size > tonumber(most) then return {'full', tostring(held)} end
    redis.call('HSET', root..'env:bytes', entry.owner, math.max(0, held + size))
end
if expected == '' and owner ~= '' then
    redis.call('HSET', root..'env:owners', entry.name, owner)
    if of_all ~= '' then grant(entry.name..' *', of_all) end
end
if old then return {'kept', old, redis.call('HGET', root..'env:states', entry.reference)} end
redis.call('HSET', root..'env:contents', entry.reference, entry.content)
redis.call('HSET', root..'env:entries', entry.reference, text)
redis.call('HSET', root..'env:states', entry.reference, state)
redis.call('ZADD', root..'env:archives', 0, entry.archive..' '..entry.reference)
redis.call('ZADD', all, 0, entry.member)
redis.call('ZADD', root..'env:in:status:'..entry.status, 0, entry.member)
for _, key in ipairs(indexes(entry)) do redis.call('ZADD', key, 0, entry.member) end
for _, word in ipairs(entry.words) do redis.call('ZADD', root..'env:words', 0, word) end
refresh_latest(entry.name)
return {'kept', text, state}
"""
)
"""Arguments: the entry's indexes as JSON, the entry, its state, the owner of its name, the recorded
owner or "", what everybody is granted with a new record, or "", how many bytes of entries an owner
may have, and the bytes that a deleted version counts with. Returns an outcome, and then the stored
entry and state; ``moved``: the name has got another owner; ``full``: the owner's entries would
exceed the limit; then the bytes they have."""

SET_STATE: Final = (
    _LATEST
    + """
local entry = cjson.decode(ARGV[1])
local old, new = ARGV[2], ARGV[3]
if redis.call('HGET', root..'env:states', entry.reference) ~= old then return 0 end
redis.call('HSET', root..'env:states', entry.reference, new)
redis.call('ZREM', root..'env:in:status:'..entry.old_status, entry.member)
redis.call('ZADD', root..'env:in:status:'..entry.status, 0, entry.member)
refresh_latest(entry.name)
return 1
"""
)
"""Arguments: names as JSON, the expected state, the new state. Returns 0 if the state differs."""

DELETE: Final = (
    _LATEST
    + """
local entry = cjson.decode(ARGV[1])
local users = redis.call('SRANDMEMBER', root..'lease:live-ref:'..entry.reference, 3)
local count = redis.call('SCARD', root..'lease:live-ref:'..entry.reference)
local services = redis.call('HGETALL', root..'doc:service')
for i = 1, #services, 2 do
    local service = cjson.decode(services[i + 1])
    local before = service.previous  -- to which it may be rolled back
    if service.reference == entry.reference
            or (type(before) == 'table' and before.reference == entry.reference) then
        count = count + 1
        users[#users + 1] = 'service '..services[i]
    end
end
if count > 0 then return {count, unpack(users)} end
local state = redis.call('HGET', root..'env:states', entry.reference)
if not state then return {0} end
local size = redis.call('HSTRLEN', root..'env:entries', entry.reference)
local held = tonumber(redis.call('HGET', root..'env:bytes', entry.owner) or 0)
local left = math.max(0, held - size + tonumber(ARGV[2]))
if entry.owner ~= '' then redis.call('HSET', root..'env:bytes', entry.owner, left) end
redis.call('HDEL', root..'env:entries', entry.reference)
redis.call('HDEL', root..'env:states', entry.reference)
redis.call('ZREM', root..'env:archives', entry.archive..' '..entry.reference)
redis.call('ZREM', all, entry.member)
redis.call('ZREM', root..'env:in:status:'..string.match(state, '^%S+'), entry.member)
for _, key in ipairs(indexes(entry)) do redis.call('ZREM', key, entry.member) end
for _, word in ipairs(entry.words) do
    if redis.call('EXISTS', root..'env:in:word:'..word) == 0 then
        redis.call('ZREM', root..'env:words', word)
    end
end
refresh_latest(entry.name)
return {0}
"""
)
"""Arguments: the entry's indexes as JSON, the bytes that a deleted version counts with. Returns the
number of users, and the names of some."""

ARCHIVES: Final = """
local entries, archives = KEYS[1]..'env:entries', KEYS[1]..'env:archives'
if redis.call('ZCARD', archives) ~= redis.call('HLEN', entries) then
    redis.call('DEL', archives)
    for _, reference in ipairs(redis.call('HKEYS', entries)) do
        -- The archive comes before all that a publisher writes.
        local text = redis.call('HGET', entries, reference)
        local archive = string.match(text, '"archive":"([^"]*)"')
        redis.call('ZADD', archives, 0, archive..' '..reference)
    end
end
local function versions_of(digest, most)
    local low, high = '['..digest..' ', '('..digest..'!'
    return redis.call('ZRANGEBYLEX', archives, low, high, 'LIMIT', 0, most)
end
local function is_published(digest) return #versions_of(digest, 1) > 0 end
"""

VERSIONS_OF_ARCHIVE: Final = ARCHIVES + "return versions_of(ARGV[1], ARGV[2])"
"""Arguments: digest, how many at most. Returns members of the index of archives."""


class StoredEnvironments(HubBase, ABC):
    """Versions: written once, found by name, version, tag, word and status."""

    async def push(  # noqa: D102
        self, entry: EnvironmentVersion, *, is_admin: bool = False
    ) -> EnvironmentVersion:
        ids.split_reference(entry.reference)
        now = self._clock.now()
        entry = entry.model_copy(update={"created_at": now, "updated_at": now})
        text = entry.model_dump_json(exclude=set(_ONLY_STATE))
        if len(text) > MAX_ENTRY_BYTES:
            raise ConfigError(
                f"config.json of {entry.reference} and the schemas of its functions are "
                f"{len(text):,} characters long, more than the limit of {MAX_ENTRY_BYTES:,}",
                hint="move long texts to files of the project",
            )
        indexes = to_json({**_indexes(entry), "content": catalog.version_digest(entry)})
        outcome, kept = "moved", [""]
        while outcome == "moved":
            recorded = await self._ask("hget", self._keys.owners, entry.name) or ""
            known = await self.name(entry.name)
            catalog.check_may_publish(known, entry.owner, is_admin=is_admin)
            owner = known.owner or entry.owner or ""
            grant = "" if recorded else known.grants.get(EVERYBODY, "")
            state = _state(entry.status, now)
            outcome, *kept = await self._run(
                PUSH, indexes, text, state, owner, recorded, grant, str(MAX_OWNER_BYTES),
                str(DELETED_BYTES),
            )  # fmt: skip
        if outcome == "full":
            raise ArtifactQuotaExceeded(
                f"the configs and schemas of {entry.owner}'s versions have {int(kept[0]) >> 20} of "
                f"{MAX_OWNER_BYTES >> 20} MiB: there is no room for {entry.reference}",
                hint="delete versions that are no longer used",
            )
        if outcome == "leaving":
            raise catalog.being_deleted(entry.archive)
        if outcome != "kept":
            was = "is published" if outcome == "published" else "was published, and deleted,"
            raise VersionConflict(
                f"{entry.reference} {was} with different content",
                hint="a published version never changes: set a new version in config.json",
            )
        return _entry(*kept)

    async def name(self, name: str) -> NameRecord:  # noqa: D102
        owner, *rest = await self._run(NAME, ids.check_environment_name(name))
        if not owner:
            return await self._unrecorded(name)
        grants = zip(rest[::2], map(Right, rest[1::2]), strict=True)
        return NameRecord(name=name, owner=owner, grants=dict(grants))

    async def _unrecorded(self, name: str) -> NameRecord:
        """Return the record of a name that was published before names had owners, or never."""
        known = [entry for entry in await self.versions(name) if entry.owner is not None]
        if not known:
            return NameRecord(name=name, owner=None)
        first = min(known, key=lambda entry: entry.created_at)
        return NameRecord(name=name, owner=first.owner, grants={EVERYBODY: Right.USE})

    async def grant(self, name: str, owner: str, right: Right | None) -> None:  # noqa: D102
        if right is not None and len(owner) > MAX_OWNER_CHARACTERS:
            raise ConfigError(
                f"the owner {owner[:80]!r} has {len(owner):,} characters, more than the limit of "
                f"{MAX_OWNER_CHARACTERS}",
                hint="grant to the owner of a token, or to * for everybody",
            )
        outcome = "moved"
        while outcome == "moved":
            record = await self.name(name)
            if record.owner is None:
                raise await self._not_found(name, None)
            outcome, *given = await self._run(
                GRANT, name, record.owner, record.grants.get(EVERYBODY, ""), owner, right or "",
                str(MAX_GRANTS),
            )  # fmt: skip
            if outcome == "full":
                raise CatalogConflict(
                    f"{record.owner} has given {given[0]:,} grants, and may give {MAX_GRANTS:,}",
                    hint="revoke some, or grant to * for everybody",
                )

    async def environment(  # noqa: D102
        self, name: str, version: str | None = None
    ) -> EnvironmentVersion:
        ids.split_reference(name if version is None else f"{name}@{version}")
        if version is None:
            page = await self._page(["env:in:latest"], EnvironmentQuery(name=name, limit=1))
            if page.items:
                return page.items[0]
            raise await self._not_found(name, None)
        found = await self._find(f"{name}@{version}")
        if found is None:
            raise await self._not_found(name, version)
        return found

    async def environments(self, query: EnvironmentQuery) -> Page[EnvironmentVersion]:  # noqa: D102
        if query.name is not None:
            ids.check_environment_name(query.name)
        keys = ["env:in:latest" if query.latest_only else "env:in:all"]
        if query.status is not None:
            keys.append(f"env:in:status:{query.status}")
        if query.tag is not None:
            keys.append(f"env:in:tag:{query.tag}")
        return await self._page(keys, query)

    async def set_status(  # noqa: D102
        self, name: str, version: str, status: EnvironmentStatus
    ) -> EnvironmentVersion:
        while True:  # repeats only if somebody else has changed the status in between
            entry = await self.environment(name, version)
            catalog.check_transition(entry.reference, entry.status, status)
            if entry.status is status:
                return entry
            now = self._clock.now()
            names = {
                "name": name, "reference": entry.reference, "status": status,
                "member": catalog.member(name, version), "old_status": entry.status,
            }  # fmt: skip
            old = _state(entry.status, entry.updated_at)
            if await self._run(SET_STATE, to_json(names), old, _state(status, now)):
                return entry.model_copy(update={"status": status, "updated_at": now})

    async def delete_environment(self, name: str, version: str) -> None:  # noqa: D102
        entry = await self.environment(name, version)
        count, *users = await self._run(DELETE, to_json(_indexes(entry)), str(DELETED_BYTES))
        if count:
            more = " and others" if count > len(users) else ""
            raise EnvironmentInUse(
                f"{entry.reference} is in use by {', '.join(sorted(users))}{more}",
                hint="delete them first: aenv instance delete, aenv service delete",
            )

    async def versions_of_archive(self, digest: str) -> tuple[str, ...]:  # noqa: D102
        found = await self._run(VERSIONS_OF_ARCHIVE, digest, str(_SOME_VERSIONS))
        return tuple(member.partition(" ")[2] for member in found)

    async def _find(self, reference: str) -> EnvironmentVersion | None:
        rows = await self._read([reference])
        return rows[0] if rows else None

    async def _read(self, references: list[str]) -> list[EnvironmentVersion]:
        """Return the existing ones of these versions, in order."""
        if not references:
            return []
        # States are read second: a version deleted in between has none and is left out.
        texts = await self._ask("hmget", self._keys.entries, *references)
        states = await self._ask("hmget", self._keys.states, *references)
        rows = zip(texts, states, strict=True)
        return [_entry(text, state) for text, state in rows if text and state]

    async def _page(self, keys: list[str], query: EnvironmentQuery) -> Page[EnvironmentVersion]:
        after = from_cursor(query.cursor)
        begin = f"{query.name} " if query.name is not None else ""
        if after and not after.startswith(begin):
            raise ConfigError(
                "the cursor belongs to another query",
                hint="pass a cursor only to the query that returned it",
            )
        words = catalog.words_of(query.text or "")[: catalog.MAX_SEARCH_WORDS]
        if query.visible_to is None:
            argument = listing(keys, after=after, limit=query.limit, words=words, prefix=begin)
            total, *members = await self._run(LIST, argument)
        else:
            visible = await self._visible(keys, words, begin, query.visible_to)
            total = len(visible)
            members = [member for member in visible if member > after]
        page = members[: query.limit]
        items = await self._read([catalog.member_reference(member) for member in page])
        cursor = to_cursor(page[-1]) if len(members) > query.limit else None
        return Page(items=tuple(items), cursor=cursor, total=total)

    async def _visible(
        self, keys: list[str], words: list[str], prefix: str, owner: str
    ) -> list[str]:
        """Return the members of a listing whose names an owner may use, in order."""
        found: list[str] = []
        after = ""
        while True:
            argument = listing(keys, after=after, limit=_SCANNED, words=words, prefix=prefix)
            _, *members = await self._run(LIST, argument)
            some = {member: member.partition(" ")[0] for member in members[:_SCANNED]}
            usable = await self._usable(dict.fromkeys(some.values()), owner)
            found += [member for member, name in some.items() if name in usable]
            if len(members) <= _SCANNED:
                return found
            after = members[_SCANNED - 1]

    async def _usable(self, names: Iterable[str], owner: str) -> set[str]:
        """Return those of some names whose environments an owner may use."""
        asked = list(names)
        if not asked:
            return set()
        owners = await self._ask("hmget", self._keys.owners, *asked)
        fields = [f"{name} {to}" for name in asked for to in (owner, EVERYBODY)]
        rights = await self._ask("hmget", self._keys.grants, *fields)
        rows = zip(asked, owners, rights[::2], rights[1::2], strict=True)
        return {name for name, of, *given in rows if of in (None, owner) or any(given)}

    async def _not_found(self, name: str, version: str | None) -> EnvironmentNotFound:
        """Return the error, with a hint that names existing versions."""
        page = await self.environments(EnvironmentQuery(name=name, limit=_NAMED_VERSIONS))
        if not page.items:
            return catalog.unpublished(name)
        known = ", ".join(entry.version for entry in page.items)
        more = ", …" if page.cursor else ""
        if version is None:
            return EnvironmentNotFound(
                f"all versions of environment {name!r} have status Failed",
                hint=f"versions: {known}{more}",
            )
        return EnvironmentNotFound(
            f"environment {name!r} has no version {version!r}", hint=f"versions: {known}{more}"
        )


def _indexes(entry: EnvironmentVersion) -> dict[str, Any]:
    """Return the indexes of an entry."""
    return {
        "name": entry.name,
        "reference": entry.reference,
        "member": catalog.member(entry.name, entry.version),
        "status": entry.status,
        "owner": entry.owner or "",
        "archive": entry.archive,
        "tags": list(entry.tags),
        "words": catalog.search_words(entry),
    }


def _state(status: EnvironmentStatus, updated_at: float) -> str:
    return f"{status} {updated_at!r}"


def _entry(text: str, state: str) -> EnvironmentVersion:
    status, updated_at = state.split(" ")
    entry = EnvironmentVersion.model_validate_json(text)
    return entry.model_copy(
        update={"status": EnvironmentStatus(status), "updated_at": float(updated_at)}
    )
