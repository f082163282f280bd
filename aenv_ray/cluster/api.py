"""Requests of ``aenv cluster`` to the Kubernetes API: each for a permission that is named here.

Connection, certificates and tokens are those of the ``kubernetes`` package, which reads a kube
config or, in a pod, its service account.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from aenv_ray.cluster.objects import KINDS, Document, Kind
from aenv_ray.errors import AenvError, ConfigError, FabricUnavailable, Forbidden, Unauthorized

MANAGER: Final = "aenv-cluster"
"""What the API knows the fields by that we apply."""
_REQUEST_S: Final = 30.0
_TRIES: Final = 5
_PAUSE_S: Final = 1.0
_AGAIN: Final = frozenset({429, 502, 503, 504})
_NOT_INSTALLED: Final = "install it: pip install 'aenv-ray[kubernetes]'"


class Permission(NamedTuple):
    """What a rule of a Role grants."""

    verb: str
    resource: str
    group: str = ""
    is_namespaced: bool = True


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
"""What `apply` and `status` need, besides what the Roles grant: nobody grants what he has not."""
DELETE: Final = (*_all("list delete", *_OURS, "RayJob", "PriorityClass", "Secret", "Pod"),)
"""What `delete` needs, besides."""


class ClusterApi:
    """A connection to the API of one Kubernetes cluster; blocks.

    Args:
        context: Of the kube config. None: its current one, or in a pod the pod's own.
        configuration: Of ``kubernetes.client``, in place of what is found. None: it is found.

    Raises:
        ConfigError: The ``kubernetes`` package is missing, or there is no cluster to speak to.
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
                    f"no Kubernetes cluster is known here: {exc}",
                    hint="set KUBECONFIG to its kube config, or choose a context with --context",
                ) from exc
        configuration.retries = False  # one layer tries again: this one
        self._client: Any = client.ApiClient(configuration)
        self.host = str(configuration.host)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def get(self, kind: Kind, namespace: str | None, name: str) -> Document | None:
        """Return an object; None when there is none.

        Raises:
            AenvError: As `request`.
        """
        return self.request("GET", kind.path(namespace, name), missing=True)

    def find(
        self, kind: Kind, namespace: str | None = None, selector: str | None = None
    ) -> list[Document]:
        """Return objects; none where the cluster does not know the kind.

        Args:
            kind: Theirs.
            namespace: None: all.
            selector: By labels.

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
        self, kind: Kind, document: Document, *, force: bool = False, dry_run: bool = False
    ) -> Document:
        """Make an object be as it is written, on the server's side; again changes nothing.

        Args:
            kind: Its.
            document: With a name.
            force: Take fields over that others set.
            dry_run: Only check.

        Raises:
            AenvError: As `request`.
        """
        metadata = document["metadata"]
        query = {"fieldManager": MANAGER, "force": "true" if force else "false"}
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

    def create(self, kind: Kind, document: Document, *, dry_run: bool = False) -> Document | None:
        """Make an object; None when there is one of the name already.

        Raises:
            AenvError: As `request`.
        """
        path = kind.path(document.get("metadata", {}).get("namespace"))
        query = {"fieldManager": MANAGER} | ({"dryRun": "All"} if dry_run else {})
        return self.request("POST", path, query=query, body=document, existing=True)

    def patch(
        self, kind: Kind, namespace: str, name: str, operations: list[dict[str, Any]]
    ) -> Document:
        """Change an object by a JSON Patch.

        Raises:
            AenvError: As `request`.
        """
        content_type = "application/json-patch+json"
        path = kind.path(namespace, name)
        return self.request("PATCH", path, body=operations, content_type=content_type) or {}

    def delete(self, kind: Kind, namespace: str | None, name: str) -> None:
        """End an object, and what it owns after it; one that is not there does nothing.

        Not the other way round: of a RayCluster that waits for what it owns, the API would also end
        the job by which KubeRay removes Ray's records.

        Raises:
            AenvError: As `request`.
        """
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        self.request("DELETE", kind.path(namespace, name), body=body, missing=True)

    def may(self, permission: Permission, namespace: str) -> bool:
        """Return whether whoever asks has a permission.

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
        """Make one request, again while the API has no time for it.

        Args:
            method: Of HTTP.
            path: From the root.
            query: Parameters.
            body: JSON data, or a text.
            content_type: Of `body`.
            missing: Answer None where there is no such object.
            existing: Answer None where there is one already.

        Raises:
            Unauthorized: The API does not know us.
            Forbidden: We may not do this; the permission is named.
            ConfigError: It refuses what is asked, with its reason.
            FabricUnavailable: It cannot be reached, or has no time for long.
        """
        status, headers, data = self._once(method, path, query, body, content_type)
        for _ in range(_TRIES):
            if status not in _AGAIN:
                break
            time.sleep(min(float(headers.get("Retry-After") or _PAUSE_S), 10.0))
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
                f"the Kubernetes API at {self.host} cannot be reached: {exc}",
                hint="look at the cluster that your kube config names, or choose another context",
            ) from exc
        try:
            data = json.loads(text) if text else {}
        except ValueError:  # a proxy's own words
            data = {"message": text[:500].decode(errors="replace")}
        return response.status, response.headers, data


def _load(config: Any, configuration: Any, context: str | None) -> None:
    """Read a kube config where there is one, else a pod's service account."""
    named = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    if context is None and in_pod and not any(map(os.path.exists, named.split(os.pathsep))):
        config.load_incluster_config(client_configuration=configuration)
    else:
        # Named here: the package looks into the environment only when it is imported.
        config.load_kube_config(named, context=context, client_configuration=configuration)


def _refused(status: int, data: Mapping[str, Any], what: str) -> AenvError:
    """Return the error of an answer."""
    words = str(data.get("message") or data.get("reason") or f"HTTP {status}")
    if status == 401:
        return Unauthorized(f"the Kubernetes API does not know you: {words}")
    if status == 403 and "exceeded quota" in words:
        return ConfigError(
            words, hint="raise that ResourceQuota, or lower what values.yaml asks for"
        )
    if status == 403:
        return Forbidden(words, hint="see all that is missing with: aenv cluster doctor")
    if status == 409 and data.get("reason") == "Conflict":
        return ConfigError(
            words, hint="somebody else set these fields; take them over with --force"
        )
    if status == 404:
        return ConfigError(f"{what}: {words}")
    if status in _AGAIN or status >= 500:
        return FabricUnavailable(f"the Kubernetes API has no time for {what}: {words}")
    return ConfigError(words, hint="correct values.yaml or the manifest that it is in")
