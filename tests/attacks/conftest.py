"""Nodes to attack: of the process engine, of the docker engine, of both in turn, and with pods.

The nodes and `walled`, a bench on a process node with namespaces, are those of the contract tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from aenv_ray.testing.contract_bench import Bench
from tests.attacks.owners import cast
from tests.contract.conftest import docker_node, module_redis, own_node, walled, walled_node
from tests.contract.docker.docker_node import DockerNode
from tests.contract.engines import engine_on
from tests.contract.kubernetes.kubernetes_node import KubernetesNode

__all__ = [
    "cast",
    "docker_node",
    "dockered",
    "either_engine",
    "module_redis",
    "own_node",
    "pods",
    "walled",
    "walled_node",
]


@pytest.fixture
async def dockered(docker_node: DockerNode, tmp_path: Path) -> AsyncIterator[Bench]:
    """Yield a bench on the shared docker node; its sandboxes are stopped afterwards."""
    async with engine_on(docker_node) as engine:
        yield Bench(engine, tmp_path)


@pytest.fixture(scope="module")
def pods() -> Iterator[KubernetesNode]:
    """Yield an emulated Kubernetes."""
    with KubernetesNode() as node:
        yield node


@pytest.fixture(
    params=[
        pytest.param("walled", marks=pytest.mark.namespaces, id="process"),
        pytest.param("dockered", marks=pytest.mark.docker, id="docker"),
    ]
)
def either_engine(request: pytest.FixtureRequest) -> Bench:
    """Return a bench of the process engine, then one of the docker engine."""
    bench: Bench = request.getfixturevalue(request.param)
    return bench
