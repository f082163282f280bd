"""Bringing a cluster up, changing it, and taking it down, in the order that its parts need."""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from aenv_ray.cluster import objects
from aenv_ray.cluster.api import ClusterApi
from aenv_ray.cluster.objects import KINDS, NAME, PART_OF, RAY_PODS, Document, title
from aenv_ray.cluster.readiness import Look
from aenv_ray.errors import ConfigError, DeadlineExceeded, Forbidden

LOOK_S: Final = 2.0
"""Between two looks at a cluster that comes or goes."""
ADMIN: Final = "aenv-admin"
_REDIS_SECRET: Final = "aenv-redis"
_REGISTRY_SECRET: Final = "aenv-registry"
_BY_AUTOSCALER: Final = ("replicas", "scaleStrategy")
_TOOK_WITH_IT: Final = (
    "StatefulSet", "Service", "PodDisruptionBudget", "RoleBinding", "Role", "ServiceAccount",
    "NetworkPolicy",
)  # fmt: skip
_CLAIMS: Final = (PART_OF, "app.kubernetes.io/name=aenv-redis")
"""Kubernetes gives the claims of a StatefulSet its selector's labels, and no others."""

Say = Callable[[str], None]
T = TypeVar("T")


class Lifecycle:
    """What is done with the cluster of one namespace.

    Args:
        api: Of the Kubernetes cluster.
        namespace: Whose.
        say: Told what happens.
        pause: Waits for some seconds; `time.sleep`, but for tests.
    """

    def __init__(
        self,
        api: ClusterApi,
        namespace: str,
        say: Say,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._say = say
        self._pause = pause

    # --- up -------------------------------------------------------------------------------------

    def check_kuberay(self) -> None:
        """Return if the cluster knows RayClusters.

        Raises:
            ConfigError: It does not.
            AenvError: As `ClusterApi.request`.
        """
        kind = KINDS["RayCluster"]
        found = self._api.request("GET", f"/apis/{kind.api_version}", missing=True) or {}
        if kind.plural not in {row.get("name") for row in found.get("resources") or []}:
            raise ConfigError(
                "this Kubernetes has no RayCluster: KubeRay is not installed",
                hint="helm install kuberay-operator --version 1.7.0 "
                "--repo https://ray-project.github.io/kuberay-helm/ kuberay-operator",
            )

    def apply(
        self, documents: Sequence[Document], *, force: bool = False, dry_run: bool = False
    ) -> None:
        """Make the cluster be as it is written; what runs goes on.

        Args:
            documents: Its objects.
            force: Take over fields that others set.
            dry_run: Have the API check everything, and change nothing.

        Raises:
            ConfigError: KubeRay is not there, or the API refuses an object.
            AenvError: As `ClusterApi.request`.
        """
        ordered = objects.in_order(documents)
        self.check_kuberay()
        for document in ordered:
            kind = objects.kind_of(document)
            if dry_run and kind.is_namespaced and not self._has_namespace():
                self._say(f"{title(document)}: not checked, there is no namespace yet")
                continue
            if kind.name == "RayCluster":
                live = self._api.get(kind, self._namespace, document["metadata"]["name"])
                # Its lists are one field each for the API, and the autoscaler changes them too.
                self._api.apply(kind, as_scaled(document, live), force=True, dry_run=dry_run)
            else:
                self._api.apply(kind, document, force=force, dry_run=dry_run)
            self._say(f"{title(document)}: {'would be ' if dry_run else ''}as written")
            if kind.name == "Namespace" and not dry_run:
                self._create_secrets()

    def _has_namespace(self) -> bool:
        return self._api.get(KINDS["Namespace"], None, self._namespace) is not None

    def _create_secrets(self) -> None:
        """Create the Secrets that do not exist; existing ones keep their content."""
        label, _, value = PART_OF.partition("=")
        for name, (kind, data) in _new_secrets().items():
            metadata = {"name": name, "namespace": self._namespace, "labels": {label: value}}
            secret = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": metadata,
                "type": kind,
                "stringData": data,
            }
            created = self._api.create(KINDS["Secret"], secret)
            self._say(f"Secret {name}: {'created' if created is not None else 'exists, unchanged'}")

    def look(self) -> Look:
        """Return how the cluster is.

        Raises:
            AenvError: As `ClusterApi.request`.
        """
        pods = self._api.find(KINDS["Pod"], self._namespace, PART_OF)
        known = {pod["metadata"]["name"] for pod in pods}
        pods += [
            pod
            for pod in self._api.find(KINDS["Pod"], self._namespace, RAY_PODS)
            if pod["metadata"]["name"] not in known
        ]
        return Look(
            self._api.get(KINDS["RayCluster"], self._namespace, NAME),
            self._api.get(KINDS["StatefulSet"], self._namespace, objects.REDIS),
            pods,
            self._claims(),
            self._events(),
        )

    def _events(self) -> list[Document]:
        """Return what went wrong of late; nothing where that may not be read."""
        try:
            return self._api.find(KINDS["Event"], self._namespace)
        except Forbidden:
            return []

    def _claims(self) -> list[Document]:
        kind = KINDS["PersistentVolumeClaim"]
        return [row for label in _CLAIMS for row in self._api.find(kind, self._namespace, label)]

    def await_ready(self, timeout_s: float) -> Look:
        """Return once everything is ready.

        Raises:
            DeadlineExceeded: Something is not; it says what, and why.
            AenvError: As `ClusterApi.request`.
        """
        return self._await(self.look, lambda look: look.lacks(), timeout_s, "is not ready")

    # --- changes --------------------------------------------------------------------------------

    def scale(self, group: str, least: int, most: int | None) -> dict[str, Any]:
        """Bound the workers of a group; the autoscaler does the rest.

        Args:
            group: Its name.
            least: Workers that are there without need.
            most: Workers that there are at most. None: as it is, or `least` where that is more.

        Returns:
            The group as it is then, in `Look.groups`' form.

        Raises:
            ConfigError: There is no such group, or `most` is less than `least`.
            AenvError: As `ClusterApi.request`.
        """
        look = self.look()
        names = [row["group"] for row in look.groups]
        if group not in names:
            raise ConfigError(
                f"the cluster in namespace {self._namespace} has no worker group {group!r}",
                hint=f"groups: {', '.join(names)}"
                if names
                else "make one with: aenv cluster apply",
            )
        place = names.index(group)
        most = max(least, look.groups[place]["max"] or 0) if most is None else most
        if most < least:
            raise ConfigError(f"at most {most} workers, and at least {least}: that cannot be")
        root = f"/spec/workerGroupSpecs/{place}"
        operations: list[dict[str, Any]] = [
            {"op": "test", "path": f"{root}/groupName", "value": group},
            {"op": "add", "path": f"{root}/minReplicas", "value": least},
            {"op": "add", "path": f"{root}/maxReplicas", "value": most},
        ]
        self._api.patch(KINDS["RayCluster"], self._namespace, NAME, operations)
        return look.groups[place] | {"min": least, "max": most}

    # --- down -----------------------------------------------------------------------------------

    def delete(self, timeout_s: float, *, storage: bool = False) -> list[str]:
        """Take the cluster down; returns once no pod of it is left.

        The RayCluster goes first: KubeRay then removes Ray's records from Redis, which must live.
        Network policies go last, so that no sandbox is ever without.

        Args:
            timeout_s: For all of it.
            storage: Delete what was stored, and the passwords.

        Returns:
            What is kept, as titles.

        Raises:
            DeadlineExceeded: Something does not end; it says what.
            AenvError: As `ClusterApi.request`.
        """
        end = time.monotonic() + timeout_s
        for kind in (KINDS["RayJob"], KINDS["RayCluster"]):
            self._delete_all(kind)
        self._await(self._rays, lambda rays: rays, end - time.monotonic(), "does not end")
        self._delete_all(KINDS["Pod"], objects.SANDBOXES)
        self._delete_all(KINDS["StatefulSet"])
        left_s = end - time.monotonic()
        self._await(self._ends, lambda pods: pods, left_s, "has pods that do not end")
        for name in _TOOK_WITH_IT:
            self._delete_all(KINDS[name])
        self._delete_classes()
        stored = [(KINDS["PersistentVolumeClaim"], claim) for claim in self._claims()]
        stored += [
            (KINDS["Secret"], s) for s in self._api.find(KINDS["Secret"], self._namespace, PART_OF)
        ]
        if storage:
            for kind, document in stored:
                self._delete(kind, document)
            return []
        return [f"{kind.name} {document['metadata']['name']}" for kind, document in stored]

    def _rays(self) -> list[str]:
        """Return the RayClusters of ours that are still there, with why."""
        rows = self._api.find(KINDS["RayCluster"], self._namespace, PART_OF)
        return [
            f"RayCluster {row['metadata']['name']}: waits for "
            f"{', '.join(row['metadata'].get('finalizers') or ['its pods'])}"
            for row in rows
        ]

    def _ends(self) -> list[str]:
        return [f"pod {pod['metadata']['name']} is ending" for pod in self.look().pods]

    def _delete_all(self, kind: objects.Kind, selector: str = PART_OF) -> None:
        for document in self._api.find(kind, self._namespace, selector):
            self._delete(kind, document)

    def _delete(self, kind: objects.Kind, document: Document) -> None:
        metadata = document["metadata"]
        self._api.delete(kind, metadata.get("namespace"), metadata["name"])
        self._say(f"{kind.name} {metadata['name']}: deleted")

    def _delete_classes(self) -> None:
        """Delete the priority classes, which all namespaces share, after the last cluster."""
        kind = KINDS["PriorityClass"]
        try:
            others = self._api.find(KINDS["RayCluster"], None, PART_OF)
        except Forbidden:
            self._say("PriorityClasses: kept, for clusters in other namespaces may need them")
            return
        if others:
            where = others[0]["metadata"]["namespace"]
            self._say(f"PriorityClasses: kept for the cluster in namespace {where}")
            return
        for document in self._api.find(kind, None, PART_OF):
            self._delete(kind, document)

    def _await(
        self, look: Callable[[], T], lacks: Callable[[T], list[str]], timeout_s: float, what: str
    ) -> T:
        """Return a look that lacks nothing, saying what does whenever that changes."""
        end = time.monotonic() + timeout_s
        told: list[str] = []
        while True:
            found = look()
            missing = lacks(found)
            if not missing:
                return found
            for line in missing:
                if line not in told:
                    self._say(f"waiting: {line}")
            told = missing
            if time.monotonic() >= end:
                raise DeadlineExceeded(
                    f"the cluster in namespace {self._namespace} {what} after the time given: "
                    + "; ".join(missing),
                    hint="see what is wrong with: aenv cluster doctor",
                )
            self._pause(LOOK_S)


