"""The kubernetes engine: each instance is a pod in the namespace of its host's pod.

The host's pod owns the pods of its instances, so Kubernetes deletes them together. The host
connects to a pod, never the reverse, so nothing of ours needs to be reachable from a sandbox. The
API lists pods, one watch per host reports their changes, and calls, files and logs go directly to
the pod (`aenv_ray.runtime.container.pod`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from aenv_ray import logs
from aenv_ray.background_tasks import Tasks
from aenv_ray.clock import SystemClock
from aenv_ray.engines.base import (
    Capabilities,
    EndCause,
    Engine,
    RunningSandbox,
    Sandbox,
    SandboxSpec,
    lost,
    start_each,
    start_failed,
    stop_each,
)
from aenv_ray.engines.door import DoorSandbox
from aenv_ray.engines.kubernetes import manifest, names, pod_status
from aenv_ray.engines.kubernetes.boot import (
    CAUSE_WAIT_S,
    SCHEDULE_S,
    RuntimeBundles,
    await_containers,
    boot,
    check_deadline,
)
from aenv_ray.engines.kubernetes.client import ApiRefused, KubernetesClient
from aenv_ray.engines.kubernetes.plan import PodPlanner
from aenv_ray.engines.kubernetes.pod_instance import READERS_S, PodInstance, read_log
from aenv_ray.engines.kubernetes.pod_status import UnsuitableImage
from aenv_ray.engines.kubernetes.pods import PodJanitor, Pods
from aenv_ray.engines.kubernetes.settings import PodSettings
from aenv_ray.engines.node.directory import node_directory
from aenv_ray.engines.node.host_key import HostKey
from aenv_ray.errors import AenvError, FabricUnavailable
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import Isolation
from aenv_ray.policy import Policy
from aenv_ray.project.storage import StorageMount
from aenv_ray.runtime.container.handshake import secret_digest
from aenv_ray.runtime.container.pod import TTL_PASSED

logger = logging.getLogger(__name__)

RELEASED: Final = "it was released"
_OVERDUE_S: Final = 2.0
"""How long a pod may take to end itself after its deadline."""
_CLOSE_S: Final = 10.0
NODE_LOST_S: Final = 90.0
"""How long to wait for the reason of an unexplained end. Kubernetes takes a node for lost that has
not reported for 50 s, and the pod tolerates that for 30 s more: then the API deletes it."""


class KubernetesEngine(Engine):
    """Sandboxes as pods.

    Args:
        host_id: Id by which a restarted host finds its sandboxes.
        runtime_dir: Directory for the key of this pod's hosts; it ends with the pod.
        data_dir: Cache directory for runtime bundles.
        scope: Distinguishes the hosts of one Ray node from those of others.
        settings: The operator's settings.
        client: The client of the API. None: with this pod's service account.
        schedule_s: How long a pod may wait for a node.
        policy: Returns what projects may request of images.
    """

    name = "kubernetes"
    capabilities = Capabilities(
        isolation="pod",
        network_modes=frozenset({"none", "internet"}),
        second_container=True,
        storage=True,
        slow_start=True,
        starts_elsewhere=True,
    )

    def __init__(
        self,
        host_id: HostId,
        *,
        runtime_dir: Path,
        data_dir: Path,
        scope: str,
        settings: PodSettings,
        client: KubernetesClient | None = None,
        schedule_s: float = SCHEDULE_S,
        policy: Callable[[], Policy] = Policy,
    ) -> None:
        self._host_id = host_id
        self._settings = settings
        self._clock = SystemClock()
        self._client = client or KubernetesClient(settings.namespace)
        self._planner = PodPlanner(self._client, settings, host_id, policy)
        self._key = HostKey(node_directory(runtime_dir, names.node_scope(scope)) / "key")
        self._bundles = RuntimeBundles(data_dir / "kubernetes")
        self._schedule_s = schedule_s
        self._instances: dict[str, PodInstance] = {}
        self._ended: set[str] = set()
        """Uids of pods that ended by themselves and still exist in the API."""
        self._opening = asyncio.Lock()
        self._pods_or_none: Pods | None = None
        self._janitor: PodJanitor | None = None
        self._removals = Tasks()
        self._ending: set[str] = set()
        """Uids of stopped pods that their nodes have not ended yet."""

    # --- the cluster ------------------------------------------------------------------------------

    async def _open(self) -> Pods:
        """Connect, unless connected.

        Raises:
            FabricUnavailable: The API does not answer, or refuses this host's service account.
        """
        async with self._opening:
            if self._pods_or_none is None:
                with pod_status.api_errors(self._client):
                    await self._client.open()
                    owner = await self._planner.connect()
                    await asyncio.to_thread(self._key.load)
                    selector = names.host_selector(owner.uid, self._host_id)
                    pods = Pods(self._client, selector, self._on_pod)
                    await pods.start_watch()
                self._pods_or_none = pods
                self._janitor = PodJanitor(pods, names.owner_selector(owner.uid), self._is_known)
            return self._pods_or_none

    def _is_known(self, uid: str) -> bool:
        return any(instance.uid == uid for instance in self._instances.values())

    def _on_pod(self, pod: Mapping[str, Any], gone: bool) -> None:
        name = pod["metadata"]["name"]
        if gone:
            self._ended.discard(pod["metadata"]["uid"])
        instance = next((i for i in self._instances.values() if i.name == name), None)
        if instance is None or not instance.owns(pod):
            return
        cause = instance.update(pod, gone)
        if cause is not None:
            self._finish(instance, cause)
            self._removals.spawn(instance.release_control() if gone else self._discard(instance))
        elif instance.unexplained is not None:
            self._await_reason(instance)

    def pods(self) -> Mapping[str, int]:  # noqa: D102
        return {} if self._pods_or_none is None else self._pods_or_none.phases()

    # --- starting ---------------------------------------------------------------------------------

    async def start_many(  # noqa: D102
        self, specs: Sequence[SandboxSpec]
    ) -> list[Sandbox | AenvError]:
        await self._open()
        return await start_each(self._start_one, self.stop, specs)

    async def _start_one(self, spec: SandboxSpec) -> Sandbox | AenvError:
        if spec.instance_id in self._instances:
            return start_failed(spec.instance_id, "an instance with this id is running")
        try:
            image_problem = ""
            while True:
                try:
                    return await self._create(spec, image_problem)
                except UnsuitableImage as exc:
                    if image_problem:
                        return start_failed(spec.instance_id, str(exc))
                    image_problem = str(exc)
        except ApiRefused as exc:
            return pod_status.error_of(exc, self._client.namespace, spec.instance_id)
        except AenvError as exc:
            return exc

    async def _create(self, spec: SandboxSpec, image_problem: str) -> Sandbox:
        pods = await self._open()
        nonce = secrets.token_hex(8)
        name = names.pod_name(self._planner.owner.uid, spec.instance_id)
        secret = self._key.secret(name, nonce, "boot")
        plan = await self._planner.plan(spec, name, nonce, secret_digest(secret), image_problem)
        instance = PodInstance.new(spec.instance_id, name, nonce)
        instance.has_sidecar = bool(plan.sidecar_image)
        instance.has_storage = spec.storage is not None
        body = manifest.pod_manifest(spec, plan, self._clock.now())
        self._instances[spec.instance_id] = instance
        try:
            instance.created(await pods.create(body))
            await await_containers(instance, self._schedule_s)
            self._planner.add_node(plan.image, instance.node)
            ends_in_s = spec.deadline - self._clock.now()
            await boot(instance, spec, plan, self._key, self._bundles, ends_in_s)
            instance.is_up = True
            self._enforce_deadline(instance, spec.deadline)
            isolation = manifest.isolation(spec, plan)
            return await self._connect(instance, isolation, manifest.start_mode(plan))
        except BaseException:
            self._untrack(instance)
            await asyncio.shield(self._removals.spawn(self._discard(instance)))
            raise

    # --- running ----------------------------------------------------------------------------------

    def _untrack(self, instance: PodInstance) -> None:
        if self._instances.get(instance.id) is instance:
            del self._instances[instance.id]

    async def _connect(self, instance: PodInstance, isolation: Isolation, mode: str) -> DoorSandbox:
        async def find_cause() -> EndCause:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CAUSE_WAIT_S):
                    return await asyncio.shield(instance.ended)
            if instance.unexplained is None:
                raise TimeoutError
            return await asyncio.shield(instance.ended)

        async def open_door(port: int) -> DoorSandbox:
            dial = partial(instance.connect, port, self._key, {"kind": "door"})
            wait_s = CAUSE_WAIT_S + NODE_LOST_S
            sandbox = DoorSandbox(instance.id, isolation, mode, find_cause, wait_s, dial)
            await sandbox.open()
            return sandbox

        def on_ended(cause: EndCause, log: str) -> None:
            cause = pod_status.explained(cause, log)
            unexplained = pod_status.sent_inside(cause)
            if unexplained is None:
                self._finish(instance, cause)
                self._removals.spawn(self._discard(instance))
            elif not instance.ended.done():
                instance.unexplained = unexplained
                self._await_reason(instance)

        try:
            if instance.has_sidecar:
                instance.sidecar = await open_door(manifest.SIDECAR_PORT)
            sandbox = instance.sandbox = await open_door(manifest.PORT)
            await instance.take_control(
                self._key, on_ended
            )  # last: from now on the pod keeps its deadline
        except OSError as exc:
            cause = f"its pod does not answer ({exc})"
            raise lost(instance.id, cause) from exc
        sandbox.sidecar = instance.sidecar
        sandbox.on_end(partial(self._on_door_end, instance))
        if instance.sidecar is not None:
            instance.sidecar.on_end(
                lambda cause: self._on_door_end(instance, pod_status.of_sidecar(cause))
            )
        if instance.ended.done():
            sandbox.end(instance.ended.result())
        return sandbox

    def _on_door_end(self, instance: PodInstance, cause: EndCause) -> None:
        """End a pod whose door failed while it runs: nobody can reach it any more."""
        if not instance.ended.done():
            self._finish(instance, cause)
            self._removals.spawn(self._discard(instance))

    async def attach(self, instance_id: InstanceId) -> Sandbox:  # noqa: D102
        pod = await self._find(instance_id)
        annotations = pod["metadata"]["annotations"]
        instance = self._instances.get(instance_id)
        if instance is None or not instance.owns(pod):
            instance = PodInstance.new(
                instance_id, pod["metadata"]["name"], annotations[names.NONCE]
            )
            instance.has_sidecar = names.SIDECAR_CONTAINER in pod_status.lasting(pod)
            instance.has_storage = any(
                "persistentVolumeClaim" in volume for volume in pod["spec"]["volumes"]
            )
            instance.is_up = True
            self._instances[instance_id] = instance
        cause = instance.update(pod, False)
        if instance.unexplained is not None:
            cause = pod_status.end_cause(pod)  # the reason may be that of the end of its host
        try:
            if cause is not None or not instance.address.done():
                await self._discard(instance)
                raise lost(instance_id, cause or "it had not started when its host went away")
            self._enforce_deadline(instance, float(annotations[names.DEADLINE]))
            isolation = Isolation.model_validate_json(annotations[names.ISOLATION])
            return await self._connect(instance, isolation, annotations[names.START_MODE])
        except AenvError:
            self._untrack(instance)
            raise

    async def _find(self, instance_id: InstanceId) -> dict[str, Any]:
        """Return the pod of an instance of this host.

        Raises:
            SandboxLost: It does not exist, or belongs to another host.
        """
        pods = await self._open()
        with pod_status.api_errors(self._client):
            pod = await pods.get(names.pod_name(self._planner.owner.uid, instance_id))
        if pod is None:
            raise lost(instance_id, "it ended while its host was away")
        if pod["metadata"]["annotations"][names.HOST] != self._host_id:
            raise lost(instance_id, "it belongs to another host")
        return pod

    async def running(self) -> list[RunningSandbox]:  # noqa: D102
        pods = await self._open()
        with pod_status.api_errors(self._client):
            listed = await pods.list()
        found = []
        for pod in listed:
            annotations = pod["metadata"]["annotations"]
            # The API reports the end of a pod later than the pod itself does.
            if pod["metadata"]["uid"] not in self._ended and not pod_status.is_over(pod):
                instance_id = InstanceId(annotations[names.INSTANCE])
                deadline = float(annotations[names.DEADLINE])
                found.append(RunningSandbox(instance_id, self._host_id, deadline))
        return found

    async def set_deadline(  # noqa: D102
        self, instance_id: InstanceId, deadline: float
    ) -> None:
        pods = await self._open()
        instance = self._instances.get(instance_id)
        pod = await self._find(instance_id)
        if instance is None or instance.ended.done() or pod_status.is_over(pod):
            if instance is not None and instance.unexplained is not None:
                raise lost(instance_id, await asyncio.shield(instance.ended))
            raise lost(instance_id, "it does not run")
        check_deadline(pod, deadline, self._settings.grace_s)
        with pod_status.api_errors(self._client):
            is_there = await pods.annotate(instance.name, {names.DEADLINE: repr(deadline)})
        if not is_there:
            raise lost(instance_id, "it does not run")
        self._enforce_deadline(instance, deadline)
        await instance.move_deadline(deadline - self._clock.now())

    def logs(  # noqa: D102
        self, instance_id: InstanceId, *, tail_lines: int | None = None, follow: bool = False
    ) -> AsyncGenerator[bytes, None]:
        instance = self._instances.get(instance_id)
        if instance is None:
            raise lost(instance_id, "it does not run")
        return self._logs(instance, {"kind": "logs", "tail_lines": tail_lines, "follow": follow})

    async def _logs(
        self, instance: PodInstance, purpose: Mapping[str, Any]
    ) -> AsyncGenerator[bytes, None]:
        finished = asyncio.Event()
        instance.readers.add(finished)
        try:
            sock = await instance.connect(manifest.PORT, self._key, purpose)
            async with contextlib.aclosing(read_log(sock)) as pieces:
                async for piece in pieces:
                    yield piece
        except OSError as exc:
            if not instance.ended.done():
                raise FabricUnavailable(f"the log of {instance.id} is unavailable: {exc}") from exc
        finally:
            finished.set()
            instance.readers.discard(finished)

    # --- ends -------------------------------------------------------------------------------------

    def _await_reason(self, instance: PodInstance) -> None:
        """End a pod as from inside, unless the API shows a reason from outside in time."""

        def decide() -> None:
            if instance.unexplained is not None:
                self._finish(instance, instance.unexplained)
                self._removals.spawn(self._discard(instance))

        if instance.decision is None:
            instance.decision = asyncio.get_running_loop().call_later(NODE_LOST_S, decide)

    def _enforce_deadline(self, instance: PodInstance, deadline: float) -> None:
        """Delete a pod that does not end itself at its deadline."""

        def overdue() -> None:
            self._finish(instance, instance.unexplained or EndCause(TTL_PASSED))
            self._removals.spawn(self._discard(instance))

        if instance.timer is not None:
            instance.timer.cancel()
        wait_s = max(0.0, deadline - self._clock.now()) + _OVERDUE_S
        instance.timer = asyncio.get_running_loop().call_later(wait_s, overdue)

    async def stop(self, instance_ids: Sequence[InstanceId]) -> None:  # noqa: D102
        if not instance_ids:
            return
        pods = await self._open()
        deleted: list[tuple[str, str]] = []
        try:
            await stop_each(partial(self._stop_one, pods, deleted), instance_ids)
        finally:  # not before, since the caller counts all of them until this returns
            for name, uid in deleted:
                self._ending.add(uid)
                self._removals.spawn(self._await_end(pods, name, uid))

    async def _stop_one(
        self, pods: Pods, deleted: list[tuple[str, str]], instance_id: InstanceId
    ) -> None:
        """End a pod; if it was only deleted, and is not gone, add its name and uid to `deleted`."""
        instance = self._instances.get(instance_id)
        if instance is not None:
            self._finish(instance, EndCause(RELEASED))
        name = names.pod_name(self._planner.owner.uid, instance_id)
        try:
            with pod_status.api_errors(self._client):
                # The next pod with that storage may be on the same node, and must not start before.
                if instance is None or not instance.uid or instance.has_storage:
                    await pods.delete(name, "" if instance is None else instance.uid)
                elif await pods.request_end(name, instance.uid):
                    deleted.append((name, instance.uid))
        finally:
            if instance is not None:  # nobody else knows it any more
                await instance.release_control()

    async def _await_end(self, pods: Pods, name: str, uid: str) -> None:
        """Count a deleted pod until its node has ended it."""
        try:
            while uid in self._ending:
                try:
                    await pods.await_end(name, uid)
                    break
                except FabricUnavailable as exc:
                    logger.warning("%s; %s", exc.message, exc.hint)
        finally:
            self._ending.discard(uid)

    def ending(self) -> int:  # noqa: D102
        return len(self._ending)

    async def _discard(self, instance: PodInstance) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READERS_S):
                for finished in list(instance.readers):
                    await finished.wait()
        await instance.release_control()
        pods = self._pods_or_none
        if pods is None:
            return  # disconnected
        try:
            await pods.delete(instance.name, instance.uid)
        except (ApiRefused, FabricUnavailable) as exc:
            logger.warning(
                "pod %s is not deleted yet; Kubernetes deletes it with its owner: %s",
                instance.name,
                exc.message,
                extra=logs.of_instance(instance.id),
            )

    def _finish(self, instance: PodInstance, cause: EndCause) -> None:
        """Record that a sandbox ended; the first cause counts."""
        instance.end(cause)
        self._untrack(instance)
        self._ended.add(instance.uid)

    async def delete_storage(self, storage: StorageMount) -> None:  # noqa: D102
        await self._planner.claims.delete(storage)

    async def close(self) -> None:  # noqa: D102
        if self._janitor is not None:
            self._janitor.stop()
        await self._removals.settle(_CLOSE_S)  # the janitor deletes the other pods
        if self._pods_or_none is not None:
            self._pods_or_none.stop_watch()
            self._pods_or_none = None
        for instance in list(self._instances.values()):
            await instance.close()
        self._instances.clear()
        await self._client.close()
