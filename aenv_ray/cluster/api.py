"""The Kubernetes API as ``aenv cluster`` uses it, and the permissions that it needs for that.

The ``kubernetes`` package provides connections, certificates and tokens. It reads a kube config or,
in a pod, the service account.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from aenv_ray.addresses import retry_after_s
from aenv_ray.cluster.objects import KINDS, Document, ObjectKind
from aenv_ray.engines.kubernetes.permissions import Permission
from aenv_ray.errors import AenvError, ConfigError, FabricUnavailable, Forbidden, Unauthorized

FIELD_MANAGER: Final = "aenv-cluster"
"""Owner of the fields that server-side apply sets."""
_REQUEST_S: Final = 30.0
_TRIES: Final = 5
_PAUSE_S: Final = 1.0
_RETRIED: Final = frozenset({429, 502, 503, 504})
_NOT_INSTALLED: Final = "install it: pip install 'aenv-ray[kubernetes]'"


def _all(verbs: str, *kinds: str) -> list[Permission]:
    return [
        Permission(verb, KINDS[name].plural, KINDS[name].group, KINDS[name].is_namespaced)
        for name in kinds
        for verb in verbs.split()
    ]


_OURS: Final = (
    "ServiceAccount", "Role", "RoleBinding", "NetworkPolicy", "PodDisruptionBudget",
    "PersistentVolumeClaim", "Service", "StatefulSet", "RayCluster",
)  # fmt: skip
APPLY: Final = (
    *_all("create patch", "Namespace", "PriorityClass", *_OURS),
    *_all("get", "Namespace", "StatefulSet", "RayCluster"),
    *_all("create", "Secret"),
    *_all("list", "Pod", "PersistentVolumeClaim", "Event"),
)
"""What `apply` and `status` need, in addition to the permissions that the Roles grant: the API lets
users grant only permissions that they have."""
DELETE: Final = (*_all("list delete", *_OURS, "RayJob", "PriorityClass", "Secret", "Pod"),)
"""What `delete` needs in addition."""


class ClusterApi:
    """A blocking client of the API of one Kubernetes cluster.

    Args:
        context: Context of the kube config. None: the current one, or the service account in a pod.
        configuration: For ``kubernetes.client``. None: from the kube config or service account.

    Raises:
        ConfigError: The ``kubernetes`` package is missing, or no cluster is configured.
    """

    def __init__(self, context: str | None = None, configuration: Any = None) -> None:
        try:
            from kubernetes import client, config
        except ImportError as exc:
            raise ConfigError(
                "aenv cluster needs the package `kubernetes`", hint=_NOT_INSTALLED
            ) from exc
        if configuration is None:
            configuration = client.Configuration()
            try:
                _load(config, configuration, context)
            except (config.ConfigException, OSError) as exc:
                raise ConfigError(
                    f"no Kubernetes cluster is configured: {exc}",
                    hint="set KUBECONFIG to its kube config, or choose a context with --context",
                ) from exc
        configuration.retries = False  # this class retries
        self._client: Any = client.ApiClient(configuration)
        self.host = str(configuration.host)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def get(self, kind: ObjectKind, namespace: str | None, name: str) -> Document | None:
        """Return an object, or None if it does not exist.

        Raises:
            AenvError: As `request`.
        """
        return self.request("GET", kind.path(namespace, name), missing=True)

    def find(
        self, kind: ObjectKind, namespace: str | None = None, selector: str | None = None
    ) -> list[Document]:
        """Return the objects of a kind; an empty list if the cluster does not have the kind.

        Without `namespace` those of all namespaces, without a label `selector` all of them.

        Raises:
            AenvError: As `request`.
        """
        query = {"limit": "500"} | ({"labelSelector": selector} if selector else {})
        found: list[Document] = []
        while True:
            page = self.request("GET", kind.path(namespace), query=query, missing=True) or {}
            found += page.get("items") or []
            query["continue"] = str(page.get("metadata", {}).get("continue") or "")
            if not query["continue"]:
                return found

    def apply(
        self, kind: ObjectKind, document: Document, *, force: bool = False, dry_run: bool = False
    ) -> Document:
        """Create or change an object by server-side apply; idempotent.

        Raises:
            AenvError: As `request`.
        """
        metadata = document["metadata"]
        query = {"fieldManager": FIELD_MANAGER, "force": "true" if force else "false"}
        if dry_run:
            query["dryRun"] = "All"
        done = self.request(
            "PATCH",
            kind.path(metadata.get("namespace"), metadata["name"]),
            query=query,
            body=json.dumps(document),  # JSON is YAML
            content_type="application/apply-patch+yaml",
        )
        return done or {}

    def create(
        self, kind: ObjectKind, document: Document, *, dry_run: bool = False
    ) -> Document | None:
        """Create an object; return None if one of that name exists.

        Raises:
            AenvError: As `request`.
        """
        path = kind.path(document.get("metadata", {}).get("namespace"))
        query = {"fieldManager": FIELD_MANAGER} | ({"dryRun": "All"} if dry_run else {})
        return self.request("POST", path, query=query, body=document, existing=True)

    def patch(
        self,
        kind: ObjectKind,
        namespace: str,
        name: str,
        operations: list[dict[str, Any]],
        *,
        dry_run: bool = False,
    ) -> Document:
        """Change an object by a JSON Patch.

        Raises:
            AenvError: As `request`.
        """
        content_type = "application/json-patch+json"
        done = self.request(
            "PATCH",
            kind.path(namespace, name),
            query={"dryRun": "All"} if dry_run else {},
            body=operations,
            content_type=content_type,
        )
        return done or {}

    def delete(
        self, kind: ObjectKind, namespace: str | None, name: str, *, grace_s: int | None = None
    ) -> None:
        """Delete an object, and then what it owns; an object that does not exist is not an error.

        `grace_s` replaces the grace period of a pod, also of one that is ending, if it is shorter.

        The order matters: deleting what a RayCluster owns first would also delete the job with
        which KubeRay removes Ray's records.

        Raises:
            AenvError: As `request`.
        """
        body: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
        body["propagationPolicy"] = "Background"
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        self.request("DELETE", kind.path(namespace, name), body=body, missing=True)

    def may(self, permission: Permission, namespace: str) -> bool:
        """Return whether the caller has a permission.

        Raises:
            AenvError: As `request`.
        """
        attributes = {"verb": permission.verb, "resource": permission.resource}
        attributes["group"] = permission.group
        if permission.is_namespaced:
            attributes["namespace"] = namespace
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        answer = self.request("POST", path, body=review) or {}
        return bool(answer.get("status", {}).get("allowed"))

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        missing: bool = False,
        existing: bool = False,
    ) -> dict[str, Any] | None:
        """Make a request, retrying while the API is overloaded.

        Args:
            method: HTTP method.
            path: From the root.
            query: Query parameters.
            body: JSON data, or a text.
            content_type: The content type of `body`.
            missing: Return None if the object does not exist.
            existing: Return None if the object exists.

        Raises:
            Unauthorized: The API does not accept the credentials.
            Forbidden: A permission is missing; the message names it.
            ConfigError: The API refuses the request; the message has its reason.
            FabricUnavailable: The API is unreachable, or stayed overloaded.
        """
        status, headers, data = self._once(method, path, query, body, content_type)
        for _ in range(_TRIES):
            if status not in _RETRIED:
                break
            time.sleep(min(retry_after_s(headers, _PAUSE_S), 10.0))
            status, headers, data = self._once(method, path, query, body, content_type)
        if status < 300:
            return data
        if (status == 404 and missing) or (
            status == 409 and existing and data.get("reason") == "AlreadyExists"
        ):
            return None
        raise _refused(status, data, f"{method} {path}")

    def _once(
        self, method: str, path: str, query: Mapping[str, str] | None, body: Any, content_type: str
    ) -> tuple[int, Mapping[str, str], dict[str, Any]]:
        import urllib3
        from kubernetes.client import ApiException

        verb, url, headers, sent, form = self._client.param_serialize(
            method,
            path,
            query_params=[(name, value) for name, value in (query or {}).items() if value],
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            response = self._client.rest_client.request(
                verb, url, headers=headers, body=sent, post_params=form,
                _request_timeout=_REQUEST_S,
            )  # fmt: skip
            text = response.read()
        except (urllib3.exceptions.HTTPError, ApiException, OSError) as exc:
            raise FabricUnavailable(
                f"the Kubernetes API at {self.host} is unreachable: {exc}",
                hint="check the cluster in your kube config, or choose another with --context",
            ) from exc
        try:
            data = json.loads(text) if text else {}
        except ValueError:  # the answer of a proxy
            data = {"message": text[:500].decode(errors="replace")}
        return response.status, response.headers, data


def _load(config: Any, configuration: Any, context: str | None) -> None:
    """Read the kube config if it exists, else the pod's service account."""
    named = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    if context is None and in_pod and not any(map(os.path.exists, named.split(os.pathsep))):
        config.load_incluster_config(client_configuration=configuration)
    else:
        # Passed explicitly: the package reads the environment only when it is imported.
        config.load_kube_config(named, context=context, client_configuration=configuration)