def _new_secrets() -> dict[str, tuple[str, dict[str, str]]]:
    """Return type and content of each Secret of a new cluster, by name.

    The one for registries has no login: a node reports each pull secret that does not exist.
    """
    registry = {".dockerconfigjson": '{"auths":{}}'}
    return {
        _REDIS_SECRET: ("Opaque", {"password": secrets.token_hex(32)}),
        ADMIN: ("Opaque", {"token": f"aenv_{secrets.token_urlsafe(32)}"}),
        _REGISTRY_SECRET: ("kubernetes.io/dockerconfigjson", registry),
    }


def as_scaled(wanted: Document, live: Mapping[str, Any] | None) -> Document:
    """Return a RayCluster as it is wanted, with the counts that its autoscaler decided."""
    result = copy.deepcopy(wanted)
    groups = {g["groupName"]: g for g in (live or {}).get("spec", {}).get("workerGroupSpecs") or []}
    for group in result["spec"].get("workerGroupSpecs") or []:
        decided = groups.get(group["groupName"], {})
        group.update({key: decided[key] for key in _BY_AUTOSCALER if key in decided})
        if "replicas" in decided:
            bounds = group.get("minReplicas", 0), group.get("maxReplicas", decided["replicas"])
            group["replicas"] = min(max(decided["replicas"], bounds[0]), bounds[1])
    return result
