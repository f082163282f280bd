"""A gateway with clients of several owners and roles, for attacks of one on another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from aenv_ray.hub.records import Role
from aenv_ray.hub.redis.server import RedisServer
from aenv_ray.project import project
from tests.contract.gateway.gateway_bench import Bench, a_gateway

SECRET = "hunter2-hunter2"
QUOTA = 200_000


@dataclass(frozen=True)
class Cast:
    """A gateway, and clients of several owners and roles."""

    bench: Bench
    alice: httpx.AsyncClient
    """Publisher; she has published helper@1.0.0, with a secret in its variables."""
    bob: httpx.AsyncClient
    """Another publisher."""
    user: httpx.AsyncClient
    """Role user, of an owner of its own."""
    admin: httpx.AsyncClient
    archive: str
    """Digest of Alice's archive."""


def archived(root: Path, name: str, version: str = "1.0.0", **deploy: Any) -> bytes:
    """Return the archive of a project."""
    directory = root / f"{name}-{version}"
    (directory / "src").mkdir(parents=True, exist_ok=True)
    config = {"name": name, "version": version, "deployConfig": {"network": "none", **deploy}}
    (directory / "config.json").write_text(json.dumps(config))
    return project.load(directory).archive()


async def push(http: httpx.AsyncClient, data: bytes) -> httpx.Response:
    """Upload an archive and publish it; return the answer that decides."""
    digest = hashlib.sha256(data).hexdigest()
    stored = await http.put(f"/artifacts/{digest}", content=data)
    if stored.status_code != 200:
        return stored
    return await http.post("/publish", json={"archive": digest})


@pytest.fixture
async def cast(tmp_path: Path, module_redis: RedisServer) -> AsyncIterator[Cast]:
    async with AsyncExitStack() as stack:
        bench = await stack.enter_async_context(a_gateway(tmp_path, redis=module_redis))
        object.__setattr__(bench.gateway.deps, "artifact_quota_bytes", QUOTA)

        async def client(role: Role, owner: str) -> httpx.AsyncClient:
            secret = await bench.token(role, owner)
            return await stack.enter_async_context(bench.client(secret))

        alice = await client(Role.PUBLISHER, "alice")
        variables = {"environmentVariables": {"KEY": SECRET}, "env": {"OLD": SECRET}}
        data = archived(tmp_path, "helper", **variables)
        assert (await push(alice, data)).status_code == 200
        yield Cast(
            bench, alice, await client(Role.PUBLISHER, "bob"), await client(Role.USER, "una"),
            await client(Role.ADMIN, "root"), hashlib.sha256(data).hexdigest(),
        )  # fmt: skip
