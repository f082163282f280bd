"""Claims of the emulated cluster: who waits for whom, and how they may change."""

from __future__ import annotations

from typing import Any, Final

from aenv_ray.cluster import quantities
from tests.emulators.kubernetes.store import Kind, Object, Refused, Store

CLAIMS: Final = ("", "persistentvolumeclaims")
_VOLUME: Final = "persistentVolumeClaim"
_OF_ONE_POD: Final = "ReadWriteOncePod"
_DEFAULT: Final = "storageclass.kubernetes.io/is-default-class"
_LEAVING: Final = "2026-01-01T00:00:00Z"


def claims_of(pod: Object) -> list[str]:
    """Return the names of the claims that a pod mounts."""
    volumes = pod["spec"].get("volumes", ())
    return [v[_VOLUME]["claimName"] for v in volumes if _VOLUME in v]


def unschedulable(store: Store, pod: Object, is_full: bool) -> str:
    """Return the scheduler's message for a pod without a node; "" if a node has room."""
    if is_full:
        return "0/1 nodes are available: 1 Insufficient cpu."
    namespace = pod["metadata"]["namespace"]
    known = {c["metadata"]["name"]: c for c in store.all(Kind(*CLAIMS, namespace))}
    for name in claims_of(pod):
        claim = known.get(name)
        if claim is None or "deletionTimestamp" in claim["metadata"]:
            return f'persistentvolumeclaim "{name}" not found'
        users = [u for u in _users(store, namespace, name) if u != pod["metadata"]["uid"]]
        if users and _OF_ONE_POD in claim["spec"]["accessModes"]:
            return (
                "0/1 nodes are available: 1 node has pod using PersistentVolumeClaim with the "
                "same name and ReadWriteOncePod access mode."
            )
    return ""


def waiting(why: str) -> dict[str, Any]:
    """Return the status of a pod that cannot be scheduled."""
    condition = {
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why,
    }  # fmt: skip
    return {"phase": "Pending", "conditions": [condition]}


def protect(store: Store, kind: Kind, name: str) -> bool:
    """Mark a claim that pods use as being deleted; return False for any other object."""
    is_claim = (kind.group, kind.resource) == CLAIMS
    if not is_claim or not _users(store, kind.namespace, name):
        return False
    claim = store.get(kind, name)
    metadata = {**claim["metadata"], "deletionTimestamp": _LEAVING}
    store.change(kind, name, {**claim, "metadata": metadata})
    return True


def let_go(store: Store, namespace: str) -> None:
    """Delete claims that are being deleted and that no pod uses any more."""
    kind = Kind(*CLAIMS, namespace)
    for claim in store.all(kind):
        name = claim["metadata"]["name"]
        if "deletionTimestamp" in claim["metadata"] and not _users(store, namespace, name):
            store.remove(kind, name)


def check_change(store: Store, before: Object, after: Object) -> None:
    """Check a change of the spec of a claim: its volume may grow, if its StorageClass allows it.

    Raises:
        Refused: It changes otherwise.
    """
    name = before["metadata"]["name"]
    old, new = (_without_size(claim["spec"]) for claim in (before, after))
    if old != new:
        words = (
            f'PersistentVolumeClaim "{name}" is invalid: spec: Forbidden: spec is immutable after '
            "creation except resources.requests and volumeAttributesClassName for bound claims"
        )
        raise Refused(422, "Invalid", words)
    was, becomes = _size(before), _size(after)
    if becomes < was:
        words = (
            f'PersistentVolumeClaim "{name}" is invalid: spec.resources.requests.storage: '
            "Forbidden: field can not be less than status.capacity"
        )
        raise Refused(422, "Invalid", words)
    if becomes > was and not _may_grow(store, before):
        words = (
            f'persistentvolumeclaims "{name}" is forbidden: only dynamically provisioned pvc can '
            "be resized and the storageclass that provisions the pvc must support resize"
        )
        raise Refused(403, "Forbidden", words)


def _without_size(spec: Object) -> Object:
    resources = spec.get("resources") or {}
    return {**spec, "resources": {k: v for k, v in resources.items() if k != "requests"}}


def _size(claim: Object) -> float:
    requests = (claim["spec"].get("resources") or {}).get("requests") or {}
    return quantities.parse(requests.get("storage", 0))


def _may_grow(store: Store, claim: Object) -> bool:
    """Return whether the StorageClass of a claim, or else the default one, expands volumes."""
    named = claim["spec"].get("storageClassName")
    return any(
        bool(each.get("allowVolumeExpansion"))
        for each in store.all(Kind("storage.k8s.io", "storageclasses", ""))
        if each["metadata"]["name"] == named
        or (named is None and _DEFAULT in (each["metadata"].get("annotations") or {}))
    )


def _users(store: Store, namespace: str, claim: str) -> list[str]:
    """Return the uids of the scheduled pods that mount a claim and have not ended."""
    return [
        pod["metadata"]["uid"]
        for pod in store.all(Kind("", "pods", namespace))
        if "nodeName" in pod["spec"]
        and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")
        and claim in claims_of(pod)
    ]
