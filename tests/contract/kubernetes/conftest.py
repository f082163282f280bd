"""A Kubernetes without a cluster of ours, which `aenv cluster` brings up and takes down."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aenv_ray.cluster.api import ClusterApi
from aenv_ray.cluster.lifecycle import Lifecycle
from tests.contract.kubernetes.kubernetes_objects import add
from tests.emulators.kubernetes.api import NAMESPACE, EmulatedCluster


@pytest.fixture
def emulated() -> Iterator[EmulatedCluster]:
    """Yield an emulated Kubernetes with KubeRay, a default StorageClass and a large node."""
    operator = {"name": "kuberay-operator", "namespace": "operators"}
    labels = {"app.kubernetes.io/name": "kuberay-operator"}
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    with EmulatedCluster() as cluster:
        cluster.delete("namespaces", NAMESPACE, namespace="")
        add(cluster, {"apiVersion": "apps/v1", "kind": "Deployment",
                      "metadata": {**operator, "labels": labels},
                      "status": {"readyReplicas": 1}})  # fmt: skip
        add(cluster, {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
                      "metadata": {"name": "standard", "annotations": default},
                      "allowVolumeExpansion": True})  # fmt: skip
        add(cluster, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "one"},
                      "status": {"allocatable": {"cpu": "8", "memory": "32Gi"}}})  # fmt: skip
        yield cluster


@pytest.fixture
def api(emulated: EmulatedCluster) -> Iterator[ClusterApi]:
    from kubernetes.client import Configuration

    connection = ClusterApi(configuration=Configuration(host=emulated.url))
    yield connection
    connection.close()


@pytest.fixture
def said() -> list[str]:
    """Return the lines that `life` prints."""
    return []


@pytest.fixture
def life(api: ClusterApi, said: list[str]) -> Lifecycle:
    return Lifecycle(api, "aenv", said.append, pause=lambda _: None)