def _refused(status: int, data: Mapping[str, Any], what: str) -> AenvError:
    """Return the error for an answer of the API."""
    words = str(data.get("message") or data.get("reason") or f"HTTP {status}")
    if status == 401:
        return Unauthorized(
            f"the Kubernetes API does not accept your credentials: {words}",
            hint="log in again, or choose another context with --context",
        )
    if status == 403 and "exceeded quota" in words:
        return ConfigError(
            words, hint="raise that ResourceQuota, or lower the requests in values.yaml"
        )
    if status == 403 and "must support resize" in words:
        return ConfigError(
            words,
            hint="use the old size in values.yaml, or set allowVolumeExpansion in the StorageClass "
            "if its provisioner can enlarge volumes; otherwise back up the hub, delete the cluster "
            "with its storage, and restore the hub to a new one",
        )
    if status == 403:
        return Forbidden(words, hint="list all missing permissions with: aenv cluster doctor")
    if status == 409 and data.get("reason") == "Conflict":
        return ConfigError(
            words, hint="another manager owns these fields; take them over with --force"
        )
    if status == 404:
        return ConfigError(
            f"{what}: {words}",
            hint="check --namespace, and run `aenv cluster doctor` for what the cluster lacks",
        )
    if status in _RETRIED or status >= 500:
        return FabricUnavailable(f"the Kubernetes API is overloaded: {what}: {words}")
    return ConfigError(words, hint="correct values.yaml, or the manifest of that object")
