"""The kinds of a cluster's objects: their paths in the API, and the order to apply them in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from aenv_ray.errors import ConfigError

NAME: Final = "aenv"
"""Name of the RayCluster; there is one per namespace."""
PART_OF: Final = "app.kubernetes.io/part-of=aenv-ray"
"""Selects the objects of a cluster."""
RAY_PODS: Final = f"ray.io/cluster={NAME}"
"""Selects the pods that KubeRay creates."""
SANDBOXES: Final = f"{PART_OF},app.kubernetes.io/component=sandbox"
REDIS: Final = "aenv-redis"
GATEWAY: Final = "aenv-gateway"

Document = dict[str, Any]


class ObjectKind(NamedTuple):
    """A kind of objects, and its path in the API."""

    name: str
    group: str
    """"" for the core group."""
    version: str
    plural: str
    is_namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The ``apiVersion`` of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None) -> str:
        """Return the path of one object, or of all objects.

        Args:
            namespace: None: all namespaces, or a kind without namespaces.
            name: None: all objects.
        """
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"
        scope = f"/namespaces/{namespace}" if self.is_namespaced and namespace else ""
        return f"{root}{scope}/{self.plural}" + (f"/{name}" if name else "")


KINDS: Final[Mapping[str, ObjectKind]] = {
    kind.name: kind
    for kind in (
        ObjectKind("Namespace", "", "v1", "namespaces", False),
        ObjectKind("PriorityClass", "scheduling.k8s.io", "v1", "priorityclasses", False),
        ObjectKind("ServiceAccount", "", "v1", "serviceaccounts"),
        ObjectKind("Secret", "", "v1", "secrets"),
        ObjectKind("ConfigMap", "", "v1", "configmaps"),
        ObjectKind("Role", "rbac.authorization.k8s.io", "v1", "roles"),
        ObjectKind("RoleBinding", "rbac.authorization.k8s.io", "v1", "rolebindings"),
        ObjectKind("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies"),
        ObjectKind("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets"),
        ObjectKind("PersistentVolumeClaim", "", "v1", "persistentvolumeclaims"),
        ObjectKind("Service", "", "v1", "services"),
        ObjectKind("StatefulSet", "apps", "v1", "statefulsets"),
        ObjectKind("RayCluster", "ray.io", "v1", "rayclusters"),
        ObjectKind("RayJob", "ray.io", "v1", "rayjobs"),
        ObjectKind("Pod", "", "v1", "pods"),
        ObjectKind("Event", "", "v1", "events"),
        ObjectKind("Node", "", "v1", "nodes", False),
        ObjectKind("ResourceQuota", "", "v1", "resourcequotas"),
        ObjectKind("StorageClass", "storage.k8s.io", "v1", "storageclasses", False),
        ObjectKind("Deployment", "apps", "v1", "deployments"),
    )
}
"""By name, in the order in which to apply them."""
_ORDER: Final = tuple(KINDS)


def kind_of(document: Mapping[str, Any]) -> ObjectKind:
    """Return the kind of an object.

    Raises:
        ConfigError: A cluster has no such kind.
    """
    kind = KINDS.get(str(document.get("kind")))
    if kind is None or kind.api_version != document.get("apiVersion"):
        raise ConfigError(
            f"`aenv cluster` does not apply {document.get('apiVersion')} {document.get('kind')}",
            hint="apply your own objects with kubectl",
        )
    return kind


def in_order(documents: Iterable[Document]) -> list[Document]:
    """Return objects in the order in which to apply them."""
    return sorted(documents, key=lambda document: _ORDER.index(kind_of(document).name))


def title(document: Mapping[str, Any]) -> str:
    """Return kind and name of an object, for people."""
    return f"{document['kind']} {document['metadata']['name']}"
