"""What the parts of `HubCore` share: the Redis client, the keys, the clock, paged listings.

Each operation of the hub is one Lua script (or one command), so that it takes effect as a whole or
not at all. A client whose connection broke cannot know whether its script ran, so each script may
run twice with the same arguments and changes nothing the second time. All keys of a script begin
with ``KEYS[1]``, the root; `aenv_ray.hub.keys` says what they hold. Times are arguments, passed as
text: Redis's clock decides nothing, and Lua's numbers lose digits.
"""

from __future__ import annotations

import base64
import binascii
import json
from abc import ABC
from collections.abc import Awaitable, Sequence
from typing import Any, Final

from redis.exceptions import ResponseError

from aenv_ray.clock import Clock, SystemClock
from aenv_ray.errors import ConfigError
from aenv_ray.hub.api import Hub
from aenv_ray.hub.keys import DEFAULT_PREFIX, Keys
from aenv_ray.hub.redis.connection import RedisClient, leave_replica, redis_errors

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
-- ZINTER stores nothing; ZINTERSTORE would write each listing to disk.
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
"""Argument: the query as JSON. Returns the size of the whole listing and the members of a page,
plus one more member if there is another page."""


class HubBase(Hub, ABC):
    """A part of the hub over Redis.

    Args:
        redis: A client from `aenv_ray.hub.redis.connection`.
        clock: Clock for deadlines.
        prefix: Prefix of all keys, different for hubs that share a Redis.
        where: The address of Redis for messages, without credentials.
    """

    def __init__(
        self,
        redis: RedisClient,
        clock: Clock | None = None,
        *,
        prefix: str = DEFAULT_PREFIX,
        where: str = "AENV_REDIS_URL",
    ) -> None:
        self._redis = redis
        self._clock = clock or SystemClock()
        self._keys = Keys(prefix)
        self._where = where

    async def _run(self, script: str, *arguments: str | float) -> Any:
        """Run a script and return its result; Redis caches compiled scripts."""
        texts = [a if isinstance(a, str) else _number(a) for a in arguments]
        return await self._answer(self._redis.eval(script, 1, self._keys.root, *texts))

    async def _ask(self, command: str, *arguments: str) -> Any:
        """Run a command on one key and return its result."""
        return await self._answer(getattr(self._redis, command)(*arguments))

    async def _answer(self, command: Awaitable[Any]) -> Any:
        with redis_errors(self._where):
            try:
                return await command
            except ResponseError as exc:
                await leave_replica(self._redis, exc)
                raise


def _number(value: float) -> str:
    """Return a number as text without loss of precision."""
    return repr(float(value))


def to_json(value: Any) -> str:
    """Return compact JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def to_cursor(member: str) -> str:
    """Return the cursor of the page after a member."""
    return base64.urlsafe_b64encode(member.encode()).decode().rstrip("=")


def from_cursor(cursor: str | None) -> str:
    """Return the member after which the page of a cursor begins; empty for None.

    Raises:
        ConfigError: The cursor is invalid.
    """
    if cursor is None:
        return ""
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        member = base64.b64decode(padded, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        member = ""
    if not member:
        raise ConfigError(
            f"invalid cursor {cursor[:80]!r}",
            hint="pass the cursor of the previous page of the same query, or none",
        )
    return member


def listing(
    keys: Sequence[str], *, after: str, limit: int, words: Sequence[str] = (), prefix: str = ""
) -> str:
    """Return the argument of `LIST`, which lists members that are in all of several indexes.

    Args:
        keys: Names of sorted sets, without the root.
        after: The page begins after this member; empty: at the start.
        limit: Size of a page.
        words: Each must begin a word of the entry.
        prefix: Members must begin with this.
    """
    # "!" follows the space: this bounds all members that begin with a name and a space.
    low = f"[{prefix}" if prefix else "-"
    high = f"({prefix[:-1]}!" if prefix else "+"
    return to_json(
        {
            "keys": list(keys), "words": list(words), "after": after, "limit": limit,
            "low": low, "high": high,
        }
    )  # fmt: skip
