"""What Kubernetes 1.34 with KubeRay 1.7 accepts: strict schemas and KubeRay's rules."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from tests.emulators.kubernetes import kuberay
from tests.emulators.kubernetes.schemas import fault_of

CRDS = Path(__file__).parent / "fixtures" / "kuberay" / "crds-1.7.0.json.gz"


@cache
def ray_schema(kind: str) -> Any:
    """Return the validator of a kind of KubeRay's."""
    schema = json.loads(gzip.decompress(CRDS.read_bytes()))[kind]
    return Draft202012Validator(_closed(schema))


def _closed(schema: Any) -> Any:
    """Return a schema that refuses what the API would drop, and that knows its two extensions."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string") is True:
        return {"type": ["integer", "string"]}
    result = {
        key: {name: _closed(part) for name, part in value.items()}
        if key == "properties"
        else _closed(value)
        for key, value in schema.items()
    }
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if "properties" in schema and not is_open:
        result["additionalProperties"] = False
    return result


def problems(document: dict[str, Any]) -> list[str]:
    """Return why the API, or KubeRay's operator, would refuse an object."""
    return [*schema_problems(document), *kuberay.faults(document)]


def schema_problems(document: dict[str, Any]) -> list[str]:
    """Return why the API would refuse an object."""
    return list(_problems(json.dumps(document)))


@cache
def _problems(text: str) -> list[str]:
    document = json.loads(text)
    if document["apiVersion"].startswith("ray.io/"):
        plain = {key: value for key, value in document.items() if key != "metadata"}
        errors = ray_schema(document["kind"]).iter_errors(plain)
        return [f"{'.'.join(map(str, e.absolute_path))}: {e.message}" for e in errors]
    wrong = fault_of(document)
    return [] if wrong is None else [f"{'.'.join(map(str, wrong.path))}: {wrong.message}"]


def pod_specs(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pod specs in an object."""
    spec = document.get("spec", {})
    if document["kind"] == "RayCluster":
        groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
        return [group["template"]["spec"] for group in groups]
    if document["kind"] == "RayJob":
        return [spec["submitterPodTemplate"]["spec"]]
    return [spec["template"]["spec"]] if document["kind"] == "StatefulSet" else []
