"""What Kubernetes 1.34 with KubeRay 1.7 accepts: strict schemas and KubeRay's rules."""

from __future__ import annotations

from typing import Any

from tests.emulators.kubernetes import kuberay
from tests.emulators.kubernetes.schemas import faults_of


def problems(document: dict[str, Any]) -> list[str]:
    """Return why the API, or KubeRay's operator, would refuse an object."""
    of_schema = [
        f"{'.'.join(map(str, fault.absolute_path))}: {fault.message}"
        for fault in faults_of(document)
    ]
    return [*of_schema, *kuberay.faults(document)]


def pod_specs(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pod specs in an object."""
    spec = document.get("spec", {})
    if document["kind"] == "RayCluster":
        groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
        return [group["template"]["spec"] for group in groups]
    if document["kind"] == "RayJob":
        return [spec["submitterPodTemplate"]["spec"]]
    return [spec["template"]["spec"]] if document["kind"] == "StatefulSet" else []
