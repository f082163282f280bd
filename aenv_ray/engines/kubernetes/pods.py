"""The pods of one host in the API: requests about them, and one watch of all of them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from aenv_ray.background_tasks import shielded
from aenv_ray.clock import SystemClock
from aenv_ray.engines.kubernetes import names, pod_status
from aenv_ray.engines.kubernetes.client import ApiRefused, KubernetesClient
from aenv_ray.engines.kubernetes.permissions import Access
from aenv_ray.engines.kubernetes.settings import END_S, PodSettings, find_owner
from aenv_ray.errors import FabricUnavailable

logger = logging.getLogger(__name__)

OnPod = Callable[[Mapping[str, Any], bool], None]
"""Called with a pod's current state, and whether the API has deleted it."""
CONCURRENCY: Final = 16
"""Pods that one host creates, and deletes, at the same time."""
GONE_S: Final = 60.0
"""How long a node may take to end a pod."""
_POLL_S: Final = 5.0
_RECONNECT_S: Final = 0.5
_LONGEST_RECONNECT_S: Final = 10.0
_PAGE: Final = "500"
SWEEP_INTERVAL_S: Final = 30.0
_OVERDUE_S: Final = 5.0
LEFT_TO_HOST_S: Final = 120.0
"""How long a janitor leaves an ended pod to its own host, which may wait for the reason of the end:
longer than the engine's ``NODE_LOST_S``."""


