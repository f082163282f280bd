"""Redis servers that tests share: one for a module, and empty for each test."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aenv_ray.hub.redis.server import RedisServer
from tests.conftest import redis_refusal, require


@contextmanager
def running(directory: Path, program: str | None = None) -> Iterator[RedisServer]:
    """Run a Redis, skip where there is none; `program` as for `RedisServer`."""
    require("redis", not redis_refusal(), redis_refusal())
    server = RedisServer(directory / "data", directory / "run", program=program, linger_s=0.0)
    asyncio.run(server.ensure())
    yield server
    asyncio.run(server.end())


async def emptied(server: RedisServer) -> RedisServer:
    """Return the server without what an earlier test kept in it."""
    client = server.connect()
    await client.flushall()
    await client.script_flush()
    await client.aclose()
    return server
