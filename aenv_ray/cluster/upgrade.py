"""Decides in which order the pods of a cluster are replaced by a new version: pure decisions.

A worker that is deleted drains first, by its ``preStop`` hook: it takes no new instances, and
Kubernetes ends the worker once its instances are gone, or after its grace period. KubeRay creates
the replacement from the new template. A drain needs the head, so no worker is deleted while the
head is not ready, and the head is replaced last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from aenv_ray.cluster.objects import Document
from aenv_ray.cluster.readiness import Snapshot, is_ready, label, unschedulable

_HEAD_GROUP: Final = "headgroup"
"""KubeRay's name for the group of the head, in the label of its pod."""
_GRACE_S: Final = 30
"""Kubernetes' grace period of a pod that names none."""
_START_S: Final = 300
"""Allowance for the start of the replacements of one batch of workers."""
_SPARE_S: Final = 3600
"""Allowance for everything else: the head, and nodes and images that take long."""


@dataclass(frozen=True)
class UpgradeStep:
    """What to do now.

    Attributes:
        delete: Pods to delete.
        waits: What is not finished yet, for people; empty once the upgrade is done.
        way_out: What people can do if it does not finish.
    """

    delete: list[Document]
    waits: list[str]
    way_out: str = "find the cause with: aenv cluster status; then run the command again"


class UpgradePlan:
    """Decides which pods are deleted next; call `next` with each new snapshot.

    Args:
        ray: The wanted RayCluster.
        before: The cluster when the wanted RayCluster was applied. Only its pods are replaced, each
            once: admission may give new pods other images than the wanted ones, too.
        at_once: Maximum number of workers that may be missing at a time. Workers that no node has
            room for do not count if they were missing when the upgrade began, or if the autoscaler
            has wanted more since.
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
        ours = [pod for pod in before.pods if label(pod, "ray.io/node-type") in ("worker", "head")]
        old = [pod for pod in ours if everything or self._differs(pod)]
        self._old_uids = {pod["metadata"]["uid"] for pod in old}
        self._old_workers = list(filter(_is_worker, old))
        self._wanted = _wanted(before)
        self._waiting = _missing(before)
        """How many workers at most are missing for another reason than the upgrade."""

    @property
    def default_timeout_s(self) -> float:
        """Enough for an upgrade in which each batch of workers drains as long as it may."""
        batches = -(-len(self._old_workers) // self._at_once)
        graces = (p["spec"].get("terminationGracePeriodSeconds") for p in self._old_workers)
        drain_s = max((_GRACE_S if each is None else each for each in graces), default=0)
        return float(batches * (drain_s + _START_S) + _SPARE_S)

    def next(self, found: Snapshot) -> UpgradeStep:
        """Return what to do, given the present state of the cluster."""
        self._follow(found)
        old = [pod for pod in found.pods if _is_worker(pod) and self._is_old(pod)]
        unplaced = [p for p in found.pods if _is_worker(p) and unschedulable(p) is not None]
        head = found.head
        if old and (head is None or not is_ready(head)):
            return self._await_head(head, found)
        if old:
            room = max(0, self._at_once - (_missing(found) - min(self._waiting, len(unplaced))))
            staying = [pod for pod in old if not _is_ending(pod)]
            # A worker that does not run is replaced first: it costs nothing.
            staying.sort(key=lambda pod: (is_ready(pod), pod["metadata"]["name"]))
            broken = sum(not is_ready(pod) for pod in staying)
            chosen = staying[: room + broken]
            # Also why a replacement does not become ready, for which the others wait.
            waits = [f"workers to replace: {len(old)}", *map(_ending, old)]
            return UpgradeStep(chosen, waits + found.problems(), _way_out(old))
        if head is not None and self._is_old(head):
            chosen = [] if _is_ending(head) else [head]
            return UpgradeStep(chosen, ["the head is being replaced"])
        if len(unplaced) <= self._waiting:  # they would wait without the upgrade, too
            found = replace(found, pods=[pod for pod in found.pods if pod not in unplaced])
        return UpgradeStep([], found.problems())

    def _await_head(self, head: Document | None, found: Snapshot) -> UpgradeStep:
        """Return the step while the head is not ready, without which no worker can drain."""
        waits = ["the head is not ready, so no worker is deleted: it could not drain"]
        chosen: list[Document] = []
        if head is not None and self._is_old(head) and not _is_ending(head) and _never_ran(head):
            waits, chosen = ["the head does not start, so it is replaced first"], [head]
        return UpgradeStep(
            chosen,
            waits + found.problems(),
            "find the cause with: aenv cluster status; to start the new version of a head that "
            "does not recover, delete its pod; then run the command again",
        )

    def _follow(self, found: Snapshot) -> None:
        """Note how many of the missing workers the upgrade has not caused."""
        wanted = _wanted(found)
        more = sum(max(0, count - self._wanted.get(group, 0)) for group, count in wanted.items())
        self._wanted = wanted
        self._waiting = min(self._waiting + more, _missing(found))

    def _is_old(self, pod: Document) -> bool:
        return pod["metadata"]["uid"] in self._old_uids

    def _differs(self, pod: Document) -> bool:
        wanted = self._images.get(label(pod, "ray.io/group"), {})
        images = _images(pod["spec"])
        return any(images.get(name) != image for name, image in wanted.items())


def _images(spec: Mapping[str, Any]) -> dict[str, str]:
    """Return the image of each container of a pod or template, by the container's name."""
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    return {one["name"]: one["image"] for one in containers}


def _wanted(found: Snapshot) -> dict[str, int]:
    """Return how many workers the autoscaler wants now, by group."""
    groups = (found.ray or {}).get("spec", {}).get("workerGroupSpecs") or []
    return {group["groupName"]: group.get("replicas") or 0 for group in groups}


def _missing(found: Snapshot) -> int:
    """Return how many workers the groups lack, compared with what the autoscaler wants now."""
    ready = {row["group"]: row["ready"] for row in found.groups}
    return sum(max(0, count - ready[group]) for group, count in _wanted(found).items())


def _never_ran(pod: Document) -> bool:
    """Return whether a pod's containers have not all started, for example for want of an image."""
    return bool(pod.get("status", {}).get("phase") == "Pending")


def _way_out(old: list[Document]) -> str:
    """Return what people can do if old workers remain."""
    if any(map(_is_ending, old)):
        return (
            "a worker drains until its instances end or workers.drainSeconds pass: see what it has "
            "with `aenv cluster nodes` in the head's pod, raise --timeout, and run the command "
            "again, which continues"
        )
    return (
        "find out why a worker is not ready with: aenv cluster status; then run the command again, "
        "with a corrected version or a higher --timeout"
    )


def _is_worker(pod: Document) -> bool:
    return label(pod, "ray.io/node-type") == "worker"


def _is_ending(pod: Document) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def _ending(pod: Document) -> str:
    name = pod["metadata"]["name"]
    if _is_ending(pod):
        return f"worker {name} drains: its instances run to their end"
    return f"worker {name} has the old version"
