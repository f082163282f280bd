"""The controllers of the emulated cluster: of StatefulSets, of claims, and KubeRay's operator.

What they do has happened when a request is answered. Their pods are ready at once and do not run:
Ray and Redis are not what is emulated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Final

from tests.emulators.kubernetes import apply, claims, kuberay, rules
from tests.emulators.kubernetes.node import NODE
from tests.emulators.kubernetes.store import Kind, Object, Refused, Store

_FINALIZER: Final = "ray.io/gcs-ft-redis-cleanup-finalizer"
_AUTOSCALER: Final = "kuberay-autoscaler"
_RAYS: Final = ("ray.io", "rayclusters")
_JOBS: Final = ("ray.io", "rayjobs")
_BOUND: Final = {"phase": "Bound"}
_UNPLACED: Final = claims.waiting("0/1 nodes are available: 1 Insufficient cpu.")


class Controllers:
    """Act on what is in a store.

    Args:
        store: Of the cluster.
        remove: Called with an object's kind, name and uid; removes also what it owns.

    Attributes:
        has_kuberay: KubeRay is installed; without it the API does not know its kinds.
        is_operator_running: It acts on its objects, and removes its finalizer.
        missing_images: Pods with these never start.
        worker_room: Number of workers for which nodes have room; further ones wait. None: all.
        mirror: Admission puts this before the image of each container of a pod.
        redis_outlived_ray: Ray's records were still there to be removed when a RayCluster ended.
    """

    def __init__(self, store: Store, remove: Callable[[Kind, str, str], None]) -> None:
        self._store = store
        self._remove = remove
        self.has_kuberay = True
        self.is_operator_running = True
        self.missing_images: set[str] = set()
        self.worker_room: int | None = None
        self.mirror = ""
        self.redis_outlived_ray = False

    def resources(self) -> Object | None:
        """Return what the API says about KubeRay's kinds; None if it does not know them."""
        if not self.has_kuberay:
            return None
        rows = [{"name": resource} for _, resource in (_RAYS, _JOBS)]
        return {"kind": "APIResourceList", "groupVersion": "ray.io/v1", "resources": rows}

    def reconcile(self) -> None:
        """Do what the objects ask for."""
        if self.is_operator_running:
            self._each(_RAYS, self._ray)
            self._each(_JOBS, self._job)
        self._each(rules.SETS, self._stateful_set)
        self._each(claims.CLAIMS, lambda _, claim: {**claim, "status": _BOUND})

    def _each(self, of: tuple[str, str], act: Callable[[Kind, Object], Object | None]) -> None:
        """Let `act` return the new state of every object of a kind; None: it is not changed."""
        for body in self._store.all(Kind(*of, "")):
            kind = Kind(*of, body["metadata"]["namespace"])
            after = act(kind, copy.deepcopy(body))
            if after is not None and after != body:
                self._store.change(kind, body["metadata"]["name"], after)

    def _ray(self, kind: Kind, ray: Object) -> Object | None:
        metadata, spec = ray["metadata"], ray["spec"]
        if "deletionTimestamp" in metadata:
            self.redis_outlived_ray = bool(self._store.all(Kind(*rules.SETS, kind.namespace)))
            self._remove(kind, metadata["name"], metadata["uid"])
            return None
        if wrong := kuberay.faults(ray):
            self._warn(ray, "InvalidRayClusterSpec", wrong[0])
            return None
        metadata["finalizers"] = [_FINALIZER]
        head = {"ray.io/node-type": "head", "ray.io/group": "headgroup"}
        self._ray_pod(ray, 0, spec["headGroupSpec"]["template"], head)
        for group in spec["workerGroupSpecs"]:
            wanted = min(max(group["replicas"], group["minReplicas"]), group["maxReplicas"])
            group["replicas"] = wanted
            worker = {"ray.io/node-type": "worker", "ray.io/group": group["groupName"]}
            for number in range(wanted):
                self._ray_pod(ray, number, group["template"], worker)
        self._place_workers(kind.namespace)
        ray["status"] = {"state": "ready", "observedGeneration": metadata["generation"]}
        return apply.owned(ray, _AUTOSCALER, "workerGroupSpecs")

    def _ray_pod(
        self, ray: Object, number: int, template: Object, labels: Mapping[str, str]
    ) -> None:
        name = f"{labels['ray.io/group']}-{number}"
        cluster = {"ray.io/cluster": ray["metadata"]["name"]}
        self._make_pod(ray, name, template, {**cluster, **labels})

    def _place_workers(self, namespace: str) -> None:
        """Start the workers that waited for room, as far as there is some now."""
        kind = Kind(*rules.PODS, namespace)
        for pod in self._store.all(kind):
            if pod["status"] == _UNPLACED and self._has_room(kind):
                name, spec = pod["metadata"]["name"], {**pod["spec"], "nodeName": NODE}
                self._store.change(kind, name, {**pod, "spec": spec, "status": self._status(spec)})

    def _has_room(self, pods: Kind) -> bool:
        is_worker = {"ray.io/node-type": "worker"}.items()
        placed = [
            pod
            for pod in self._store.all(pods)
            if is_worker <= (pod["metadata"].get("labels") or {}).items()
            and "nodeName" in pod["spec"]
        ]
        return self.worker_room is None or len(placed) < self.worker_room

    def _job(self, kind: Kind, job: Object) -> Object | None:
        """Submit a RayJob: a Kubernetes Job runs its submitter's pod to the end."""
        if "status" in job:
            return None
        if wrong := kuberay.faults(job):
            self._warn(job, "InvalidRayJobSpec", wrong[0])
            return {**job, "status": {"jobDeploymentStatus": "ValidationFailed"}}
        name = f"{job['metadata']['name']}-submitter-0"
        self._make_pod(job, name, job["spec"]["submitterPodTemplate"])
        pods = Kind(*rules.PODS, kind.namespace)
        condition = {"type": "Ready", "status": "False", "reason": "PodCompleted"}
        status = {"phase": "Succeeded", "conditions": [condition]}
        self._store.change(pods, name, {**self._store.get(pods, name), "status": status})
        return {**job, "status": {"jobDeploymentStatus": "Complete"}}

    def _stateful_set(self, kind: Kind, body: Object) -> Object:
        name, spec = body["metadata"]["name"], body["spec"]
        for number in range(spec.get("replicas", 1)):
            template = copy.deepcopy(spec["template"])
            volumes = template["spec"].setdefault("volumes", [])
            for claim in spec.get("volumeClaimTemplates", ()):
                volume = claim["metadata"]["name"]
                claim_name = f"{volume}-{name}-{number}"
                source = {"claimName": claim_name}
                volumes.append({"name": volume, "persistentVolumeClaim": source})
                metadata = {"name": claim_name, "labels": spec["selector"]["matchLabels"]}
                self._make(Kind(*claims.CLAIMS, kind.namespace), {
                    "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata,
                    "spec": claim["spec"],
                })  # fmt: skip
            self._make_pod(body, f"{name}-{number}", template)
        pods = [pod for _, pod in self._store.owned_by(body["metadata"]["uid"])]
        ready = sum(map(_is_ready, pods))
        return {**body, "status": {"replicas": len(pods), "readyReplicas": ready}}

    # --- what they make ---------------------------------------------------------------------------

    def _make(self, kind: Kind, body: Object) -> None:
        if self._store.find_name(kind, body["metadata"]["name"]) is None:
            self._store.add(kind, body)

    def _make_pod(
        self, owner: Object, name: str, template: Object, labels: Mapping[str, str] | None = None
    ) -> None:
        """Make a pod, if it does not exist and the namespace admits it."""
        kind = Kind(*rules.PODS, owner["metadata"]["namespace"])
        if self._store.find_name(kind, name) is not None:
            return
        above = {field: owner[field] for field in ("apiVersion", "kind")}
        above |= {field: owner["metadata"][field] for field in ("name", "uid")}
        above["controller"] = True
        metadata = {
            "name": name, "ownerReferences": [above],
            "labels": {**template["metadata"].get("labels", {}), **(labels or {})},
        }  # fmt: skip
        is_worker = (labels or {}).get("ray.io/node-type") == "worker"
        is_placed = not is_worker or self._has_room(kind)
        spec = {**template["spec"], **({"nodeName": NODE} if is_placed else {})}
        spec["containers"] = [
            {**container, "image": self.mirror + container["image"]}
            for container in spec["containers"]
        ]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        try:
            rules.admit_pod(self._store, kind, pod)
        except Refused as exc:
            node = (labels or {}).get("ray.io/node-type", "").capitalize()
            self._warn(owner, f"FailedToCreate{node}Pod" if node else "FailedCreate", str(exc))
            return
        status = self._status(spec) if is_placed else _UNPLACED
        self._store.add(kind, {**pod, "status": copy.deepcopy(status)})

    def _status(self, spec: Object) -> dict[str, Any]:
        image = spec["containers"][0]["image"]
        if image not in self.missing_images:
            return {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        message = f'Back-off pulling image "{image}"'
        waiting = {"reason": "ImagePullBackOff", "message": message}
        return {"phase": "Pending", "containerStatuses": [{"state": {"waiting": waiting}}]}

    def _warn(self, about: Object, reason: str, message: str) -> None:
        name, namespace = about["metadata"]["name"], about["metadata"]["namespace"]
        self._make(Kind("", "events", namespace), {
            "apiVersion": "v1", "kind": "Event", "type": "Warning", "reason": reason,
            "metadata": {"name": f"{name}-{reason.lower()}"}, "message": message,
            "involvedObject": {"kind": about["kind"], "name": name},
        })  # fmt: skip


def _is_ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
