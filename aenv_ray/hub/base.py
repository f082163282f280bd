"""What the parts of `HubCore` share: Redis, keys, the clock."""

from __future__ import annotations

import base64
import binascii
import json
from abc import ABC
from collections.abc import Sequence
from typing import Any

from aenv_ray.clock import Clock, SystemClock
from aenv_ray.errors import ConfigError
from aenv_ray.hub.api import Hub
from aenv_ray.hub.connection import RedisClient, redis_errors
from aenv_ray.hub.keys import DEFAULT_PREFIX, Keys


class HubBase(Hub, ABC):
    """A part of the hub over Redis.

    Args:
        redis: A client that decodes answers, from `aenv_ray.hub.connection`.
        clock: Decides what is overdue.
        prefix: Of all keys: hubs that share a Redis differ in it.
        where: The Redis, for messages, without credentials.
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
        """Run a script and return what it does. Redis keeps scripts that it has seen compiled."""
        texts = [a if isinstance(a, str) else _number(a) for a in arguments]
        with redis_errors(self._where):
            return await self._redis.eval(script, 1, self._keys.root, *texts)

    async def _ask(self, command: str, *arguments: str) -> Any:
        """Run a command on one key and return its answer."""
        with redis_errors(self._where):
            return await getattr(self._redis, command)(*arguments)


def _number(value: float) -> str:
    """Return a number as text that loses nothing."""
    return repr(float(value))


def to_json(value: Any) -> str:
    """Return compact JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def to_cursor(member: str) -> str:
    """Return the cursor that continues after a member."""
    return base64.urlsafe_b64encode(member.encode()).decode().rstrip("=")


def from_cursor(cursor: str | None) -> str:
    """Return the member that a cursor continues after; empty for None.

    Raises:
        ConfigError: It is none of ours.
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
            f"cursor {cursor[:80]!r} is not valid",
            hint="give the cursor of the page before to the same query, or none",
        )
    return member


def listing(
    keys: Sequence[str], *, after: str, limit: int, words: Sequence[str] = (), prefix: str = ""
) -> str:
    """Return the argument of `catalog_scripts.LIST`: indexes whose members are wanted, all of them.

    Args:
        keys: Names of sorted sets, without the root.
        after: Member that the page comes after; empty: from the beginning.
        limit: Members of a page.
        words: Each begins a word of what is wanted.
        prefix: What members begin with.
    """
    # The character after a space ends what begins with a name and a space.
    low = f"[{prefix}" if prefix else "-"
    high = f"({prefix[:-1]}!" if prefix else "+"
    return to_json(
        {
            "keys": list(keys), "words": list(words), "after": after, "limit": limit,
            "low": low, "high": high,
        }
    )  # fmt: skip
