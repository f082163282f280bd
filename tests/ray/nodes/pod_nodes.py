"""A Ray cluster in the pods of an emulated Kubernetes: a head without instances, and workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from aenv_ray.cluster import manifests
from tests.contract.kubernetes.kubernetes_node import KubernetesNode
from tests.emulators.kubernetes.api import NAMESPACE
from tests.emulators.kubernetes.node import PYTHON_IMAGE
from tests.ray.nodes.nodes import Node, Nodes

SLOTS = 6


@dataclass(frozen=True)
class Worker:
    """A Ray node in its own pod."""

    pod: str
    uid: str
    node: Node


class PodNodes:
    """The cluster; its workers are as those of ``clusters/kuberay``.

    Args:
        root: For all its files; on a short path. The environment must name it already.
        kubernetes: That the pods are in.
    """

    def __init__(self, root: Path, kubernetes: KubernetesNode) -> None:
        self.kubernetes = kubernetes
        self.nodes = Nodes(root, root / "r")
        self._root = root
        self._config = root / "kube.json"
        self._config.write_text(json.dumps(_kube_config(kubernetes.cluster.url)))

    def add_worker(self, pod: str) -> Worker:
        """Add a worker, and the pod that it says it runs in."""
        uid = self.kubernetes.add_ray_pod(pod)
        node = self.nodes.add(
            slots=SLOTS,
            labels={"aenv-ray.io/engine": "kubernetes"},
            KUBECONFIG=str(self._config),
            POD_NAME=pod,
            AENV_DATA_DIR=str(self._root / pod),
            AENV_ENGINE="kubernetes",
            AENV_KUBERNETES_NAMESPACE=NAMESPACE,
            AENV_KUBERNETES_IMAGE=PYTHON_IMAGE,
        )
        return Worker(pod, uid, node)

    def delete(self, worker: Worker) -> None:
        """Delete a worker's pod: its Ray node ends, and Kubernetes ends what the pod owns."""
        self.kubernetes.cluster.delete("pods", worker.pod)
        worker.node.kill()

    def end(self, worker: Worker, grace_s: float) -> bool:
        """End a worker's pod as its kubelet does after a deletion.

        Args:
            worker: The worker.
            grace_s: For its `preStop` hook. In the pod the hook does not name the node.

        Returns:
            Whether the hook succeeded in that time.
        """
        hook = drain_hook(worker.node.node_id)
        variables = {"RAY_ADDRESS": self.nodes.address, "POD_NAME": worker.pod}
        try:
            done = subprocess.run(
                hook, env={**os.environ, **variables}, timeout=grace_s, check=False
            )
            has_drained = done.returncode == 0
        except subprocess.TimeoutExpired:
            has_drained = False
        self.delete(worker)
        return has_drained

    def sandboxes_of(self, worker: Worker) -> list[str]:
        """Return the names of the pods that a worker's pod owns."""
        return [
            pod["metadata"]["name"]
            for pod in self.kubernetes.sandboxes()
            if any(owner["uid"] == worker.uid for owner in pod["metadata"]["ownerReferences"])
        ]


def drain_hook(node: str) -> list[str]:
    """Return the command that the manifests run before a worker's pod ends, for a node."""
    (ray,) = [one for one in manifests.load("dev") if one["kind"] == "RayCluster"]
    (group,) = ray["spec"]["workerGroupSpecs"]
    container = group["template"]["spec"]["containers"][0]
    program, *words = container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "aenv"
    return [sys.executable, "-m", "aenv_ray.cli.main", *words, node]


def _kube_config(url: str) -> dict[str, object]:
    context = {"cluster": "emulated", "user": "ray", "namespace": NAMESPACE}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "emulated",
        "contexts": [{"name": "emulated", "context": context}],
        "clusters": [{"name": "emulated", "cluster": {"server": url}}],
        "users": [{"name": "ray", "user": {}}],
    }
