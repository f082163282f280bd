"""Nodes of the process and docker engines, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from aenv_ray.engines.docker import host as docker_host
from aenv_ray.hub.redis.server import RedisServer
from aenv_ray.testing.contract_bench import Bench
from tests.conftest import docker_refusal, require
from tests.contract.docker.docker_node import DockerNode
from tests.contract.engines import engine_on
from tests.contract.hub.redis_servers import running
from tests.contract.process.node import Node


@pytest.fixture(scope="module")
def walled_node() -> Iterator[Node]:
    """Yield a node whose sandboxes have namespaces."""
    node = Node("auto")
    yield node
    node.end()


@pytest.fixture(scope="module")
def open_node() -> Iterator[Node]:
    """Yield a node whose sandboxes are bare processes."""
    node = Node("none")
    yield node
    node.end()


@pytest.fixture
def own_node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """Yield a node of one test, which may break it; its parameter is the node's isolation."""
    node = Node(getattr(request, "param", "auto"))
    yield node
    node.end()


@pytest.fixture(scope="module")
def docker_node() -> Iterator[DockerNode]:
    """Yield a node with a Docker daemon; its tests are marked `docker`."""
    require("docker", not docker_refusal(), docker_refusal())
    node = DockerNode()
    yield node
    node.end()


@pytest.fixture(scope="module")
def module_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Yield a Redis of a module; a test that uses it empties it first."""
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def watched_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have hosts notice at once that their janitor is gone."""
    monkeypatch.setattr(docker_host, "WATCH_S", 0.1)


async def _bench(node: Node, directory: Path) -> AsyncIterator[Bench]:
    async with engine_on(node) as engine:
        yield Bench(engine, directory)


@pytest.fixture
async def walled(walled_node: Node, tmp_path: Path) -> AsyncIterator[Bench]:
    """Yield a bench on the shared node with namespaces; its sandboxes are stopped afterwards."""
    async for bench in _bench(walled_node, tmp_path):
        yield bench


@pytest.fixture(params=["walled", "bare"])
def either_node(request: pytest.FixtureRequest, walled_node: Node, open_node: Node) -> Node:
    """Return the shared node with namespaces, then the one without."""
    return walled_node if request.param == "walled" else open_node


@pytest.fixture
async def either(either_node: Node, tmp_path: Path) -> AsyncIterator[Bench]:
    """Yield a bench on `either_node`."""
    async for bench in _bench(either_node, tmp_path):
        yield bench
