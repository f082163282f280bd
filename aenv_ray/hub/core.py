"""The hub over Redis, for the hub actor and for tests without Ray."""

from __future__ import annotations

from typing import Any

from aenv_ray.hub.connection import redis_errors
from aenv_ray.hub.environments import Environments
from aenv_ray.hub.leases import Leases
from aenv_ray.hub.records import EnvironmentQuery, LeaseQuery
from aenv_ray.hub.tokens import Tokens


class HubCore(Environments, Leases, Tokens):
    """`Hub` over Redis 6.2 or newer, or Valkey; any number may share one Redis."""

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
            "redis_version": facts.get("valkey_version") or facts["redis_version"],
            "append_only": bool(facts.get("aof_enabled")),
            "memory_bytes": facts.get("used_memory", 0),
            "redis_uptime_s": facts.get("uptime_in_seconds", 0),
            "environment_versions": environments.total,
            "leases": leases.total,
        }

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()
