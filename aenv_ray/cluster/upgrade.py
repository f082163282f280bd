"""Decides in which order the pods of a cluster are replaced by a new version: pure decisions.

A worker that is deleted drains first, by its ``preStop`` hook: it takes no new instances, and
Kubernetes ends the worker once its instances are gone, or after its grace period. KubeRay creates
the replacement from the new template. The head is replaced last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from aenv_ray.cluster.objects import Document
from aenv_ray.cluster.readiness import Snapshot, is_ready, label

_HEAD_GROUP: Final = "headgroup"
"""KubeRay's name for the group of the head, in the label of its pod."""


@dataclass(frozen=True)
class UpgradeStep:
    """What to do now.

    Attributes:
        delete: Pods to delete.
        waits: What is not finished yet, for people; empty once the upgrade is done.
    """

    delete: list[Document]
    waits: list[str]


class UpgradePlan:
    """Decides which pods are deleted next; call `next` with each new snapshot.

    Args:
        ray: The wanted RayCluster.
        before: The cluster before it was changed.
        at_once: Maximum number of workers that may be missing at a time.
        everything: Replace all pods. False: those with another image than the wanted one.
    """

    def __init__(
        self, ray: Document, before: Snapshot, *, at_once: int = 1, everything: bool = False
    ) -> None:
        spec = ray["spec"]
        templates = {g["groupName"]: g["template"] for g in spec.get("workerGroupSpecs") or []}
        templates[_HEAD_GROUP] = spec["headGroupSpec"]["template"]
        self._images = {group: _images(template["spec"]) for group, template in templates.items()}
        self._at_once = at_once
        self._old_uids = {pod["metadata"]["uid"] for pod in before.pods} if everything else set()

    def next(self, found: Snapshot) -> UpgradeStep:
        """Return what to do, given the present state of the cluster."""
        workers = [pod for pod in found.pods if label(pod, "ray.io/node-type") == "worker"]
        old = [pod for pod in workers if self._is_old(pod)]
        if old:
            room = max(0, self._at_once - _missing_workers(found))
            staying = [pod for pod in old if not _is_ending(pod)]
            # A worker that does not run is replaced first: it costs nothing.
            staying.sort(key=lambda pod: (is_ready(pod), pod["metadata"]["name"]))
            broken = sum(not is_ready(pod) for pod in staying)
            chosen = staying[: room + broken]
            # Also why a replacement does not become ready, for which the others wait.
            waits = [f"{len(old)} workers are to be replaced", *map(_ending, old)]
            return UpgradeStep(chosen, waits + found.problems())
        head = found.head
        if head is not None and self._is_old(head):
            chosen = [] if _is_ending(head) else [head]
            return UpgradeStep(chosen, ["the head is being replaced"])
        return UpgradeStep([], found.problems())

    def _is_old(self, pod: Document) -> bool:
        if pod["metadata"]["uid"] in self._old_uids:
            return True
        wanted = self._images.get(label(pod, "ray.io/group"), {})
        images = _images(pod["spec"])
        return any(images.get(name) != image for name, image in wanted.items())


def _images(spec: Mapping[str, Any]) -> dict[str, str]:
    """Return the image of each container of a pod or template, by the container's name."""
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    return {one["name"]: one["image"] for one in containers}


def _missing_workers(found: Snapshot) -> int:
    """Return how many workers the groups lack, compared with what the autoscaler wants now."""
    groups = (found.ray or {}).get("spec", {}).get("workerGroupSpecs") or []
    ready = {row["group"]: row["ready"] for row in found.groups}
    return sum(max(0, (g.get("replicas") or 0) - ready[g["groupName"]]) for g in groups)


def _is_ending(pod: Document) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def _ending(pod: Document) -> str:
    name = pod["metadata"]["name"]
    if _is_ending(pod):
        return f"worker {name} drains: its instances run to their end"
    return f"worker {name} has the old version"
