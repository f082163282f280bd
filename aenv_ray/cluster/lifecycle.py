"""Applies, scales and deletes a cluster, in the order that its parts require."""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from aenv_ray.cluster import objects, quantities
from aenv_ray.cluster.api import ClusterApi
from aenv_ray.cluster.objects import KINDS, NAME, PART_OF, RAY_PODS, Document, title
from aenv_ray.cluster.readiness import Snapshot, label
from aenv_ray.cluster.upgrade import UpgradePlan, UpgradeStep
from aenv_ray.errors import ConfigError, DeadlineExceeded, FabricUnavailable, Forbidden
from aenv_ray.units import counted

POLL_S: Final = 2.0
"""Between two polls while waiting."""
ADMIN: Final = "aenv-admin"
_REGISTRY_SECRET: Final = "aenv-registry"
_SET_BY_AUTOSCALER: Final = ("replicas", "scaleStrategy")
_WORKER_END_S: Final = 30
"""Grace period of workers whose cluster is deleted; their own is as long as a drain may take."""
_DELETED_LAST: Final = (
    "StatefulSet", "Service", "PodDisruptionBudget", "RoleBinding", "Role", "ServiceAccount",
    "NetworkPolicy",
)  # fmt: skip
_CLAIMS: Final = (PART_OF, "app.kubernetes.io/name=aenv-redis")
"""Selectors of claims: those of a StatefulSet have only the labels of its selector."""

_SIZE_PATH: Final = "/spec/resources/requests/storage"

Say = Callable[[str], None]
T = TypeVar("T")


