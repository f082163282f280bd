"""Claims of the emulated cluster: which pods wait for them, and which claims wait for pods."""

from __future__ import annotations

from typing import Any, Final

from tests.emulators.kubernetes.store import Kind, Object, Store

_CLAIMS: Final = ("", "persistentvolumeclaims")
_VOLUME: Final = "persistentVolumeClaim"
_OF_ONE_POD: Final = "ReadWriteOncePod"
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
    known = {c["metadata"]["name"]: c for c in store.all(Kind(*_CLAIMS, namespace))}
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
    is_claim = (kind.group, kind.resource) == _CLAIMS
    if not is_claim or not _users(store, kind.namespace, name):
        return False
    claim = store.get(kind, name)
    metadata = {**claim["metadata"], "deletionTimestamp": _LEAVING}
    store.change(kind, name, {**claim, "metadata": metadata})
    return True


def let_go(store: Store, namespace: str) -> None:
    """Delete claims that are being deleted and that no pod uses any more."""
    kind = Kind(*_CLAIMS, namespace)
    for claim in store.all(kind):
        name = claim["metadata"]["name"]
        if "deletionTimestamp" in claim["metadata"] and not _users(store, namespace, name):
            store.remove(kind, name)


def _users(store: Store, namespace: str, claim: str) -> list[str]:
    """Return the uids of the scheduled pods that mount a claim and have not ended."""
    return [
        pod["metadata"]["uid"]
        for pod in store.all(Kind("", "pods", namespace))
        if "nodeName" in pod["spec"]
        and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")
        and claim in claims_of(pod)
    ]
