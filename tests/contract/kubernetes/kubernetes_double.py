"""A Kubernetes API with KubeRay, as far as bringing a cluster up and down needs one.

It refuses as the real one does: schemas (strict), Pod Security, missing permissions and kinds,
conflicts of server-side apply. What controllers do afterwards, KubeRay's among them, has happened
when a request is answered, but for what a test holds back.
"""

from __future__ import annotations

import copy
import itertools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from aenv_ray.cluster import kustomize
from aenv_ray.cluster.objects import KINDS, Kind
from tests.cluster_schemas import schema_problems
from tests.emulators.kubernetes import kuberay
from tests.emulators.kubernetes.rules import violations

Object = dict[str, Any]
Key = tuple[str, str, str]
"""Plural, namespace or "", name."""
FINALIZER = "ray.io/gcs-ft-redis-cleanup-finalizer"
_VERBS = {"GET": "get", "POST": "create", "PATCH": "patch", "DELETE": "delete"}


class Refused(Exception):
    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class Double:
    """The API; `url` is known inside the ``with`` block.

    Attributes:
        objects: All of them.
        calls: Verb and plural of every request.
        forbidden: Pairs of verb and plural that are refused.
        kuberay: Its kinds are known.
        broken_images: Pods with them never start.
        busy: So many requests are answered 429.
        holds_rays: A RayCluster that is deleted stays, as when no operator runs.
    """

    def __init__(self) -> None:
        self.objects: dict[Key, Object] = {}
        self.calls: list[tuple[str, str]] = []
        self.forbidden: set[tuple[str, str]] = set()
        self.kuberay = True
        self.broken_images: set[str] = set()
        self.busy = 0
        self.holds_rays = False
        self.redis_outlived_ray = True
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        operator = {"name": "kuberay-operator", "namespace": "operators"}
        labels = {"app.kubernetes.io/name": "kuberay-operator"}
        self.add({"apiVersion": "apps/v1", "kind": "Deployment", "status": {"readyReplicas": 1},
                  "metadata": {**operator, "labels": labels}})  # fmt: skip
        self.add({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
                  "metadata": {"name": "standard", "annotations": {
                      "storageclass.kubernetes.io/is-default-class": "true"}}})  # fmt: skip
        self.add({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "one"},
                  "status": {"allocatable": {"cpu": "8", "memory": "32Gi"}}})  # fmt: skip

    def __enter__(self) -> Self:
        double = self

        class Handler(BaseHTTPRequestHandler):
            def _do(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                text = self.rfile.read(length).decode()
                status, headers, body = double.answer(
                    self.command, self.path, self.headers.get("Content-Type", ""), text
                )
                data = json.dumps(body).encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = do_DELETE = _do

            def log_message(self, *_: Any) -> None:
                """Stay quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(60)

    # --- what tests look at and do ------------------------------------------------------------

    def add(self, document: Object) -> Object:
        """Put an object there, as others do."""
        kind = KINDS[document["kind"]]
        body = copy.deepcopy(document)
        metadata = body["metadata"]
        metadata["uid"] = f"uid-{next(self._numbers)}"
        metadata["generation"] = 1
        metadata["creationTimestamp"] = f"2026-01-01T00:00:{next(self._numbers):02}Z"
        namespace = metadata.get("namespace", "") if kind.is_namespaced else ""
        self.objects[kind.plural, namespace, metadata["name"]] = body
        return body

    def all(self, plural: str) -> list[Object]:
        return [body for key, body in sorted(self.objects.items()) if key[0] == plural]

    # --- requests -----------------------------------------------------------------------------

    def answer(
        self, method: str, url: str, content_type: str, text: str
    ) -> tuple[int, dict[str, str], Object]:
        with self._lock:
            try:
                if self.busy:
                    self.busy -= 1
                    return 429, {"Retry-After": "0"}, {"message": "too many requests"}
                return 200, {}, self._route(method, url, content_type, text)
            except Refused as exc:
                body = {"kind": "Status", "reason": exc.reason, "message": str(exc)}
                return exc.status, {}, body

    def _route(self, method: str, url: str, content_type: str, text: str) -> Object:
        parts = urlsplit(url)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        body = json.loads(text) if text else None
        if parts.path == "/version":
            return {"gitVersion": "v1.34.1"}
        if parts.path.endswith("/selfsubjectaccessreviews"):
            wanted = body["spec"]["resourceAttributes"]
            pair = (wanted["verb"], wanted["resource"])
            return {"status": {"allowed": pair not in self.forbidden}}
        if parts.path == "/apis/ray.io/v1" and self.kuberay:
            return {"resources": [{"name": "rayclusters"}, {"name": "rayjobs"}]}
        kind, namespace, name = self._place(parts.path)
        verb = "list" if method == "GET" and not name else _VERBS[method]
        self.calls.append((verb, kind.plural))
        if (verb, kind.plural) in self.forbidden:
            raise Refused(403, "Forbidden", f"{kind.plural} is forbidden: cannot {verb} resource")
        if verb == "list":
            return self._list(kind, namespace, query.get("labelSelector", ""))
        key = (kind.plural, namespace, name)
        is_dry = query.get("dryRun") == "All"
        if verb == "create":
            return self._create(kind, body, is_dry)
        if verb == "patch" and content_type == "application/apply-patch+yaml":
            return self._apply(key, body, query, is_dry)
        if key not in self.objects:
            raise Refused(404, "NotFound", f'{kind.plural} "{name}" not found')
        if verb == "patch":
            self._check(patched := kustomize.json_patch(self.objects[key], body))
            self.objects[key] = patched
            self._reconcile()
        elif verb == "delete":
            self._delete(key)
        return self.objects.get(key, {})

    def _place(self, path: str) -> tuple[Kind, str, str]:
        words = path.strip("/").split("/")
        group, words = ("", words[2:]) if words[0] == "api" else (words[1], words[3:])
        namespace = ""
        if words[:1] == ["namespaces"] and len(words) > 2:
            namespace, words = words[1], words[2:]
        for kind in KINDS.values():
            known = self.kuberay or kind.group != "ray.io"
            if known and words and (kind.group, kind.plural) == (group, words[0]):
                return kind, namespace, words[1] if len(words) > 1 else ""
        raise Refused(404, "NotFound", "the server could not find the requested resource")

    def _list(self, kind: Kind, namespace: str, selector: str) -> Object:
        wanted = dict(term.split("=") for term in selector.split(",")) if selector else {}
        items = [
            body
            for (plural, where, _), body in sorted(self.objects.items())
            if plural == kind.plural
            and namespace in ("", where)
            and wanted.items() <= (body["metadata"].get("labels") or {}).items()
        ]
        return {"metadata": {}, "items": items}

    def _check(self, body: Object) -> None:
        plain = {key: value for key, value in body.items() if key not in {"status", "owners"}}
        found = schema_problems(plain)
        if found:
            raise Refused(422, "Invalid", f"{body['kind']} is invalid: {found[0]}")
        namespace = body["metadata"].get("namespace")
        if namespace and ("namespaces", "", namespace) not in self.objects:
            raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')

    def _create(self, kind: Kind, body: Object, is_dry: bool) -> Object:
        self._check(body)
        metadata = body["metadata"]
        if (kind.plural, metadata.get("namespace", ""), metadata["name"]) in self.objects:
            raise Refused(
                409, "AlreadyExists", f'{kind.plural} "{metadata["name"]}" already exists'
            )
        made = body if is_dry else self.add(body)
        self._reconcile()
        return made

    def _apply(self, key: Key, body: Object, query: dict[str, str], is_dry: bool) -> Object:
        """Server-side apply, with whole objects of a spec's first level as fields."""
        self._check(body)
        before = self.objects.get(key)
        owners: dict[str, str] = dict((before or {}).get("owners", {}))
        for field, value in (body.get("spec") or {}).items():
            owner = owners.get(field, query["fieldManager"])
            differs = (before or {}).get("spec", {}).get(field) != value
            if before and owner != query["fieldManager"] and differs and query["force"] != "true":
                raise Refused(409, "Conflict", f'conflict with "{owner}": .spec.{field}')
            owners[field] = query["fieldManager"]
        if is_dry:
            return body
        if before is None:
            before = self.add(body)
        keep = {name: before["metadata"][name] for name in ("uid", "creationTimestamp")}
        keep |= {"finalizers": before["metadata"].get("finalizers", [])}
        is_changed = before.get("spec") != body.get("spec")
        keep |= {"generation": before["metadata"]["generation"] + is_changed}
        after = {**before, **copy.deepcopy(body), "owners": owners}
        after["metadata"] = {**after["metadata"], **keep}
        self.objects[key] = after
        self._reconcile()
        return after

    # --- controllers --------------------------------------------------------------------------

    def _delete(self, key: Key) -> None:
        body = self.objects[key]
        if body["metadata"].get("finalizers"):
            body["metadata"]["deletionTimestamp"] = "2026-01-01T00:01:00Z"
        else:
            self._remove(key)
        self._reconcile()

    def _remove(self, key: Key) -> None:
        uid = self.objects.pop(key)["metadata"]["uid"]
        owned = [
            k for k, b in self.objects.items()
            if any(r["uid"] == uid for r in b["metadata"].get("ownerReferences", ()))
        ]  # fmt: skip
        for other in owned:
            if other in self.objects:
                self._remove(other)

    def _reconcile(self) -> None:
        for body in self.all("rayclusters"):
            if not self.holds_rays:
                self._ray(body)
        for body in self.all("rayjobs"):
            self._job(body)
        for body in self.all("statefulsets"):
            self._stateful(body)

    def _ray(self, ray: Object) -> None:
        namespace, spec = ray["metadata"]["namespace"], ray["spec"]
        key = ("rayclusters", namespace, ray["metadata"]["name"])
        if "deletionTimestamp" in ray["metadata"]:
            redis = self.objects.get(("statefulsets", namespace, "aenv-redis"))
            self.redis_outlived_ray = redis is not None  # its records are removed from there now
            self._remove(key)
            return
        if wrong := kuberay.faults(ray):
            self._event(ray, "InvalidRayClusterSpec", wrong[0])
            return
        ray["metadata"]["finalizers"] = [FINALIZER]
        self._pod(ray, "head", spec["headGroupSpec"]["template"], "headgroup", 0)
        for group in spec["workerGroupSpecs"]:
            wanted = min(max(group["replicas"], group["minReplicas"]), group["maxReplicas"])
            group["replicas"] = wanted
            ray.setdefault("owners", {})["workerGroupSpecs"] = "kuberay-autoscaler"
            for number in range(wanted):
                self._pod(ray, "worker", group["template"], group["groupName"], number)
        generation = ray["metadata"]["generation"]
        ray["status"] = {"state": "ready", "observedGeneration": generation}

    def _job(self, job: Object) -> None:
        """Submit a RayJob: a Kubernetes Job runs its submitter's pod to the end."""
        if "status" in job:
            return
        name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
        if wrong := kuberay.faults(job):
            job["status"] = {"jobDeploymentStatus": "ValidationFailed"}
            self._event(job, "InvalidRayJobSpec", wrong[0])
            return
        template = job["spec"]["submitterPodTemplate"]
        self._pod(job, "", template, f"{name}-submitter", 0)
        pod = self.objects["pods", namespace, f"{name}-submitter-0"]
        condition = {"type": "Ready", "status": "False", "reason": "PodCompleted"}
        pod["status"] = {"phase": "Succeeded", "conditions": [condition]}
        job["status"] = {"jobDeploymentStatus": "Complete"}

    def _event(self, about: Object, reason: str, message: str) -> None:
        kind, name = about["kind"], about["metadata"]["name"]
        self.add({"apiVersion": "v1", "kind": "Event", "type": "Warning", "reason": reason,
                  "metadata": {"name": f"{name}-{reason.lower()}", "namespace": "aenv"},
                  "message": message, "involvedObject": {"kind": kind, "name": name}})  # fmt: skip

    def _stateful(self, body: Object) -> None:
        name, namespace = body["metadata"]["name"], body["metadata"]["namespace"]
        self._pod(body, "", body["spec"]["template"], name, 0)
        body["status"] = {"readyReplicas": sum(map(_is_ready, self._owned(body)))}
        for template in body["spec"]["volumeClaimTemplates"]:
            claim = f"{template['metadata']['name']}-{name}-0"
            if ("persistentvolumeclaims", namespace, claim) not in self.objects:
                labels = body["spec"]["selector"]["matchLabels"]
                self.add({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
                          "metadata": {"name": claim, "namespace": namespace, "labels": labels},
                          "spec": template["spec"]})  # fmt: skip
        for claim_body in self.all("persistentvolumeclaims"):
            claim_body["status"] = {"phase": "Bound"}

    def _owned(self, owner: Object) -> Iterator[Object]:
        uid = owner["metadata"]["uid"]
        for pod in self.all("pods"):
            if any(r["uid"] == uid for r in pod["metadata"].get("ownerReferences", ())):
                yield pod

    def _pod(self, owner: Object, node: str, template: Object, group: str, number: int) -> None:
        name, namespace = f"{group}-{number}", owner["metadata"]["namespace"]
        if ("pods", namespace, name) in self.objects:
            return
        labels = dict(template["metadata"].get("labels", {}))
        if node:
            ray = {"ray.io/cluster": "aenv", "ray.io/node-type": node, "ray.io/group": group}
            labels |= ray
        missing = violations(template["spec"])
        image = template["spec"]["containers"][0]["image"]
        status: Object = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        if missing or image in self.broken_images:
            waiting = {"reason": "ImagePullBackOff", "message": f"cannot pull {image}{missing}"}
            status = {"phase": "Pending", "containerStatuses": [{"state": {"waiting": waiting}}]}
        metadata = {"name": name, "namespace": namespace, "labels": labels}
        metadata["ownerReferences"] = [{"uid": owner["metadata"]["uid"]}]
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
        self.add({**body, "spec": template["spec"], "status": status})


def _is_ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
