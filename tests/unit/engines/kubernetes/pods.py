"""Specs, plans and pods for tests of the kubernetes engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aenv_ray.engines.base import SandboxSpec
from aenv_ray.engines.kubernetes import names
from aenv_ray.engines.kubernetes.plan import PodPlan
from aenv_ray.engines.kubernetes.settings import OwnerPod, PodSettings
from aenv_ray.ids import InstanceId
from aenv_ray.project.config import EnvironmentConfig

NOW = 1_000_000.0


def spec_of(**deploy: Any) -> SandboxSpec:
    config = EnvironmentConfig.model_validate({"name": "made", "deployConfig": deploy})
    return SandboxSpec(
        instance_id=InstanceId("made-1"), project_dir=Path("/p"), config=config,
        deadline=NOW + 600.0, environment_variables={"TOKEN": "hunter2"},
    )  # fmt: skip


def lasting_of(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the containers that run as long as a pod does."""
    found = [c for c in pod["spec"]["containers"] if c["name"] != names.UNPACKER_CONTAINER]
    assert len(found) == len(pod["spec"]["containers"]) - 1
    return found


def plan_of(settings: PodSettings | None = None, **fields: Any) -> PodPlan:
    facts: dict[str, Any] = {
        "name": "aenv-1", "host_id": "host-1", "owner": OwnerPod("ray-1", "uid-1", "ray:2"),
        "settings": settings or PodSettings(), "nonce": "n", "secret_digest": "d",
        "image": "python:3.12",
    }  # fmt: skip
    return PodPlan(**(facts | fields))


def pod_with(state: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    containers = [{"name": "instance", "resources": {"limits": {"memory": str(64 << 20)}}}]
    rows = [] if state is None else [{"name": "instance", "image": "i:1", "state": state}]
    return {
        "metadata": {"name": "p", "uid": "u"},
        "spec": {"containers": containers},
        "status": {"containerStatuses": rows, **status},
    }
