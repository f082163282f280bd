"""Storage that outlives pods: claims of the emulated API, and pods that really mount them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from aenv_ray.engines.kubernetes.permissions import Access
from aenv_ray.errors import ConfigError, FabricUnavailable
from aenv_ray.testing.contract_bench import Bench, eventually
from tests.contract.kubernetes.kubernetes_node import KubernetesNode
from tests.contract.kubernetes.test_kubernetes import engine_on
from tests.contract.process.test_storage import SOURCE, a_storage, said

pytestmark = pytest.mark.namespaces
CLAIMS = "persistentvolumeclaims"
WITHIN_S = 60.0


@pytest.fixture
def own_node() -> Iterator[KubernetesNode]:
    with KubernetesNode() as node:
        yield node


@pytest.fixture
async def bench(own_node: KubernetesNode, tmp_path: Path) -> AsyncIterator[Bench]:
    fast = {"metadata": {"name": "fast"}, "allowVolumeExpansion": True}
    own_node.cluster.create("storageclasses", fast, "storage.k8s.io", namespace="")
    async with engine_on(own_node, storage_class="fast") as engine:
        yield Bench(engine, tmp_path)


def keeper(bench: Bench) -> Path:
    return bench.project({"tools.py": SOURCE}, {"deployConfig": {"network": "none"}})


def waiting(node: KubernetesNode) -> list[str]:
    """Return why pods wait for a node."""
    conditions = [
        condition
        for pod in node.cluster.objects("pods")
        for condition in pod.get("status", {}).get("conditions", ())
    ]
    return [str(c["message"]) for c in conditions if c["status"] == "False"]


async def test_a_claim_outlives_the_pods_that_mount_it(
    own_node: KubernetesNode, bench: Bench
) -> None:
    storage, project = a_storage(), keeper(bench)
    first = await bench.start(project, storage=storage)
    assert await said(first, "note", text="one") == "start\none\n"
    (claim,) = own_node.cluster.objects(CLAIMS)
    assert claim["spec"]["accessModes"] == ["ReadWriteOncePod"]
    assert claim["spec"]["resources"]["requests"] == {"storage": "1Gi"}
    assert claim["spec"]["storageClassName"] == "fast"
    assert claim["metadata"]["labels"]["aenv-ray.io/storage"] == storage.uid
    assert "ownerReferences" not in claim["metadata"]

    await bench.engine.stop([first.instance_id])
    larger = storage.model_copy(update={"is_made": True, "size_bytes": 2 << 30})
    second = await bench.start(project, storage=larger)
    assert await said(second, "at_start") == "start\none\nstart\n"
    (claim,) = own_node.cluster.objects(CLAIMS)
    assert claim["spec"]["resources"]["requests"] == {"storage": "2Gi"}
    assert storage.name in second.isolation.limits["kept"]
    # What owns pods takes them with it, and no claim.
    own_node.cluster.delete("pods", "ray-worker-1")
    await eventually(lambda: not own_node.cluster.running(), "the pods are gone", WITHIN_S)
    assert len(own_node.cluster.objects(CLAIMS)) == 1


async def test_a_second_pod_waits_for_the_first_ones_end(
    own_node: KubernetesNode, bench: Bench
) -> None:
    storage, project = a_storage(), keeper(bench)
    first = await bench.start(project, storage=storage)
    later = asyncio.create_task(bench.start(project, storage=storage))
    await eventually(lambda: waiting(own_node), "the second waits", WITHIN_S)
    assert "ReadWriteOncePod" in waiting(own_node)[0]
    assert await said(first, "note", text="one") == "start\none\n"
    await bench.engine.stop([first.instance_id])
    assert await said(await later, "at_start") == "start\none\nstart\n"


async def test_many_pods_mount_a_shared_claim(own_node: KubernetesNode, bench: Bench) -> None:
    storage, project = a_storage(is_shared=True), keeper(bench)
    one, two = [await bench.start(project, storage=storage) for _ in range(2)]
    await said(one, "note", text="one")
    assert await said(two, "note", text="two") == "start\nstart\none\ntwo\n"
    (claim,) = own_node.cluster.objects(CLAIMS)
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    alone = storage.model_copy(update={"is_shared": False})
    with pytest.raises(ConfigError, match="created with access ReadWriteMany"):
        await bench.start(project, storage=alone)


async def test_a_claim_is_deleted_by_its_owner_alone(
    own_node: KubernetesNode, bench: Bench
) -> None:
    storage, project = a_storage(), keeper(bench)
    sandbox = await bench.start(project, storage=storage)
    another = storage.model_copy(update={"uid": "0" * 16})
    await bench.engine.delete_storage(another)
    with pytest.raises(FabricUnavailable, match="not the one"):
        await bench.start(project, storage=another)
    deleting = asyncio.create_task(bench.engine.delete_storage(storage))

    def is_leaving() -> bool:
        return "deletionTimestamp" in own_node.cluster.objects(CLAIMS)[0]["metadata"]

    await eventually(is_leaving, "it is to be deleted", WITHIN_S)
    assert await said(sandbox, "note", text="alive") == "start\nalive\n"
    with pytest.raises(FabricUnavailable, match="being deleted"):
        await bench.start(project, storage=storage)
    assert not deleting.done()
    await bench.engine.stop([sandbox.instance_id])
    await deleting
    assert own_node.cluster.objects(CLAIMS) == []
    await bench.engine.delete_storage(storage)  # gone already
    with pytest.raises(FabricUnavailable, match="is gone"):
        await bench.start(project, storage=storage.model_copy(update={"is_made": True}))


@pytest.mark.parametrize("access", [Access.CREATE_CLAIM, Access.GET_CLAIM, Access.DELETE_CLAIM])
async def test_a_missing_permission_on_claims_is_named(
    own_node: KubernetesNode, bench: Bench, access: Access
) -> None:
    granted: Any = {(one.value.verb, one.value.resource) for one in Access if one is not access}
    own_node.cluster.granted = granted
    words = f"may not {access.value.verb} {CLAIMS}"
    storage = a_storage()
    if access is Access.DELETE_CLAIM:
        await bench.start(storage=storage)
        with pytest.raises(FabricUnavailable, match=words):
            await bench.engine.delete_storage(storage)
    else:
        with pytest.raises(FabricUnavailable, match=words):
            await bench.start(storage=storage)
    own_node.cluster.granted = None