class Pods:
    """Requests about pods, and the latest state of each.

    Requests raise `FabricUnavailable` when the API cannot be reached, and `ApiRefused` when it
    refuses, unless their docstring says otherwise.
    """

    def __init__(self, client: KubernetesClient, selector: str, on_pod: OnPod) -> None:
        self._client = client
        self._selector = selector
        self._on_pod = on_pod
        self._known: dict[str, Mapping[str, Any]] = {}
        self._gone: dict[str, asyncio.Event] = {}
        self._version = ""
        self._watching: asyncio.Task[None] | None = None
        self._creating = asyncio.Semaphore(CONCURRENCY)
        self._deleting = asyncio.Semaphore(CONCURRENCY)

    # --- the watch ------------------------------------------------------------------------------

    async def start_watch(self) -> None:
        """Report every change from now on."""
        await self._relist()
        connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watching = asyncio.create_task(self._follow(connected))
        try:
            await connected
        except BaseException:
            self.stop_watch()
            raise

    def stop_watch(self) -> None:
        """Stop reporting changes."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    async def _relist(self) -> None:
        """Report what changed while the watch was interrupted."""
        listed = await self._list(self._selector)
        self._version = listed["metadata"]["resourceVersion"]
        current = {pod["metadata"]["uid"]: pod for pod in listed["items"]}
        for uid, pod in list(self._known.items()):
            if uid not in current:
                self._update(pod, gone=True)
        for pod in current.values():
            self._update(pod, gone=False)

    async def _follow(self, connected: asyncio.Future[None]) -> None:
        """Watch for ever, and list again whenever a change may have been missed."""
        pause = _RECONNECT_S
        is_behind = False
        while True:
            try:
                if is_behind:
                    await self._relist()
                    is_behind = False
                query = {"labelSelector": self._selector, "resourceVersion": self._version}
                async with self._client.watch(Access.WATCH_PODS, query) as events:
                    if not connected.done():
                        connected.set_result(None)
                    async for event in events:
                        self._version = event["object"]["metadata"]["resourceVersion"]
                        pause = _RECONNECT_S
                        if event["type"] != "BOOKMARK":
                            self._update(event["object"], gone=event["type"] == "DELETED")
            except (ApiRefused, FabricUnavailable) as exc:
                if not connected.done():
                    connected.set_exception(exc)
                    return
                is_behind = is_behind or isinstance(exc, ApiRefused)
                logger.warning("the watch of pods ended: %s", exc)
            except Exception as exc:  # all pods of this host depend on this task
                if not connected.done():
                    connected.set_exception(exc)
                    return
                is_behind = True
                logger.exception("the watch of pods ended")
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_RECONNECT_S)

    def _update(self, pod: Mapping[str, Any], *, gone: bool) -> None:
        uid = pod["metadata"]["uid"]
        if gone:
            self._known.pop(uid, None)
            event = self._gone.pop(uid, None)
            if event is not None:
                event.set()
        else:
            self._known[uid] = pod
        try:
            self._on_pod(pod, gone)
        except Exception:  # what one pod reports must not hide the others
            logger.exception("the state of pod %s cannot be read", pod["metadata"]["name"])

    def phases(self) -> Counter[str]:
        """Return how many pods exist, by phase."""
        found = (pod.get("status", {}).get("phase", "Pending") for pod in self._known.values())
        return Counter(found)

    # --- requests -------------------------------------------------------------------------------

    async def create(self, body: dict[str, Any]) -> dict[str, Any]:
        """Create a pod, replacing an ended pod of the same name, and return it.

        A cancelled call still waits for the API's answer, so that its caller can delete the pod.
        """
        async with self._creating:
            try:
                return await self._create(body)
            except ApiRefused as exc:
                if exc.reason != "AlreadyExists":
                    raise
            metadata = body["metadata"]
            found = await self.get(metadata["name"])
            if found is not None:
                nonce = found["metadata"].get("annotations", {}).get(names.NONCE)
                if nonce == metadata["annotations"][names.NONCE]:
                    return found  # created by a request whose answer was lost
                # A pod of this name from an earlier host has ended, or it would have been adopted.
                await self.delete(metadata["name"], found["metadata"]["uid"])
            return await self._create(body)

    async def _create(self, body: dict[str, Any]) -> dict[str, Any]:
        return await shielded(self._client.request(Access.CREATE_POD, body=body))

    async def get(self, name: str) -> dict[str, Any] | None:
        """Return a pod, or None if it does not exist."""
        return await self._client.find(Access.GET_POD, name)

    async def list(self, selector: str | None = None) -> list[dict[str, Any]]:
        """Return pods from the API.

        Args:
            selector: Label selector. None: this host's pods.
        """
        return list((await self._list(selector or self._selector))["items"])

    async def _list(self, selector: str) -> dict[str, Any]:
        items: list[dict[str, Any]] = []
        query = {"labelSelector": selector, "limit": _PAGE}
        while True:
            page = await self._client.request(Access.LIST_PODS, query=query)
            items += page["items"]
            next_page = page["metadata"].get("continue")
            if not next_page:
                return {"metadata": page["metadata"], "items": items}
            query["continue"] = next_page

    async def annotate(self, name: str, annotations: Mapping[str, str]) -> bool:
        """Set annotations of a pod; return False if it does not exist."""
        body = {"metadata": {"annotations": dict(annotations)}}
        try:
            await self._client.request(Access.PATCH_POD, name, body=body)
        except ApiRefused as exc:
            if exc.status == 404:
                return False
            raise
        return True

    async def delete(self, name: str, uid: str = "") -> None:
        """Delete a pod, and return when it is gone; a pod that does not exist is not an error.

        Args:
            name: The name of the pod.
            uid: The uid of the pod. "": any pod of that name.

        Raises:
            FabricUnavailable: Its node did not end it in time.
        """
        if not uid:
            found = await self.get(name)
            if found is None:
                return
            uid = found["metadata"]["uid"]
        if await self.request_end(name, uid):
            await self.await_end(name, uid)

    async def request_end(self, name: str, uid: str) -> bool:
        """Have the API delete a pod; return whether it existed.

        Its node then ends it; `await_end` waits for that.
        """
        self._gone.setdefault(uid, asyncio.Event())
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": END_S,
            "preconditions": {"uid": uid},
        }
        try:
            async with self._deleting:
                await self._client.request(Access.DELETE_POD, name, body=body)
        except ApiRefused as exc:
            self._gone.pop(uid, None)
            if exc.status in (404, 409):  # 409: another pod has the name
                return False
            raise
        return True

    async def await_end(self, name: str, uid: str) -> None:
        """Wait until a pod that is being deleted is gone.

        Raises:
            FabricUnavailable: Its node did not end it in time.
        """
        gone = self._gone.get(uid)
        if gone is None:
            return
        loop = asyncio.get_running_loop()
        end = loop.time() + GONE_S
        while loop.time() < end:
            try:
                async with asyncio.timeout(_POLL_S):
                    await gone.wait()
                return
            except TimeoutError:
                found = await self.get(name)  # the watch may be interrupted
                if found is None or found["metadata"]["uid"] != uid:
                    self._gone.pop(uid, None)
                    return
        raise FabricUnavailable(
            f"pod {name} still exists {GONE_S:g} s after it was deleted",
            hint="its node may be lost: Kubernetes deletes the pod once the node returns or is "
            "removed",
        )


class PodJanitor:
    """Deletes orphan pods, which are past their deadline or ended, until it is stopped.

    Kubernetes deletes a host's pods together with the host's own pod. The janitor is for hosts that
    died while their pod kept running; it finds pods by label, whichever host created them.
    """

    def __init__(self, pods: Pods, selector: str, is_known: Callable[[str], bool]) -> None:
        self._pods = pods
        self._selector = selector
        self._is_known = is_known
        self._clock = SystemClock()
        self._over_since: dict[str, float] = {}
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Stop sweeping."""
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            try:
                await self.sweep()
            except ApiRefused as exc:
                logger.warning("the pod janitor is refused by the API: %s", exc.message)
            except FabricUnavailable as exc:
                logger.warning("a sweep of the pod janitor failed: %s", exc.message)

    async def sweep(self) -> None:
        """Delete orphan pods."""
        over_since: dict[str, float] = {}
        for pod in await self._pods.list(self._selector):
            metadata = pod["metadata"]
            if self._is_known(metadata["uid"]):
                continue
            deadline = float(metadata["annotations"][names.DEADLINE])
            uid, now = metadata["uid"], self._clock.now()
            if pod_status.is_over(pod):
                over_since[uid] = self._over_since.get(uid, now)
            # An ended pod is left to its own host, which finds out why it ended.
            is_left = now - over_since.get(uid, now) > LEFT_TO_HOST_S
            if is_left or deadline + _OVERDUE_S < now:
                await self._pods.delete(metadata["name"], uid)
        self._over_since = over_since


async def list_owned_pods(settings: PodSettings) -> list[str]:
    """Return the names of the pods of all hosts in this process's pod, in any state.

    Raises:
        FabricUnavailable: The API does not answer, or refuses.
    """
    client = KubernetesClient(settings.namespace)
    try:
        with pod_status.api_errors(client):
            await client.open()
            owner = await find_owner(client, settings)
            query = {"labelSelector": names.owner_selector(owner.uid)}
            listed = await client.request(Access.LIST_PODS, query=query)
    finally:
        await client.close()
    return [pod["metadata"]["name"] for pod in listed["items"]]
