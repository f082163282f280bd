"""The scripts that Redis runs for leases and quotas; `catalog_scripts` says their rules."""

from __future__ import annotations

from typing import Final

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
