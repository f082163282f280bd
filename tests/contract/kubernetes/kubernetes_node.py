"""A Ray pod of an emulated cluster, and the engines in it."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Self

from aenv_ray.engines.kubernetes import names
from aenv_ray.engines.kubernetes.client import KubernetesClient
from aenv_ray.engines.kubernetes.engine import KubernetesEngine
from aenv_ray.engines.kubernetes.settings import PodSettings
from aenv_ray.ids import HostId, InstanceId
from tests.emulators.kubernetes.api import NAMESPACE, EmulatedCluster
from tests.emulators.kubernetes.node import PYTHON_IMAGE, RAY_IMAGE

RAY_POD = "ray-worker-1"


class KubernetesNode:
    """One cluster with one Ray pod."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="ae-", dir="/tmp"))
        self.cluster = EmulatedCluster()
        self.owner_uid = ""

    def __enter__(self) -> Self:
        self.cluster.__enter__()
        self.owner_uid = self.add_ray_pod()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.cluster.__exit__()
        finally:
            shutil.rmtree(self.root)

    def add_ray_pod(self, name: str = RAY_POD) -> str:
        """Make a pod that hosts run in; return its uid."""
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {"containers": [{"name": "ray-worker", "image": RAY_IMAGE}]},
            "status": {"phase": "Running"},
        }
        return str(self.cluster.create("pods", pod)["metadata"]["uid"])

    def engine(self, host_id: HostId, **options: Any) -> KubernetesEngine:
        """Return an engine in the Ray pod; `options` are for it or `PodSettings`."""
        from kubernetes.aio import client

        own = {name: options.pop(name) for name in ("schedule_s", "policy") if name in options}
        settings = PodSettings(**{"pod_name": RAY_POD, "image": PYTHON_IMAGE, **options})
        return KubernetesEngine(
            host_id,
            runtime_dir=self.root / "r",
            data_dir=data_dir(),
            scope=self.root.name,
            settings=settings,
            client=KubernetesClient(NAMESPACE, client.Configuration(host=self.cluster.url)),
            **own,
        )

    def pod(self, instance_id: InstanceId) -> str:
        """Return the name of an instance's pod."""
        return names.pod_name(self.owner_uid, instance_id)

    def sandboxes(self) -> list[dict[str, Any]]:
        """Return the pods of instances, whatever their state."""
        return [p for p in self.cluster.objects("pods") if "labels" in p["metadata"]]

    def left_over(self) -> list[str]:
        """Return the pods of instances, by the API and by the process table."""
        return [pod["metadata"]["name"] for pod in self.sandboxes()] + self.cluster.running()


@cache
def data_dir() -> Path:
    """Return where bundles are kept for all tests of this process."""
    path = Path(tempfile.gettempdir(), "aenv-test-pod-bundles")
    path.mkdir(mode=0o700, exist_ok=True)
    return path
