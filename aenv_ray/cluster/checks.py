"""The checks of ``aenv cluster doctor``: permissions, kinds, quotas, storage and nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from aenv_ray.cluster import quantities
from aenv_ray.cluster.api import APPLY, DELETE, ClusterApi
from aenv_ray.cluster.lifecycle import Lifecycle
from aenv_ray.cluster.objects import KINDS, NAME, Document
from aenv_ray.engines.kubernetes.permissions import Permission
from aenv_ray.errors import ConfigError, Forbidden
from aenv_ray.findings import Finding, Verdict

_OPERATORS: Final = ("kuberay-operator", "kuberay")
"""What KubeRay's Helm chart, and its kustomization, label the operator with."""
_DEFAULT_CLASS: Final = "storageclass.kubernetes.io/is-default-class"
_AUTOSCALER: Final = Counter({"cpu": 0.5, "memory": 512.0 * 2**20})
"""Requests of the container that KubeRay adds to the head, unless its options set them."""
_SHOWN: Final = 6


class Doctor:
    """Checks a Kubernetes cluster with the caller's permissions."""

    def __init__(self, api: ClusterApi, namespace: str, documents: Sequence[Document]) -> None:
        self._api = api
        self._namespace = namespace
        self._documents = documents

    def findings(self) -> list[Finding]:
        """Return all findings.

        Raises:
            AenvError: The API does not answer, or does not accept the credentials.
        """
        version = self._api.request("GET", "/version") or {}
        found = [Finding("API", Verdict.OK, f"{self._api.host}, {version.get('gitVersion', '?')}")]
        for name, check in (
            ("KubeRay", self._kuberay),
            ("operator", self._operator),
            ("permissions", self._permissions),
            ("grants", self._grants),
            ("storage", self._storage),
            ("quota", self._quota),
            ("nodes", self._nodes),
            ("cluster", self._cluster),
        ):
            try:
                found.append(check())
            except Forbidden as exc:
                found.append(Finding(name, Verdict.WARNING, f"cannot be checked: {exc.message}"))
        return found

    def _kuberay(self) -> Finding:
        try:
            Lifecycle(self._api, self._namespace, lambda _: None).check_kuberay()
        except ConfigError as exc:
            return Finding("KubeRay", Verdict.FAILED, exc.message, exc.hint or "")
        return Finding("KubeRay", Verdict.OK, f"{KINDS['RayCluster'].api_version} is installed")

    def _operator(self) -> Finding:
        rows = [
            row
            for name in _OPERATORS
            for row in self._api.find(KINDS["Deployment"], None, f"app.kubernetes.io/name={name}")
        ]
        if not rows:
            return Finding(
                "operator", Verdict.WARNING,
                f"no deployment has the label app.kubernetes.io/name: {' or '.join(_OPERATORS)}",
                "install KubeRay by its Helm chart: the network policies admit it by that label",
            )  # fmt: skip
        row = rows[0]
        where = f"{row['metadata']['namespace']}/{row['metadata']['name']}"
        if not row.get("status", {}).get("readyReplicas"):
            found = f"{where} has no ready pod"
            return Finding(
                "operator", Verdict.FAILED, found, "check the events and logs of its pods"
            )
        return Finding("operator", Verdict.OK, f"{where} is running")

    def _permissions(self) -> Finding:
        wanted = dict.fromkeys((*APPLY, *DELETE))
        missing = [p for p in wanted if not self._api.may(p, self._namespace)]
        return self._of_missing(
            "permissions", missing, len(wanted), "ask an administrator for them"
        )

    def _grants(self) -> Finding:
        """Check that the caller has the permissions that the Roles grant, as the API requires."""
        rules = [
            Permission(verb, resource, group)
            for document in self._documents
            if document["kind"] == "Role"
            for rule in document["rules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        ]
        missing = [p for p in dict.fromkeys(rules) if not self._api.may(p, self._namespace)]
        mend = "ask an administrator for them: you can grant only permissions that you have"
        return self._of_missing("grants", missing, len(rules), mend)

    def _of_missing(self, name: str, missing: list[Permission], count: int, mend: str) -> Finding:
        if not missing:
            return Finding(name, Verdict.OK, f"you have all {count} that are required")
        words = [f"{p.verb} {p.resource}" + (f".{p.group}" if p.group else "") for p in missing]
        more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
        where = f" in namespace {self._namespace}"
        found = f"missing{where}: {', '.join(words[:_SHOWN])}{more}"
        return Finding(name, Verdict.FAILED, found, mend)

    def _storage(self) -> Finding:
        named = {claim["spec"].get("storageClassName") for claim in _claims(self._documents)}
        rows = self._api.find(KINDS["StorageClass"])
        known = {row["metadata"]["name"] for row in rows}
        default = [
            row["metadata"]["name"]
            for row in rows
            if (row["metadata"].get("annotations") or {}).get(_DEFAULT_CLASS) == "true"
        ]
        missing = sorted(named - {None} - known)
        if missing:
            return Finding("storage", Verdict.FAILED, f"StorageClass {missing[0]} does not exist",
                           f"existing: {', '.join(sorted(known)) or 'none'}")  # fmt: skip
        if None in named and not default:
            return Finding("storage", Verdict.FAILED, "no StorageClass is the default",
                           "set storageClassName in the volumes of values.yaml")  # fmt: skip
        return Finding(
            "storage", Verdict.OK, f"classes: {', '.join(sorted(named - {None}) or default)}"
        )

    def _quota(self) -> Finding:
        wanted = quantities.total(_pods(self._documents))
        wanted["pods"] = sum(number for _, number in _pods(self._documents))
        is_there = self._api.get(KINDS["RayCluster"], self._namespace, NAME) is not None
        for quota in self._api.find(KINDS["ResourceQuota"], self._namespace):
            status = quota.get("status") or {}
            for name, hard in (status.get("hard") or quota["spec"].get("hard") or {}).items():
                resource = name.removeprefix("requests.")
                used = (
                    0.0 if is_there else quantities.parse((status.get("used") or {}).get(name, 0))
                )
                if resource in wanted and wanted[resource] > quantities.parse(hard) - used:
                    in_use = f", {quantities.shown(resource, used)} of it used" if used else ""
                    found = (
                        f"ResourceQuota {quota['metadata']['name']}: {name} is {hard}{in_use}, and "
                        f"the smallest cluster needs {quantities.shown(resource, wanted[resource])}"
                    )
                    return Finding(
                        "quota",
                        Verdict.FAILED,
                        found,
                        "raise it, or lower the requests in values.yaml",
                    )
        return Finding("quota", Verdict.OK, "the smallest cluster fits")

    def _nodes(self) -> Finding:
        nodes = [node["status"].get("allocatable") or {} for node in self._api.find(KINDS["Node"])]
        for requests, number in _pods(self._documents):
            for resource, amount in requests.items():
                largest = max((quantities.parse(n.get(resource, 0)) for n in nodes), default=0.0)
                if number and amount > largest:
                    return Finding(
                        "nodes", Verdict.FAILED,
                        f"a pod needs {quantities.shown(resource, amount)} {resource}, and the "
                        f"largest node has {quantities.shown(resource, largest)}",
                        "lower the request in values.yaml, or add larger nodes",
                    )  # fmt: skip
        found = f"{len(nodes)} found; each pod fits on at least one"
        return Finding("nodes", Verdict.OK, found)

    def _cluster(self) -> Finding:
        found = Lifecycle(self._api, self._namespace, lambda _: None).snapshot()
        if found.ray is None and not found.pods:
            return Finding("cluster", Verdict.OK, f"none in namespace {self._namespace} yet")
        problems = found.problems()
        if problems:
            return Finding("cluster", Verdict.FAILED, "; ".join(problems[:_SHOWN]),
                           f"aenv cluster status --namespace {self._namespace}")  # fmt: skip
        return Finding("cluster", Verdict.OK, "everything is ready")


def _claims(documents: Sequence[Document]) -> list[dict[str, Any]]:
    found = [document for document in documents if document["kind"] == "PersistentVolumeClaim"]
    for document in documents:
        if document["kind"] == "StatefulSet" and document["spec"]["replicas"]:
            found += document["spec"].get("volumeClaimTemplates") or []
    return found


def _pods(documents: Sequence[Document]) -> list[tuple[Counter[str], int]]:
    """Return the requests of each pod of the smallest cluster, and the number of such pods."""
    found: list[tuple[Counter[str], int]] = []
    for document in documents:
        spec = document.get("spec") or {}
        if document["kind"] == "StatefulSet":
            found.append((quantities.requests_of(spec["template"]["spec"]), spec["replicas"]))
        elif document["kind"] == "RayCluster":
            head = quantities.requests_of(spec["headGroupSpec"]["template"]["spec"])
            options = spec.get("autoscalerOptions") or {}
            own = quantities.requests_of({"containers": [options]}) or _AUTOSCALER
            found.append((head + own, 1))
            for group in spec.get("workerGroupSpecs") or []:
                requests = quantities.requests_of(group["template"]["spec"])
                found.append((requests, group.get("minReplicas", 0)))
    return found


def failed(findings: Sequence[Finding]) -> bool:
    """Return whether a check failed."""
    return any(finding.verdict is Verdict.FAILED for finding in findings)
