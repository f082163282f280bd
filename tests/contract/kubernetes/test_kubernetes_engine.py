"""Pods keep the contract of `aenv_ray.engines.base`: an emulated cluster really runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest

from aenv_ray.engines.base import Engine, Sandbox
from aenv_ray.engines.kubernetes.engine import KubernetesEngine
from aenv_ray.ids import HostId
from aenv_ray.testing.contract_bench import Bench, eventually
from tests.contract.kubernetes.kubernetes_node import KubernetesNode
from tests.contract.runtime_contract import RuntimeContract


@pytest.fixture(scope="module")
def cluster_node() -> Iterator[KubernetesNode]:
    with KubernetesNode() as node:
        yield node


@pytest.mark.namespaces
class TestKubernetesEngine(RuntimeContract):
    many: ClassVar[int] = 8
    starts_in_s: ClassVar[float] = 20.0
    known_gaps: ClassVar[dict[str, str]] = {
        "test_loopback_is_a_sandboxs_own": "emulated pods share this machine's network",
    }

    @pytest.fixture
    def make_engine(self, cluster_node: KubernetesNode) -> Callable[[HostId], Engine]:
        self.running_node = cluster_node
        return cluster_node.engine

    async def kill_sandbox(self, engine: Engine, sandbox: Sandbox) -> None:
        assert isinstance(engine, KubernetesEngine)
        self.running_node.cluster.kill(self.running_node.pod(sandbox.instance_id))

    def left_over(self) -> list[str]:
        return self.running_node.left_over()

    async def test_pods_are_counted_by_phase(self, bench: Bench) -> None:
        """The fabric exports them; a pod that ended counts until the API has deleted it."""
        before = sum(bench.engine.pods().values())
        sandbox = await bench.start()
        assert bench.engine.pods()["Running"] >= 1
        await bench.engine.stop([sandbox.instance_id])
        await eventually(lambda: sum(bench.engine.pods().values()) <= before, "its pod is deleted")