class Lifecycle:
    """Operations on the cluster in one namespace."""

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
        """Check that KubeRay is installed.

        Raises:
            ConfigError: It is not.
            AenvError: As `ClusterApi.request`.
        """
        kind = KINDS["RayCluster"]
        found = self._api.request("GET", f"/apis/{kind.api_version}", missing=True) or {}
        if kind.plural not in {row.get("name") for row in found.get("resources") or []}:
            raise ConfigError(
                "KubeRay is not installed: this Kubernetes has no kind RayCluster",
                hint="helm install kuberay-operator --version 1.7.0 "
                "--repo https://ray-project.github.io/kuberay-helm/ kuberay-operator",
            )

    def apply(
        self, documents: Sequence[Document], *, force: bool = False, dry_run: bool = False
    ) -> None:
        """Create or change the cluster; running pods are unaffected.

        Raises:
            ConfigError: KubeRay is not installed, the cluster runs another version of Ray, the API
                refuses an object, or the Secret with the password of the user's own Redis does not
                exist.
            AenvError: As `ClusterApi.request`.
        """
        ordered = objects.in_order(documents)
        self.check_kuberay()
        self._check_ray_version(ordered)
        for document in ordered:
            kind = objects.kind_of(document)
            if dry_run and kind.is_namespaced and not self._has_namespace():
                self._say(f"{title(document)}: not checked: the namespace does not exist yet")
                continue
            if kind.name == "RayCluster":
                live = self._api.get(kind, self._namespace, document["metadata"]["name"])
                # To the API each list is one field, which the autoscaler changes too.
                self._api.apply(kind, as_scaled(document, live), force=True, dry_run=dry_run)
            elif kind.name == "StatefulSet":
                live = self._api.get(kind, self._namespace, document["metadata"]["name"])
                self._enlarge_volumes(document, dry_run=dry_run)
                self._api.apply(kind, with_sizes_of(document, live), force=force, dry_run=dry_run)
            else:
                self._api.apply(kind, document, force=force, dry_run=dry_run)
            self._say(f"{title(document)}: {'valid' if dry_run else 'applied'}")
            if kind.name == "Namespace" and not dry_run:
                self._create_secrets(ordered)
        if not dry_run:
            self._report_missing_pull_secrets(ordered)

    def _check_ray_version(self, documents: Sequence[Document]) -> None:
        """Check that new workers can join the head that runs.

        Ray refuses nodes with another version of Ray or Python than the head. The manifests name
        only that of Ray.

        Raises:
            ConfigError: They cannot; nothing was changed.
        """
        live = self._api.get(KINDS["RayCluster"], self._namespace, NAME)
        has = None if live is None else live["spec"].get("rayVersion")
        for document in documents:
            is_ray = document["kind"] == "RayCluster"
            wanted = document["spec"].get("rayVersion") if is_ray else None
            if has and wanted and wanted != has:
                raise ConfigError(
                    f"the cluster in namespace {self._namespace} runs Ray {has}, and workers with "
                    f"Ray {wanted} cannot join it",
                    hint="end the samplings, then run: aenv cluster delete; aenv cluster apply. "
                    "All instances end; volumes, published environments and services are kept. "
                    f"If the image has Ray {has}, correct rayVersion instead",
                )

    def _enlarge_volumes(self, wanted: Document, *, dry_run: bool) -> None:
        """Let the existing claims of a StatefulSet ask for what it wants now.

        Kubernetes itself does so only for new claims.
        """
        sizes = {
            f"{template['metadata']['name']}-{wanted['metadata']['name']}-{number}": _size(template)
            for template in wanted["spec"].get("volumeClaimTemplates") or []
            for number in range(wanted["spec"].get("replicas", 1))
        }
        claims = {claim["metadata"]["name"]: _size(claim) for claim in self._claims()}
        for name, wants in sizes.items():
            has = claims.get(name, wants)
            if quantities.parse(wants) > quantities.parse(has):
                kind = KINDS["PersistentVolumeClaim"]
                change = [{"op": "replace", "path": _SIZE_PATH, "value": wants}]
                self._api.patch(kind, self._namespace, name, change, dry_run=dry_run)
                done = "can be enlarged" if dry_run else "enlarged"
                self._say(f"{kind.name} {name}: {done} from {has} to {wants}")
            elif quantities.parse(wants) < quantities.parse(has):
                self._say(f"PersistentVolumeClaim {name}: keeps {has}, because no volume shrinks")

    def _has_namespace(self) -> bool:
        return self._api.get(KINDS["Namespace"], None, self._namespace) is not None

    def _create_secrets(self, documents: Sequence[Document]) -> None:
        """Create the Secrets that do not exist; existing ones keep their content.

        Raises:
            ConfigError: The password of the user's own Redis is missing; only the user knows it.
        """
        key, _, value = PART_OF.partition("=")
        redis, is_ours = redis_secret(documents)
        if not (is_ours or self._may_have_secret(redis)):
            raise ConfigError(
                f"namespace {self._namespace} has no Secret {redis}, the password of your Redis",
                hint=f"kubectl --namespace {self._namespace} create secret generic {redis} "
                "--from-file=password=FILE, where FILE contains the password without a newline",
            )
        for name, (kind, data) in _new_secrets(redis if is_ours else None).items():
            metadata = {"name": name, "namespace": self._namespace, "labels": {key: value}}
            secret = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": metadata,
                "type": kind,
                "stringData": data,
            }
            created = self._api.create(KINDS["Secret"], secret)
            self._say(f"Secret {name}: {'created' if created is not None else 'exists, unchanged'}")

    def _report_missing_pull_secrets(self, documents: Sequence[Document]) -> None:
        for name in sorted(pull_secrets(documents) - {_REGISTRY_SECRET}):
            if not self._may_have_secret(name):
                self._say(
                    f"Secret {name}: missing; pods name it to pull images, and their nodes report "
                    "FailedToRetrieveImagePullSecret: create it, or remove the name"
                )

    def _may_have_secret(self, name: str) -> bool:
        """Return whether a Secret exists; true without the permission to see it."""
        try:
            return self._api.get(KINDS["Secret"], self._namespace, name) is not None
        except Forbidden:
            return True

    def snapshot(self) -> Snapshot:
        """Return the current state of the cluster.

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
        return Snapshot(
            self._api.get(KINDS["RayCluster"], self._namespace, NAME),
            self._api.get(KINDS["StatefulSet"], self._namespace, objects.REDIS),
            pods,
            self._claims(),
            self._events(),
        )

    def _events(self) -> list[Document]:
        """Return recent events; an empty list without the permission to read them."""
        try:
            return self._api.find(KINDS["Event"], self._namespace)
        except Forbidden:
            return []

    def _claims(self) -> list[Document]:
        kind = KINDS["PersistentVolumeClaim"]
        return [row for one in _CLAIMS for row in self._api.find(kind, self._namespace, one)]

    def await_ready(self, timeout_s: float) -> Snapshot:
        """Wait until everything is ready.

        Raises:
            DeadlineExceeded: Something is not ready in time; the message says what and why.
            FabricUnavailable: The API still does not answer at the deadline.
            AenvError: As `ClusterApi.request`.
        """
        return self._await(
            self.snapshot, lambda found: found.problems(), timeout_s, "was not ready"
        )

    def upgrade(
        self,
        documents: Sequence[Document],
        timeout_s: float | None = None,
        *,
        at_once: int = 1,
        everything: bool = False,
        force: bool = False,
    ) -> Snapshot:
        """Apply objects, and replace the pods that differ; no running instance is ended early.

        Idempotent: an upgrade that was interrupted is continued by another one.

        Args:
            documents: As for `apply`.
            timeout_s: Timeout of the replacement. None: `UpgradePlan.default_timeout_s`.
            at_once: Maximum number of workers that may be missing at a time.
            everything: Replace all pods. False: those with another image than the wanted one.
            force: As for `apply`.

        Returns:
            The state of the upgraded cluster.

        Raises:
            ConfigError: There is no cluster, or no RayCluster in `documents`; or as `apply`.
            DeadlineExceeded: It is not finished in time; the message says what is left.
            FabricUnavailable: The API still does not answer at the deadline.
            AenvError: As `ClusterApi.request`.
        """
        ray = next((one for one in documents if one["kind"] == "RayCluster"), None)
        if ray is None:
            raise ConfigError(
                "there is no RayCluster among the objects, so there is nothing to upgrade",
                hint="pass all manifests of the cluster, or use: aenv cluster apply",
            )
        if self._api.get(KINDS["RayCluster"], self._namespace, NAME) is None:
            raise ConfigError(
                f"there is no cluster in namespace {self._namespace}",
                hint="create it with: aenv cluster apply",
            )
        self.apply(documents, force=force)
        plan = UpgradePlan(ray, self.snapshot(), at_once=at_once, everything=everything)
        if timeout_s is None:
            timeout_s = plan.default_timeout_s
        self._say(f"waiting at most {timeout_s:.0f} s")

        def turn() -> tuple[Snapshot, UpgradeStep]:
            found = self.snapshot()
            step = plan.next(found)
            for pod in step.delete:
                self._delete(KINDS["Pod"], pod)
            return found, step

        return self._await(
            turn,
            lambda done: done[1].waits,
            timeout_s,
            "was not upgraded",
            lambda done: done[1].way_out,
        )[0]

    # --- changes --------------------------------------------------------------------------------

    def scale(self, group: str, least: int, most: int | None) -> dict[str, Any]:
        """Set the bounds between which the autoscaler scales a group of workers.

        Args:
            group: Name of the worker group.
            least: The minimum, which runs without demand.
            most: The maximum. None: unchanged, or `least` if that is greater.

        Returns:
            The group afterwards, as in `Snapshot.groups`.

        Raises:
            ConfigError: The group does not exist, or `most` is less than `least`.
            AenvError: As `ClusterApi.request`.
        """
        groups = self.snapshot().groups
        names = [row["group"] for row in groups]
        if group not in names:
            raise ConfigError(
                f"the cluster in namespace {self._namespace} has no worker group {group!r}",
                hint=f"groups: {', '.join(names)}"
                if names
                else "create the cluster with: aenv cluster apply",
            )
        place = names.index(group)
        most = max(least, groups[place]["max"] or 0) if most is None else most
        if most < least:
            raise ConfigError(
                f"the maximum of {counted(most, 'worker')} is below the minimum of {least}",
                hint="raise the maximum, or lower the minimum",
            )
        root = f"/spec/workerGroupSpecs/{place}"
        operations: list[dict[str, Any]] = [
            {"op": "test", "path": f"{root}/groupName", "value": group},
            {"op": "add", "path": f"{root}/minReplicas", "value": least},
            {"op": "add", "path": f"{root}/maxReplicas", "value": most},
        ]
        self._api.patch(KINDS["RayCluster"], self._namespace, NAME, operations)
        return groups[place] | {"min": least, "max": most}

    # --- down -----------------------------------------------------------------------------------

    def delete(self, timeout_s: float, *, storage: bool = False) -> list[str]:
        """Delete the cluster, and return once none of its pods is left.

        The RayCluster is deleted first, while Redis still runs, because KubeRay then removes Ray's
        records from Redis. Network policies are deleted last, so that they protect every sandbox.

        Args:
            timeout_s: Timeout of the whole deletion.
            storage: Also delete volumes and Secrets.

        Returns:
            The titles of the objects that remain.

        Raises:
            DeadlineExceeded: Something was not deleted in time; the message says what.
            FabricUnavailable: The API still does not answer at the deadline.
            AenvError: As `ClusterApi.request`.
        """
        end = time.monotonic() + timeout_s
        self._delete_all(KINDS["RayJob"])  # if the API does not answer at all, this fails at once
        self._retry(lambda: self._delete_all(KINDS["RayCluster"]), end)
        self._retry(self._end_workers, end)
        self._await(self._rays, lambda rays: rays, end - time.monotonic(), "was not deleted")
        self._retry(lambda: self._delete_all(KINDS["Pod"], objects.SANDBOXES), end)
        self._retry(lambda: self._delete_all(KINDS["StatefulSet"]), end)
        left_s = end - time.monotonic()
        self._await(self._ends, lambda pods: pods, left_s, "still had pods")
        return self._retry(lambda: self._delete_rest(storage), end)

    def _end_workers(self) -> None:
        for pod in self.snapshot().pods:
            if label(pod, "ray.io/node-type") == "worker":  # nobody waits for its instances
                name = pod["metadata"]["name"]
                self._api.delete(KINDS["Pod"], self._namespace, name, grace_s=_WORKER_END_S)

    def _delete_rest(self, storage: bool) -> list[str]:
        """Delete what has no pods; return the titles of the objects that remain."""
        for name in _DELETED_LAST:
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
        """Return the RayClusters that still exist, and what they wait for."""
        rows = self._api.find(KINDS["RayCluster"], self._namespace, PART_OF)
        return [
            f"RayCluster {row['metadata']['name']}: waits for "
            f"{', '.join(row['metadata'].get('finalizers') or ['its pods'])}"
            for row in rows
        ]

    def _ends(self) -> list[str]:
        return [f"pod {pod['metadata']['name']} is ending" for pod in self.snapshot().pods]

    def _delete_all(self, kind: objects.ObjectKind, selector: str = PART_OF) -> None:
        for document in self._api.find(kind, self._namespace, selector):
            self._delete(kind, document)

    def _delete(self, kind: objects.ObjectKind, document: Document) -> None:
        metadata = document["metadata"]
        self._api.delete(kind, metadata.get("namespace"), metadata["name"])
        self._say(f"{kind.name} {metadata['name']}: deleted")

    def _delete_classes(self) -> None:
        """Delete the priority classes, which all namespaces share, with the last cluster."""
        kind = KINDS["PriorityClass"]
        try:
            others = self._api.find(KINDS["RayCluster"], None, PART_OF)
        except Forbidden:
            self._say("PriorityClasses: kept, because clusters in other namespaces may use them")
            return
        if others:
            where = others[0]["metadata"]["namespace"]
            self._say(f"PriorityClasses: kept for the cluster in namespace {where}")
            return
        for document in self._api.find(kind, None, PART_OF):
            self._delete(kind, document)

    def _retry(self, act: Callable[[], T], end: float) -> T:
        """Return what `act` returns; while the API does not answer, try again until `end`.

        Raises:
            FabricUnavailable: The API still does not answer at `end`.
            AenvError: What `act` raises otherwise.
        """
        is_told = False
        while True:
            try:
                return act()
            except FabricUnavailable as exc:
                if time.monotonic() >= end:
                    raise
                if not is_told:
                    self._say(f"waiting: {exc.message}")
                    is_told = True
            self._pause(POLL_S)

    def _await(
        self,
        poll: Callable[[], T],
        problems: Callable[[T], list[str]],
        timeout_s: float,
        what: str,
        way_out: Callable[[T], str] = lambda _: "find the cause with: aenv cluster doctor",
    ) -> T:
        """Poll until no problem is left, reporting each new one."""
        end = time.monotonic() + timeout_s
        reported: list[str] = []
        while True:
            found = self._retry(poll, end)
            remaining = problems(found)
            if not remaining:
                return found
            for line in remaining:
                if line not in reported:
                    self._say(f"waiting: {line}")
            reported = remaining
            if time.monotonic() >= end:
                raise DeadlineExceeded(
                    f"the cluster in namespace {self._namespace} {what} in time: "
                    + "; ".join(remaining),
                    hint=way_out(found),
                )
            self._pause(POLL_S)


def redis_secret(documents: Sequence[Document]) -> tuple[str, bool]:
    """Return the Secret with the password of Redis, and whether that Redis is among the objects."""
    name, is_ours = objects.REDIS, False
    for document in documents:
        spec = document.get("spec") or {}
        if document["kind"] == "RayCluster":
            password = (spec.get("gcsFaultToleranceOptions") or {}).get("redisPassword") or {}
            name = password.get("valueFrom", {}).get("secretKeyRef", {}).get("name", name)
        elif document["kind"] == "StatefulSet" and document["metadata"]["name"] == objects.REDIS:
            is_ours = spec.get("replicas", 1) > 0
    return name, is_ours


def _new_secrets(redis: str | None) -> dict[str, tuple[str, dict[str, str]]]:
    """Return type and content of each Secret of a new cluster, by name.

    The registry Secret has no login. It exists because nodes report missing pull secrets.

    Args:
        redis: The Secret with the password of the cluster's Redis. None: it has none of its own.
    """
    registry = {".dockerconfigjson": '{"auths":{}}'}
    password = {} if redis is None else {redis: ("Opaque", {"password": secrets.token_hex(32)})}
    return {
        **password,
        ADMIN: ("Opaque", {"token": f"aenv_{secrets.token_urlsafe(32)}"}),
        _REGISTRY_SECRET: ("kubernetes.io/dockerconfigjson", registry),
    }


def pull_secrets(documents: Iterable[Any]) -> set[str]:
    """Return the names of the Secrets with which pods in documents, and sandboxes, pull images."""
    found: set[str] = set()
    for each in documents:
        if isinstance(each, Mapping):
            found |= {str(secret["name"]) for secret in each.get("imagePullSecrets") or ()}
            if each.get("name") == "AENV_KUBERNETES_PULL_SECRETS":
                found |= set(filter(None, map(str.strip, str(each.get("value") or "").split(","))))
            found |= pull_secrets(each.values())
        elif isinstance(each, list):
            found |= pull_secrets(each)
    return found


def with_sizes_of(wanted: Document, live: Mapping[str, Any] | None) -> Document:
    """Return the wanted StatefulSet with the sizes of volumes of the live one.

    They are immutable there, and count only for new claims.
    """
    result = copy.deepcopy(wanted)
    templates = (live or {}).get("spec", {}).get("volumeClaimTemplates") or []
    sizes = {template["metadata"]["name"]: _size(template) for template in templates}
    for template in result["spec"].get("volumeClaimTemplates") or []:
        name = template["metadata"]["name"]
        if name in sizes:
            template["spec"]["resources"]["requests"]["storage"] = sizes[name]
    return result


def _size(claim: Mapping[str, Any]) -> str:
    """Return the size that a claim, or a template of claims, asks for."""
    requests = (claim["spec"].get("resources") or {}).get("requests") or {}
    return str(requests.get("storage", 0))


def as_scaled(wanted: Document, live: Mapping[str, Any] | None) -> Document:
    """Return the wanted RayCluster with the replica counts that the autoscaler has set."""
    result = copy.deepcopy(wanted)
    groups = {g["groupName"]: g for g in (live or {}).get("spec", {}).get("workerGroupSpecs") or []}
    for group in result["spec"].get("workerGroupSpecs") or []:
        decided = groups.get(group["groupName"], {})
        group.update({key: decided[key] for key in _SET_BY_AUTOSCALER if key in decided})
        if "replicas" in decided:
            bounds = group.get("minReplicas", 0), group.get("maxReplicas", decided["replicas"])
            group["replicas"] = min(max(decided["replicas"], bounds[0]), bounds[1])
    return result
