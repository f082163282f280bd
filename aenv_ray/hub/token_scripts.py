"""The scripts that Redis runs for tokens and idempotency; `catalog_scripts` says their rules."""

from __future__ import annotations

from typing import Final

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

REPLACE_DOCUMENT: Final = """
local key = KEYS[1]..'doc:'..ARGV[1]
local kept = redis.call('HGET', key, ARGV[2])
if kept == ARGV[4] then return 1 end
if kept ~= ARGV[3] then return 0 end
redis.call('HSET', key, ARGV[2], ARGV[4])
return 1
"""
"""Arguments: kind, name, the old document, the new one. Returns whether the new one is kept; asked
again after an answer that was lost, it is."""
