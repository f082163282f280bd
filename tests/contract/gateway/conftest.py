"""A gateway in this process for each test, and clients of some owners."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from aenv_ray.actors.calls import local_door
from aenv_ray.config import Settings
from aenv_ray.hub.records import Role
from aenv_ray.hub.redis.server import RedisServer
from tests.contract.gateway.gateway_bench import Bench, a_gateway


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that wants to be introduced to a sandbox names its session of Ray."""
    monkeypatch.setattr(local_door, "settings", lambda: Settings(local_door=False))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
async def bench(root: Path, module_redis: RedisServer) -> AsyncIterator[Bench]:
    async with a_gateway(root, redis=module_redis) as made:
        yield made


@pytest.fixture
async def ann(bench: Bench) -> AsyncIterator[httpx.AsyncClient]:
    async with bench.owner("ann") as http:
        yield http


@pytest.fixture
async def bob(bench: Bench) -> AsyncIterator[httpx.AsyncClient]:
    async with bench.owner("bob") as http:
        yield http


@pytest.fixture
async def admin(bench: Bench) -> AsyncIterator[httpx.AsyncClient]:
    async with bench.client(await bench.token(Role.ADMIN, "root")) as http:
        yield http
