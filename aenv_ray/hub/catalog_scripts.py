"""The scripts that Redis runs for the catalog: each is one operation, whole or not at all.

Every one may run twice with the same arguments and then changes nothing the second time: a client
whose connection broke cannot know whether the first one ran. Their keys all begin with ``KEYS[1]``,
the root; see `aenv_ray.hub.keys` for what they hold. Times come as arguments, as text: Redis's own
clock decides nothing, and numbers of Lua lose digits on the way.
"""

from __future__ import annotations

from typing import Final

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

PUSH: Final = (
    _LATEST
    + """
local entry = cjson.decode(ARGV[1])
local text, state = ARGV[2], ARGV[3]
local kept = redis.call('HGET', root..'env:contents', entry.reference)
local old = redis.call('HGET', root..'env:entries', entry.reference)
if kept and kept ~= entry.content then return {old and 'published' or 'deleted'} end
if old then return {'kept', old, redis.call('HGET', root..'env:states', entry.reference)} end
redis.call('HSET', root..'env:contents', entry.reference, entry.content)
redis.call('HSET', root..'env:entries', entry.reference, text)
redis.call('HSET', root..'env:states', entry.reference, state)
redis.call('ZADD', all, 0, entry.member)
redis.call('ZADD', root..'env:in:status:'..entry.status, 0, entry.member)
for _, key in ipairs(indexes(entry)) do redis.call('ZADD', key, 0, entry.member) end
for _, word in ipairs(entry.words) do redis.call('ZADD', root..'env:words', 0, word) end
refresh_latest(entry.name)
return {'kept', text, state}
"""
)
"""Arguments: the entry's indexes as JSON, the entry, its state. Returns an outcome and what is kept
after it."""

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
"""Arguments: names as JSON, the state it has, the state it gets. Returns 0 when it has another."""

DELETE: Final = (
    _LATEST
    + """
local entry = cjson.decode(ARGV[1])
local users = redis.call('SRANDMEMBER', root..'lease:live-ref:'..entry.reference, 3)
local count = redis.call('SCARD', root..'lease:live-ref:'..entry.reference)
local services = redis.call('HGETALL', root..'doc:service')
for i = 1, #services, 2 do
    local service = cjson.decode(services[i + 1])
    local before = service.previous  -- which it may have to go back to
    if service.reference == entry.reference
            or (type(before) == 'table' and before.reference == entry.reference) then
        count = count + 1
        users[#users + 1] = 'service '..services[i]
    end
end
if count > 0 then return {count, unpack(users)} end
local state = redis.call('HGET', root..'env:states', entry.reference)
if not state then return {0} end
redis.call('HDEL', root..'env:entries', entry.reference)
redis.call('HDEL', root..'env:states', entry.reference)
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
"""Argument: the entry's indexes as JSON. Returns how many use it, and the names of some."""

LIST: Final = """
local root = KEYS[1]
local query = cjson.decode(ARGV[1])
local keys, groups = {}, {}
for _, key in ipairs(query.keys) do keys[#keys + 1] = root..key end
for _, word in ipairs(query.words) do
    local group = {}
    for _, found in ipairs(
        redis.call('ZRANGEBYLEX', root..'env:words', '['..word, '['..word..'\\255')
    ) do group[#group + 1] = root..'env:in:word:'..found end
    if #group == 0 then return {0} end
    if #group == 1 then keys[#keys + 1] = group[1] else groups[#groups + 1] = group end
end
local wanted = query.limit + 1
if #keys == 1 and #groups == 0 then
    local total = redis.call('ZLEXCOUNT', keys[1], query.low, query.high)
    local from = query.after ~= '' and '('..query.after or query.low
    return {total, unpack(
        redis.call('ZRANGEBYLEX', keys[1], from, query.high, 'LIMIT', 0, wanted)
    )}
end
-- Nothing is stored for an intersection: what reads would otherwise be written to disk.
local found = redis.call('ZINTER', #keys, unpack(keys))
for _, group in ipairs(groups) do
    local known, rest = {}, {}
    for _, key in ipairs(group) do
        for _, member in ipairs(redis.call('ZRANGE', key, 0, -1)) do known[member] = true end
    end
    for _, member in ipairs(found) do
        if known[member] then rest[#rest + 1] = member end
    end
    found = rest
end
local begin = query.low ~= '-' and string.sub(query.low, 2) or ''
local total, page = 0, {}
for _, member in ipairs(found) do
    if string.sub(member, 1, #begin) == begin then
        total = total + 1
        if member > query.after and #page < wanted then page[#page + 1] = member end
    end
end
return {total, unpack(page)}
"""
"""Argument: the query as JSON. Returns the size of the listing and the members of a page, one more
than its limit when there is one."""
