"""A Kubernetes without a cluster of ours, which `aenv cluster` brings up and takes down."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
