"""The rules of the emulated API: schemas, permissions, admission of pods, immutable fields."""

from __future__ import annotations

import base64
from typing import Any, Final

from tests.emulators.kubernetes.store import Kind, Object, Refused, Store
from tests.emulators.kubernetes.validation import check_pod

_RESTRICTED: Final = "restricted"
_VOLUMES: Final = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
VERBS: Final = {
    "POST": "create", "GET": "get", "PUT": "update", "PATCH": "patch", "DELETE": "delete",
}  # fmt: skip
"""Verbs of permissions by HTTP method."""
PODS: Final = ("", "pods")
SETS: Final = ("apps", "statefulsets")
_CHANGEABLE: Final = (
    "replicas", "ordinals", "template", "updateStrategy", "revisionHistoryLimit",
    "persistentVolumeClaimRetentionPolicy", "minReadySeconds",
)  # fmt: skip
"""Fields of a StatefulSet; all others are immutable."""


def check_schema(body: Object) -> None:
    """Check an object against its schema; kinds without a schema pass.

    Raises:
        Refused: It does not fit; the message says why.
    """
    from tests.emulators.kubernetes.schemas import fault_of

    try:
        wrong = fault_of(body)
    except LookupError:
        return
    if wrong is not None:
        kind = body.get("kind", "object")
        where = ".".join(map(str, wrong.path))
        raise Refused(422, "Invalid", f"{kind} is invalid: {where}: {wrong.message}")


def check_namespace(store: Store, kind: Kind) -> None:
    """Check that the namespace of a new object exists.

    Raises:
        Refused: It does not.
    """
    if kind.namespace:
        store.get(Kind("", "namespaces", ""), kind.namespace)


def encoded(body: Object) -> Object:
    """Return an object as it is stored: the text in a Secret becomes data."""
    if body.get("kind") != "Secret" or "stringData" not in body:
        return body
    texts = {k: base64.b64encode(v.encode()).decode() for k, v in body["stringData"].items()}
    rest = {key: value for key, value in body.items() if key != "stringData"}
    return {**rest, "data": {**body.get("data", {}), **texts}}


def lacks_permission(verb: str, kind: Kind, account: str) -> Refused:
    """Return the answer to a request for which an account lacks the permission."""
    message = (
        f'{kind.resource} is forbidden: User "{account}" cannot {verb} resource '
        f'"{kind.resource}" in API group "{kind.group}" in the namespace "{kind.namespace}"'
    )
    return Refused(403, "Forbidden", message)


def lost_race() -> Refused:
    """Return the answer to one of several concurrent creates under a ResourceQuota."""
    message = 'Operation cannot be fulfilled on resourcequotas "team": it was modified'
    return Refused(409, "Conflict", message)


def admit_pod(store: Store, kind: Kind, body: Object) -> None:
    """Check that a namespace admits a pod.

    Raises:
        Refused: With the API server's message.
    """
    check_pod(body)
    name = body["metadata"].get("name", "")
    start = f'pods "{name}" is forbidden: '
    runtime = body["spec"].get("runtimeClassName")
    classes = store.all(Kind("node.k8s.io", "runtimeclasses", ""))
    if runtime and runtime not in {each["metadata"]["name"] for each in classes}:
        words = f'{start}pod rejected: RuntimeClass "{runtime}" not found'
        raise Refused(403, "Forbidden", words)
    priority = body["spec"].get("priorityClassName")
    priorities = store.all(Kind("scheduling.k8s.io", "priorityclasses", ""))
    if priority and priority not in {each["metadata"]["name"] for each in priorities}:
        words = f"{start}no PriorityClass with name {priority} was found"
        raise Refused(403, "Forbidden", words)
    for namespace in store.all(Kind("", "namespaces", "")):
        if namespace["metadata"]["name"] == kind.namespace:
            level = (
                namespace["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce")
            )
            problems = violations(body["spec"]) if level == _RESTRICTED else []
            if problems:
                words = f'{start}violates PodSecurity "{level}:latest": {", ".join(problems)}'
                raise Refused(403, "Forbidden", words)
    for quota in store.all(Kind("", "resourcequotas", kind.namespace)):
        limit = quota["spec"].get("hard", {}).get("pods")
        used = len(store.all(kind))
        if limit is not None and used + 1 > int(limit):
            words = (
                f"{start}exceeded quota: {quota['metadata']['name']}, requested: pods=1, "
                f"used: pods={used}, limited: pods={limit}"
            )
            raise Refused(403, "Forbidden", words)


def violations(spec: Object) -> list[str]:
    """Return how a pod violates the Pod Security level ``restricted``."""
    problems = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    around = spec.get("securityContext") or {}
    for container in (*spec["containers"], *(spec.get("initContainers") or ())):
        security = container.get("securityContext") or {}
        both = {**around, **security}
        capabilities = security.get("capabilities") or {}
        profile = both.get("seccompProfile") or {}
        checks = {
            "privileged": not security.get("privileged"),
            "allowPrivilegeEscalation != false": security.get("allowPrivilegeEscalation") is False,
            "unrestricted capabilities": "ALL" in capabilities.get("drop", ())
            and set(capabilities.get("add", ())) <= {"NET_BIND_SERVICE"},
            "runAsNonRoot != true": both.get("runAsNonRoot") is True,
            "runAsUser=0": both.get("runAsUser") != 0,
            "seccompProfile": profile.get("type") in ("RuntimeDefault", "Localhost"),
            "procMount": security.get("procMount", "Default") == "Default",
        }
        name = container["name"]
        problems += [f'{what} (container "{name}")' for what, holds in checks.items() if not holds]
    for volume in spec.get("volumes") or ():
        if not set(volume) & _VOLUMES:
            problems.append(f'restricted volume types (volume "{volume["name"]}")')
    return problems


def check_change(before: Object, after: Object) -> None:
    """Check a change of a pod's spec: only its active deadline may come earlier.

    Raises:
        Refused: The spec changes in another way.
    """
    old: dict[str, Any] = dict(before["spec"])
    new: dict[str, Any] = dict(after["spec"])
    was, becomes = old.pop("activeDeadlineSeconds", None), new.pop("activeDeadlineSeconds", None)
    name = before["metadata"]["name"]
    if old != new:
        words = f'Pod "{name}" is invalid: spec: Forbidden: pod updates may not change fields'
        raise Refused(422, "Invalid", words)
    if was is not None and (becomes is None or becomes > was):
        words = (
            f'Pod "{name}" is invalid: spec.activeDeadlineSeconds: Invalid value: {becomes}: must '
            f"be less than or equal to previous value"
        )
        raise Refused(422, "Invalid", words)


def check_set_change(before: Object, after: Object) -> None:
    """Check a change of the spec of a StatefulSet.

    Raises:
        Refused: An immutable field changes, such as the size of its volumes.
    """
    old, new = before["spec"], after["spec"]
    changed = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    if changed - {*_CHANGEABLE}:
        fields = "', '".join(_CHANGEABLE[:-1]) + f"' and '{_CHANGEABLE[-1]}"
        words = (
            f'StatefulSet.apps "{before["metadata"]["name"]}" is invalid: spec: Forbidden: updates '
            f"to statefulset spec for fields other than '{fields}' are forbidden"
        )
        raise Refused(422, "Invalid", words)
