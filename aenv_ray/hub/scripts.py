"""The scripts that Redis runs for the hub: each is one operation, whole or not at all.

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
    if cjson.decode(services[i + 1]).environment == entry.reference then
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

_LEASE: Final = """
local root = KEYS[1]
local function is_live(status) return status == 'Pending' or status == 'Running' end
local function of(id) return root..'lease:one:'..id end
local function vacate(id, lease)
    redis.call('ZREM', root..'lease:deadlines', id)
    redis.call('SREM', root..'lease:live-ref:'..lease.reference, id)
    for _, subject in ipairs(lease.subjects) do
        redis.call('SREM', root..'lease:live:'..subject, id)
    end
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
    -- Whoever may call its tools through a token of its own may not any more.
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
        redis.call('SADD', root..'lease:live:'..subject, id)
    end
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
        for _, subject in ipairs(lease.subjects) do needs[subject] = (needs[subject] or 0) + 1 end
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
"""Arguments: leases as JSON, who asks, now, from which deadline on one is overdue, when to forget
it, how long a place in the queue lasts. Returns an outcome and the figures of a refusal."""

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
"""Arguments: id, what changes as JSON, when to forget it should it end. Returns the lease's fields,
nothing when there is none. What has ended stays so: a late report revives nothing."""

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
"""Arguments: ids, and the leases that take their places, as JSON."""

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
"""Arguments: ids. Returns the fields of each lease, none of those that are not there."""

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
"""Arguments: now, from which deadline on a lease is overdue, when to forget it, how many at most.
Returns how many it ended or forgot."""

KEEP_TOKEN: Final = """
local root = KEYS[1]
local id, hash, record, instance, expires_at = unpack(ARGV)
redis.call('HSET', root..'token:hashes', hash, id)
redis.call('HSET', root..'token:secrets', id, hash)
redis.call('HSET', root..'token:records', id, record)
if instance ~= '' then redis.call('SADD', root..'token:of:'..instance, id) end
if expires_at ~= '' then redis.call('ZADD', root..'token:expiry', expires_at, id) end
return 1
"""
"""Arguments: token id, hash of its secret, its record, its instance or nothing, its end or
nothing."""

FIND_TOKEN: Final = """
local id = redis.call('HGET', KEYS[1]..'token:hashes', ARGV[1])
return id and redis.call('HGET', KEYS[1]..'token:records', id)
"""
"""Argument: hash of a secret. Returns the record; nothing when there is none."""

REVOKE_TOKEN: Final = """
local root, id, instance = KEYS[1], ARGV[1], ARGV[2]
local hash = redis.call('HGET', root..'token:secrets', id)
if hash then redis.call('HDEL', root..'token:hashes', hash) end
redis.call('HDEL', root..'token:records', id)
redis.call('HDEL', root..'token:secrets', id)
redis.call('ZREM', root..'token:expiry', id)
if instance ~= '' then redis.call('SREM', root..'token:of:'..instance, id) end
return 1
"""
"""Arguments: token id, its instance or nothing."""

REMEMBER: Final = """
redis.call('SET', KEYS[1]..'once:'..ARGV[1], ARGV[2], 'NX', 'PX', ARGV[3])
return redis.call('GET', KEYS[1]..'once:'..ARGV[1])
"""
"""Arguments: key, value, milliseconds. Returns what is kept."""

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
"""Returns subject, used and limit of each quota, flat."""
