"""What `kubectl drain` does with the pods of a node: its filters, and what budgets stop.

The rules are those of ``k8s.io/kubectl/pkg/drain/filters.go`` and of the eviction API, as far as
the pods of a cluster meet them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final

from tests.emulators.kubernetes.store import Object, matches

_ENDED: Final = ("Succeeded", "Failed")
_NO_CONTROLLER: Final = "cannot delete Pods that declare no controller (use --force to override)"
_LOCAL_STORAGE: Final = (
    "cannot delete Pods with local storage (use --delete-emptydir-data to override)"
)


def refusals(pods: Iterable[Object], options: Collection[str]) -> dict[str, str]:
    """Return why kubectl refuses to drain the node of these pods, by pod; then it evicts none."""
    return {
        pod["metadata"]["name"]: why
        for pod in pods
        if pod["status"].get("phase") not in _ENDED and (why := _refusal(pod, options)) is not None
    }


def _refusal(pod: Object, options: Collection[str]) -> str | None:
    if "--force" not in options and not _has_controller(pod):
        return _NO_CONTROLLER
    has_storage = any("emptyDir" in volume for volume in pod["spec"].get("volumes") or ())
    if has_storage and "--delete-emptydir-data" not in options:
        return _LOCAL_STORAGE
    return None


def _has_controller(pod: Object) -> bool:
    return any(owner.get("controller") for owner in pod["metadata"].get("ownerReferences", ()))


def evicted(pods: Collection[Object], budgets: Iterable[Object]) -> set[str]:
    """Return the names of the pods whose eviction no budget stops; kubectl tries the others again.

    Args:
        pods: All pods of the namespace. A container that has ended makes a pod unhealthy.
        budgets: Its PodDisruptionBudgets, with a number as ``minAvailable``.
    """
    names = {pod["metadata"]["name"] for pod in pods}
    for budget in budgets:
        spec: dict[str, Any] = budget["spec"]
        selector = ",".join(f"{k}={v}" for k, v in spec["selector"]["matchLabels"].items())
        chosen = {
            pod["metadata"]["name"]
            for pod in pods
            if matches(selector, pod["metadata"].get("labels") or {})
        }
        healthy = {pod["metadata"]["name"] for pod in pods if _is_healthy(pod)} & chosen
        if len(healthy) <= spec["minAvailable"]:
            always = spec.get("unhealthyPodEvictionPolicy") == "AlwaysAllow"
            names -= healthy if always else chosen
    return names


def _is_healthy(pod: Object) -> bool:
    return not any(
        "terminated" in row.get("state", {}) for row in pod["status"].get("containerStatuses", ())
    )
