"""What keeps a cluster from being ready, decided from a snapshot of its objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aenv_ray.cluster.objects import NAME, REDIS, Document, title

_BLOCKING_EVENTS: Final[Mapping[str, frozenset[str]]] = {
    "RayCluster": frozenset({
        "InvalidRayClusterSpec", "InvalidRayClusterMetadata", "FailedToCreateHeadPod",
        "FailedToCreateWorkerPod", "FailedToCreateService", "FailedToCreateRedisCleanupJob",
    }),
    "StatefulSet": frozenset({"FailedCreate"}),
    "PersistentVolumeClaim": frozenset({"ProvisioningFailed", "FailedBinding"}),
    "Pod": frozenset({"FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"}),
    "Job": frozenset({"FailedCreate"}),
}  # fmt: skip
"""Reasons of events that block the start or the end of a cluster; others resolve themselves."""


@dataclass(frozen=True)
class Snapshot:
    """The objects of a cluster at one moment."""

    ray: Document | None
    redis: Document | None
    pods: Sequence[Document]
    claims: Sequence[Document]
    events: Sequence[Document] = ()

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The worker groups: their bounds, and how many pods exist and are ready."""
        if self.ray is None:
            return []
        return [self._group(spec) for spec in self.ray["spec"].get("workerGroupSpecs") or []]

    def _group(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        name = spec["groupName"]
        mine = [pod for pod in self.pods if label(pod, "ray.io/group") == name]
        return {
            "group": name,
            "ready": sum(map(is_ready, mine)),
            "pods": len(mine),
            "min": spec.get("minReplicas", 0),
            "max": spec.get("maxReplicas"),
            "slots": (spec.get("resources") or {}).get("env_slot"),
        }

    @property
    def head(self) -> Document | None:
        """The pod of the head, the newest if there are several."""
        heads = [pod for pod in self.pods if label(pod, "ray.io/node-type") == "head"]
        return max(heads, key=lambda p: p["metadata"].get("creationTimestamp") or "", default=None)

    @property
    def sandboxes(self) -> list[Document]:
        """The pods of instances."""
        return [p for p in self.pods if label(p, "app.kubernetes.io/component") == "sandbox"]

    def problems(self) -> list[str]:
        """Return what is not ready yet, and why; an empty list if the cluster is ready."""
        found = _of_redis(self.redis) + self._of_ray()
        found += [
            f"{title(claim)} is {claim.get('status', {}).get('phase', 'Pending')}"
            for claim in self.claims
            if claim.get("status", {}).get("phase") != "Bound" and not _is_of_a_service(claim)
        ]
        found += [
            f"pod {pod['metadata']['name']}: {why(pod)}"
            for pod in self.pods
            if _is_of_the_cluster(pod) and not is_ready(pod)
        ]
        return found + (self._blocking_events() if found else [])

    def _blocking_events(self) -> list[str]:
        """Return the latest blocking event of each object.

        Events are the only trace of a pod that is not admitted and of an invalid RayCluster.
        """
        last: dict[tuple[str, str], Document] = {}
        for event in sorted(self.events, key=_time):
            about = event.get("involvedObject") or {}
            is_bad = event.get("type") == "Warning"
            if is_bad and event.get("reason") in _BLOCKING_EVENTS.get(about.get("kind", ""), ()):
                last[about["kind"], about.get("name", "")] = event
        live = {pod["metadata"]["name"] for pod in self.pods}
        return [
            f"{kind} {name}: {_line(event.get('reason'), event.get('message'))}"
            for (kind, name), event in last.items()
            if (kind != "Pod" or name in live) and not self._is_resolved(event)
        ]

    def _is_resolved(self, event: Document) -> bool:
        """Return whether KubeRay has since accepted the RayCluster that it called invalid."""
        seen = ((self.ray or {}).get("status") or {}).get("observedGeneration")
        is_seen = self.ray is not None and seen == self.ray["metadata"].get("generation")
        return is_seen and str(event.get("reason")).startswith("InvalidRayCluster")

    def _of_ray(self) -> list[str]:
        if self.ray is None:
            return [f"RayCluster {NAME} does not exist"]
        status = self.ray.get("status") or {}
        found = []
        if not status and not self.pods:
            found.append(
                f"RayCluster {NAME}: KubeRay has not processed it; is its operator running?"
            )
        found += _replica_failures(status)
        head = self.head
        if head is None or not is_ready(head):
            found.append("the head is not ready: Ray or the gateway does not answer yet")
        for group in self.groups:
            if group["ready"] < (group["min"] or 0):
                found.append(
                    f"worker group {group['group']}: {group['ready']} of {group['min']} ready"
                )
        return found


def _replica_failures(status: Mapping[str, Any]) -> list[str]:
    """Return why KubeRay could not create pods."""
    return [
        f"RayCluster {NAME}: {condition.get('message') or condition.get('reason')}"
        for condition in status.get("conditions") or []
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True"
    ]


def _is_of_a_service(claim: Mapping[str, Any]) -> bool:
    """Return whether a claim is a service's storage, which may wait for its first sandbox."""
    return label(claim, "app.kubernetes.io/component") == "storage"


def _is_of_the_cluster(pod: Mapping[str, Any]) -> bool:
    """Return whether a cluster needs a pod, unlike the pods of instances and jobs."""
    return (
        label(pod, "app.kubernetes.io/component") != "sandbox"
        and label(pod, "aenv-ray.io/role") != "submitter"
        and pod.get("status", {}).get("phase") != "Succeeded"
    )


def _of_redis(redis: Document | None) -> list[str]:
    if redis is None:
        return [f"StatefulSet {REDIS} does not exist"]
    wanted = redis["spec"].get("replicas", 1)
    ready = redis.get("status", {}).get("readyReplicas") or 0
    return [] if ready >= wanted else [f"StatefulSet {REDIS}: {ready} of {wanted} ready"]


def _time(event: Mapping[str, Any]) -> str:
    """Return the time of an event as sortable text; the API stores it in one of three fields."""
    at = event.get("lastTimestamp") or event.get("eventTime")
    return str(at or event["metadata"].get("creationTimestamp") or "")


def label(document: Mapping[str, Any], name: str) -> str:
    """Return the value of a label, or "" if the object lacks it."""
    return str((document["metadata"].get("labels") or {}).get(name, ""))


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod is running and ready."""
    return not pod["metadata"].get("deletionTimestamp") and any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in pod.get("status", {}).get("conditions") or []
    )


def unschedulable(pod: Mapping[str, Any]) -> str | None:
    """Return why no node takes a pod; None if one does, or if that is not decided yet."""
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return _line(condition.get("message"))
    return None


def why(pod: Mapping[str, Any]) -> str:
    """Return why a pod is not ready."""
    if pod["metadata"].get("deletionTimestamp"):
        return "it is ending"
    status = pod.get("status") or {}
    if status.get("phase") == "Failed":
        ended = [_end(state) for state in _states(status) if "terminated" in state]
        return "it failed: " + _line(status.get("reason"), status.get("message"), *ended)
    if (reason := unschedulable(pod)) is not None:
        return f"no node is suitable: {reason}"
    for state in _states(status):
        waiting = state.get("waiting") or {}
        if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            return _line(waiting["reason"], waiting.get("message"))
    return "it is starting" if status.get("phase") != "Running" else "it is running, but not ready"


def _states(status: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    for name in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(name) or []:
            yield container.get("state") or {}


def _end(state: Mapping[str, Any]) -> str:
    ended = state["terminated"]
    return _line(ended.get("reason"), f"exit code {ended.get('exitCode')}", ended.get("message"))


def _line(*words: str | None) -> str:
    return " ".join(": ".join(filter(None, words)).split())[:300] or "no reason given"
