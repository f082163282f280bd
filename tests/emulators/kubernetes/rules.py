"""What the emulated API refuses: schemas, admission of pods, and changes that cannot be made."""

from __future__ import annotations

from typing import Any, Final

from tests.emulators.kubernetes.store import Kind, Object, Refused, Store
from tests.emulators.kubernetes.validation import check_pod

_RESTRICTED: Final = "restricted"
VERBS: Final = {
    "POST": "create", "GET": "get", "PUT": "update", "PATCH": "patch", "DELETE": "delete",
}  # fmt: skip
"""What a permission calls the methods of HTTP."""
PODS: Final = ("", "pods")


def check_schema(body: Object) -> None:
    """Refuse what is no object of its kind; kinds of no known schema pass.

    Raises:
        Refused: It says what does not fit.
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


def check_permission(
    granted: set[tuple[str, str]] | None, verb: str, kind: Kind, account: str
) -> None:
    """Refuse what an account may not do.

    Args:
        granted: Pairs of verb and resource; None for all.
        verb: Of the request.
        kind: It is about.
        account: Who makes it.

    Raises:
        Refused: In the API server's own words.
    """
    if granted is not None and (verb, kind.resource) not in granted:
        message = (
            f'{kind.resource} is forbidden: User "{account}" cannot {verb} resource '
            f'"{kind.resource}" in API group "{kind.group}" in the namespace "{kind.namespace}"'
        )
        raise Refused(403, "Forbidden", message)


def review(granted: set[tuple[str, str]] | None, body: Object) -> Object:
    """Return the answer to a SelfSubjectAccessReview."""
    wanted = body["spec"]["resourceAttributes"]
    allowed = granted is None or (wanted["verb"], wanted["resource"]) in granted
    return {**body, "status": {"allowed": allowed}}


def lost_race() -> Refused:
    """Return the answer to one of many creates that count in one ResourceQuota."""
    message = 'Operation cannot be fulfilled on resourcequotas "team": it was modified'
    return Refused(409, "Conflict", message)


def admit_pod(store: Store, kind: Kind, body: Object) -> None:
    """Refuse a pod that its namespace does not take.

    Raises:
        Refused: In the API server's own words.
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
    """Return what of a pod the restricted Pod Security level forbids."""
    problems = []
    around = spec.get("securityContext") or {}
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        name, security = container["name"], container.get("securityContext") or {}
        capabilities = security.get("capabilities") or {}
        profile = security.get("seccompProfile") or around.get("seccompProfile") or {}
        checks = {
            "allowPrivilegeEscalation != false": security.get("allowPrivilegeEscalation") is False,
            "unrestricted capabilities": "ALL" in capabilities.get("drop", ())
            and set(capabilities.get("add", ())) <= {"NET_BIND_SERVICE"},
            "runAsNonRoot != true": security.get("runAsNonRoot") is True,
            "runAsUser=0": security.get("runAsUser") != 0,
            "seccompProfile": profile.get("type") in ("RuntimeDefault", "Localhost"),
        }
        problems += [f'{what} (container "{name}")' for what, holds in checks.items() if not holds]
    for volume in spec.get("volumes", ()):
        if "hostPath" in volume:
            problems.append(f'restricted volume types (volume "{volume["name"]}")')
    return problems


def check_change(before: Object, after: Object) -> None:
    """Refuse a change of a pod's spec, but for an active deadline that comes earlier.

    Raises:
        Refused: It is changed otherwise.
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
