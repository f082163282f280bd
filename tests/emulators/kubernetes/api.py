"""A small Kubernetes for tests: an API server with the rules that matter, and a node.

    with EmulatedCluster() as cluster:
        configuration = client.Configuration(host=cluster.url)

It implements what our code relies on, and refuses requests as a real API server does: strict
schemas, label selectors, owner references and garbage collection, watches whose versions expire,
conflicts, server-side apply, permissions, quotas, Pod Security, throttling, active deadlines and
grace periods. Pods run as processes (`tests.emulators.kubernetes.pod`), except those of KubeRay and
of StatefulSets (`tests.emulators.kubernetes.controllers`). The cluster runs on one thread; its
methods may be called from any thread.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Final, Self, TypeVar

from aiohttp import web

from aenv_ray.cluster import kustomize
from tests.emulators.kubernetes import claims, rules
from tests.emulators.kubernetes.apply import applied
from tests.emulators.kubernetes.controllers import Controllers
from tests.emulators.kubernetes.node import NODE, Delays, EmulatedNode
from tests.emulators.kubernetes.store import (
    Kind,
    Object,
    Refused,
    Store,
    matches,
    merged,
    parse_path,
    timestamp,
)

T = TypeVar("T")
NAMESPACE: Final = "aenv"
ACCOUNT: Final = "system:serviceaccount:aenv:ray"
_ANSWER_S: Final = 60.0
_BOOKMARK_S: Final = 5.0


class EmulatedCluster:
    """A cluster with one namespace, `NAMESPACE`, and one node.

    Attributes:
        url: Of the API; set inside the ``with`` block.
        granted: Pairs of verb and resource that are allowed. None: all.
        denied: Pairs of verb and resource that are not allowed, whatever is granted.
        calls: Verb and resource of every request so far.
        refused: Number of requests that were answered with 429.
        phases: The last phase of every pod, by name, deleted pods included.
        controllers: KubeRay's operator and others.
    """

    def __init__(self) -> None:
        self.url = ""
        self.granted: set[tuple[str, str]] | None = None
        self.denied: set[tuple[str, str]] = set()
        self.calls: list[tuple[str, str]] = []
        self.refused = 0
        self.phases: dict[str, str] = {}
        self._store = Store()
        self.controllers = Controllers(self._store, self._remove)
        self._node: EmulatedNode | None = None
        self._throttled, self._retry_after = 0, "1"
        self._failing: list[int | None] = []
        self._races = 0
        self._limit: float | None = None
        self._answered: list[float] = []
        """When the requests of the last second came, while their rate is limited."""
        self._is_full = False
        self._watchers: set[asyncio.Task[Any]] = set()
        self._silent: set[asyncio.Task[Any]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runner: web.AppRunner | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._start)
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_ANSWER_S)
        self._loop.close()

    def _do(self, what: Callable[[], Awaitable[T]]) -> T:
        async def run() -> T:
            return await what()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(_ANSWER_S)

    def _call(self, what: Callable[[], T]) -> T:
        async def run() -> T:
            return what()

        return self._do(run)

    async def _start(self) -> None:
        self._node = EmulatedNode(self._set_status)
        await self._node.start()
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._store.add(Kind("", "namespaces", ""), _object("v1", "Namespace", NAMESPACE))

    async def _stop(self) -> None:
        await self.node.stop()
        tasks = [*self._tasks, *self._watchers]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        assert self._runner is not None
        await self._runner.cleanup()

    @property
    def node(self) -> EmulatedNode:
        """The node."""
        assert self._node is not None
        return self._node

    # --- for tests --------------------------------------------------------------------------------

    def create(
        self, resource: str, body: Object, group: str = "", namespace: str = NAMESPACE
    ) -> Object:
        """Create an object without applying any rule; such a pod does not run."""
        kind = Kind(group, resource, namespace)
        return self._call(lambda: copy.deepcopy(self._store.add(kind, body)))

    def objects(self, resource: str, group: str = "", namespace: str = NAMESPACE) -> list[Object]:
        """Return the objects in a namespace; with "", those of every namespace."""
        kind = Kind(group, resource, namespace)
        return self._call(lambda: copy.deepcopy(self._store.all(kind)))

    @contextlib.contextmanager
    def edited(
        self, resource: str, name: str, group: str = "", namespace: str = NAMESPACE
    ) -> Iterator[Object]:
        """Yield an object to change, and keep the changes without applying any rule."""
        kind = Kind(group, resource, namespace)
        body = self._call(lambda: copy.deepcopy(self._store.get(kind, name)))
        yield body
        self._call(lambda: self._store.change(kind, name, body))

    def delete(self, resource: str, name: str, group: str = "", namespace: str = NAMESPACE) -> None:
        """Delete an object and what it owns; does nothing if it does not exist."""
        self._do(lambda: self._collect(Kind(group, resource, namespace), name))

    def label_namespace(self, labels: Mapping[str, str]) -> None:
        """Set labels of `NAMESPACE`."""
        kind = Kind("", "namespaces", "")
        patch = {"metadata": {"labels": dict(labels)}}

        def run() -> None:
            self._store.change(kind, NAMESPACE, merged(self._store.get(kind, NAMESPACE), patch))

        self._call(run)

    def throttle(self, requests: int, retry_after: str = "1") -> None:
        """Answer the next requests with 429 and ``Retry-After``: seconds, or a date."""
        self._throttled, self._retry_after = requests, retry_after

    def fail(self, *answers: int | None) -> None:
        """Answer the next requests with these statuses; None: the connection breaks."""
        self._failing = list(answers)

    def limit_rate(self, requests_per_s: float | None) -> None:
        """Answer further requests within a second with 429 and ``Retry-After: 1``; None: none."""
        self._limit, self._answered = requests_per_s, []

    def race(self, requests: int) -> None:
        """Let the next creates fail with a conflict over the namespace's quota."""
        self._races = requests

    def break_watches(self, *, forget: bool = False) -> None:
        """End all watches; with `forget`, their versions have expired."""

        def run() -> None:
            if forget:
                self._store.forget()
            for watcher in self._watchers:
                watcher.cancel()

        self._call(run)

    def silence_watches(self) -> None:
        """Send nothing more on the present watches, as when a node between is lost."""
        self._call(lambda: self._silent.update(self._watchers))

    def slow_down(self, delays: Delays) -> None:
        """Take as long as a real cluster does from now on, for example `REAL`."""
        self.node.delays = delays

    def fill_nodes(self, is_full: bool) -> None:
        """Set whether the node has no room for further pods."""
        self._is_full = is_full

    def kill(self, name: str) -> None:
        """SIGKILL process 1 of a pod's first container."""
        self._call(lambda: self.node.kill(self._pod(name)["metadata"]["uid"]))

    def end_with(self, name: str, status: Mapping[str, Any]) -> None:
        """End a pod as its node does, with a status such as ``{"reason": "Evicted"}``."""

        def run() -> None:
            uid = self._pod(name)["metadata"]["uid"]
            self.node.mark(uid, status)
            self.node.kill(uid)

        self._call(run)

    def terminate(self, name: str, status: Mapping[str, Any]) -> None:
        """End a pod with SIGTERM, as a node that evicts it or shuts down.

        Args:
            name: The pod.
            status: What the node adds to the pod's status once all containers have ended; empty:
                nothing, as a node does that is not told to wait for its pods.
        """

        def run() -> None:
            pod = self._pod(name)
            uid = pod["metadata"]["uid"]
            self.node.mark(uid, status)
            self._begin(self.node.end(uid, _grace_s(pod, {})))

        self._call(run)

    def warnings(self, pod: str) -> list[str]:
        """Return the reasons of the warning events about a pod, which may be gone."""
        return [
            event["reason"]
            for event in self.objects("events")
            if event["type"] == "Warning" and event["involvedObject"]["name"] == pod
        ]

    def running(self) -> list[str]:
        """Return the uids of pods that have processes."""
        return self._call(lambda: self.node.uids)

    def _pod(self, name: str) -> Object:
        return self._store.get(Kind("", "pods", NAMESPACE), name)

    # --- requests ---------------------------------------------------------------------------------

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            if self._failing:
                status = self._failing.pop(0)
                if status is None:
                    assert request.transport is not None
                    request.transport.abort()
                raise Refused(status or 500, "InternalError", "an internal error occurred")
            if self._throttled or self._is_over_limit():
                self._throttled -= bool(self._throttled)
                self.refused += 1
                raise Refused(
                    429, "TooManyRequests", "too many requests, please try again", self._retry_after
                )
            if about := self._about(request.path):
                return web.json_response(about)
            kind, name, subresource = parse_path(request.path)
            if kind.group == "ray.io" and not self.controllers.has_kuberay:
                raise Refused(404, "NotFound", "the server could not find the requested resource")
            verb = rules.VERBS[request.method]
            if verb == "get" and not name:
                verb = "watch" if request.query.get("watch") == "true" else "list"
            self.calls.append((verb, kind.resource))
            is_review = kind.resource == "selfsubjectaccessreviews"  # needs no permission
            if not is_review and not self._may(verb, kind.resource):
                raise rules.lacks_permission(verb, kind, ACCOUNT)
            if subresource:
                raise Refused(404, "NotFound", f"there is no {subresource} here")
            if verb == "watch":
                return await self._watch(request, kind)
            answer = getattr(self, f"_{verb}")
            body = json.loads(await request.text() or "{}")
            answered = await answer(kind, name, body, request)
            if verb not in ("get", "list"):
                self.controllers.reconcile()
            return web.json_response(answered)
        except Refused as exc:
            headers = {"Retry-After": exc.retry_after} if exc.retry_after else {}
            return web.json_response(exc.status(), status=exc.code, headers=headers)

    def _is_over_limit(self) -> bool:
        if self._limit is None:
            return False
        now = self._loop.time()
        self._answered = [at for at in self._answered if now - at < 1.0]
        is_over = len(self._answered) >= self._limit
        if not is_over:
            self._answered.append(now)
        return is_over

    def _about(self, path: str) -> Object | None:
        """Return what the API says of itself; None if a path is of objects."""
        if path == "/version":
            return {"gitVersion": "v1.34.1"}
        return self.controllers.resources() if path == "/apis/ray.io/v1" else None

    def _may(self, verb: str, resource: str) -> bool:
        pair = (verb, resource)
        return pair not in self.denied and (self.granted is None or pair in self.granted)

    async def _list(self, kind: Kind, name: str, body: Object, request: web.Request) -> Object:
        del name, body
        selector = request.query.get("labelSelector", "")
        found = [o for o in self._store.all(kind) if matches(selector, _labels(o))]
        found.sort(key=lambda each: each["metadata"]["name"])
        after = base64.b64decode(request.query.get("continue", "")).decode()
        found = [each for each in found if each["metadata"]["name"] > after]
        limit = int(request.query.get("limit", 0)) or len(found)
        metadata = {"resourceVersion": self._store.version}
        if len(found) > limit:
            last = found[limit - 1]["metadata"]["name"]
            metadata["continue"] = base64.b64encode(last.encode()).decode()
        return {"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": found[:limit]}

    async def _get(self, kind: Kind, name: str, body: Object, request: web.Request) -> Object:
        del body, request
        return self._store.get(kind, name)

    async def _create(self, kind: Kind, name: str, body: Object, request: web.Request) -> Object:
        del name
        if kind.resource == "selfsubjectaccessreviews":
            wanted = body["spec"]["resourceAttributes"]
            return {**body, "status": {"allowed": self._may(wanted["verb"], wanted["resource"])}}
        if self._races:
            self._races -= 1
            raise rules.lost_race()
        rules.check_namespace(self._store, kind)
        rules.check_schema(body)
        body = rules.encoded(body)
        is_pod = (kind.group, kind.resource) == rules.PODS
        if is_pod:
            rules.admit_pod(self._store, kind, body)
            body = {**body, "status": {"phase": "Pending"}}
        if _is_dry(request):
            return body
        made = self._store.add(kind, body)
        for reference in made["metadata"].get("ownerReferences", ()):
            if self._store.find(reference["uid"]) is None:
                self._begin(self._collect(kind, made["metadata"]["name"]))
        if is_pod:
            self._begin(self._run_pod(made))
        return copy.deepcopy(made)

    async def _update(self, kind: Kind, name: str, body: Object, request: web.Request) -> Object:
        before = self._store.get(kind, name)
        version = body["metadata"].get("resourceVersion")
        if version and version != before["metadata"]["resourceVersion"]:
            message = f'Operation cannot be fulfilled on {kind.resource} "{name}": it was modified'
            raise Refused(409, "Conflict", message)
        return self._change(kind, before, body, request)

    async def _patch(self, kind: Kind, name: str, body: Object, request: web.Request) -> Object:
        if request.content_type == "application/apply-patch+yaml":
            found = self._store.find_name(kind, name)
            force = request.query.get("force") == "true"
            after = applied(found or {}, body, request.query["fieldManager"], force)
            if found is None:
                return await self._create(kind, name, after, request)
            return self._change(kind, found, after, request)
        before = self._store.get(kind, name)
        is_merge = request.content_type != "application/json-patch+json"
        after = merged(before, body) if is_merge else kustomize.json_patch(before, body)
        return self._change(kind, before, after, request)

    def _change(self, kind: Kind, before: Object, after: Object, request: web.Request) -> Object:
        rules.check_schema(after)
        if (kind.group, kind.resource) == rules.PODS:
            rules.check_change(before, after)
        if (kind.group, kind.resource) == rules.SETS:
            rules.check_set_change(before, after)
        if (kind.group, kind.resource) == claims.CLAIMS:
            claims.check_change(self._store, before, after)
        if after == before or _is_dry(request):
            return after
        if after.get("spec") != before.get("spec"):
            generation = before["metadata"]["generation"] + 1
            after = {**after, "metadata": {**after["metadata"], "generation": generation}}
        return self._store.change(kind, before["metadata"]["name"], after)

    async def _delete(
        self, kind: Kind, name: str, body: Object, request: web.Request | None = None
    ) -> Object:
        del request
        found = self._store.get(kind, name) if name else None
        if found is None:
            raise Refused(405, "MethodNotAllowed", "collections are not deleted here")
        uid = found["metadata"]["uid"]
        wanted = (body.get("preconditions") or {}).get("uid")
        if wanted and wanted != uid:
            message = f"the UID in the precondition ({wanted}) does not match the UID in record"
            raise Refused(409, "Conflict", message)
        if (kind.group, kind.resource) == rules.PODS and uid in self.node.uids:
            if "deletionTimestamp" not in found["metadata"]:
                grace_s = _grace_s(found, body)
                metadata = {
                    **found["metadata"], "deletionTimestamp": timestamp(grace_s),
                    "deletionGracePeriodSeconds": int(grace_s),
                }  # fmt: skip
                self._store.change(kind, name, {**found, "metadata": metadata})
                self._begin(self._end_pod(kind, name, uid, grace_s))
            return found
        if found["metadata"].get("finalizers"):
            metadata = {**found["metadata"], "deletionTimestamp": timestamp()}
            return self._store.change(kind, name, {**found, "metadata": metadata})
        if not claims.protect(self._store, kind, name):
            self._remove(kind, name, uid)
        return found

    def _remove(self, kind: Kind, name: str, uid: str) -> None:
        self._store.remove(kind, name)
        claims.let_go(self._store, kind.namespace)
        for owned, body in self._store.owned_by(uid):
            self._begin(self._collect(owned, body["metadata"]["name"]))

    async def _collect(self, kind: Kind, name: str) -> None:
        with contextlib.suppress(Refused):  # deleted already
            await self._delete(kind, name, {})

    async def _watch(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        version = int(request.query.get("resourceVersion") or self._store.version)
        selector = request.query.get("labelSelector", "")
        until = self._loop.time() + float(request.query.get("timeoutSeconds", 300))
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        changed = self._store.listen()
        task = asyncio.current_task()
        assert task is not None
        self._watchers.add(task)
        try:
            await response.prepare(request)
            while self._loop.time() < until:
                if task in self._silent:
                    await asyncio.Event().wait()
                changed.clear()
                for number, what, body in self._store.since(kind, version):
                    version = number
                    if matches(selector, _labels(body)):
                        await _send(response, what, body)
                try:
                    async with asyncio.timeout(_BOOKMARK_S):
                        await changed.wait()
                except TimeoutError:
                    mark = {"kind": "Pod", "metadata": {"resourceVersion": str(version)}}
                    await _send(response, "BOOKMARK", mark)
        except Refused as exc:
            await _send(response, "ERROR", exc.status())
        except ConnectionResetError:
            pass  # the client hung up
        finally:
            self._watchers.discard(task)
            self._silent.discard(task)
            self._store.unlisten(changed)
        return response

    # --- pods -------------------------------------------------------------------------------------

    def _begin(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_pod(self, pod: Object) -> None:
        changed = self._store.listen()
        while why := claims.unschedulable(self._store, pod, self._is_full):
            self._set_status(pod, claims.waiting(why))
            changed.clear()
            await changed.wait()
            if self._store.find(pod["metadata"]["uid"]) is None:
                break
        self._store.unlisten(changed)
        await asyncio.sleep(self.node.delays.schedule_s)
        kind, name = Kind("", "pods", pod["metadata"]["namespace"]), pod["metadata"]["name"]
        found = self._store.find(pod["metadata"]["uid"])
        if found is None:
            return
        placed = {**found[1], "spec": {**found[1]["spec"], "nodeName": NODE}}
        self._store.change(kind, name, placed)
        self._warn_of_pull_secrets(placed)
        deadline_s = pod["spec"].get("activeDeadlineSeconds")
        timer = None
        if deadline_s is not None:
            timer = self._loop.call_later(deadline_s, self._pass_deadline, pod)
        await self.node.run(placed)
        if timer is not None:
            timer.cancel()

    def _warn_of_pull_secrets(self, pod: Object) -> None:
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        named = [each["name"] for each in pod["spec"].get("imagePullSecrets") or ()]
        have = {o["metadata"]["name"] for o in self._store.all(Kind("", "secrets", namespace))}
        missing = ", ".join(each for each in named if each not in have)
        if missing:
            what = "FailedToRetrieveImagePullSecret"
            event = _object("v1", "Event", f"{name}.{what.lower()}") | {
                "involvedObject": {"kind": "Pod", "namespace": namespace, "name": name},
                "type": "Warning", "reason": what,
                "message": f"Unable to retrieve some image pull secrets ({missing}); attempting to "
                "pull the image may not succeed.",
            }  # fmt: skip
            self._store.add(Kind("", "events", namespace), event)

    def _pass_deadline(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        self.node.mark(uid, {"reason": "DeadlineExceeded"})
        self._begin(self.node.end(uid, _grace_s(pod, {})))

    async def _end_pod(self, kind: Kind, name: str, uid: str, grace_s: float) -> None:
        await self.node.end(uid, grace_s)
        self._remove(kind, name, uid)

    def _set_status(self, pod: Mapping[str, Any], status: Mapping[str, Any]) -> None:
        found = self._store.find(pod["metadata"]["uid"])
        if found is not None and found[1].get("status") != status:
            kind, body = found
            self.phases[body["metadata"]["name"]] = str(status["phase"])
            self._store.change(kind, body["metadata"]["name"], {**body, "status": dict(status)})


def _object(version: str, kind: str, name: str) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}}


def _grace_s(pod: Object, options: Object) -> float:
    """Return a pod's grace period: of the request, of its spec, or 30 s."""
    own_s = pod["spec"].get("terminationGracePeriodSeconds", 30)
    return float(options.get("gracePeriodSeconds", own_s))


def _is_dry(request: web.Request) -> bool:
    return request.query.get("dryRun") == "All"


def _labels(body: Object) -> dict[str, str]:
    return dict(body["metadata"].get("labels") or {})


async def _send(response: web.StreamResponse, what: str, body: Object) -> None:
    await response.write(json.dumps({"type": what, "object": body}).encode() + b"\n")
