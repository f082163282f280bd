"""The kubernetes engine: instances are pods beside the pod that their host runs in.

A pod is owned by the host's own, and Kubernetes ends it with that. The host dials the pod and never
the other way round, so that nothing of ours need be reachable from a sandbox. What exists is always
asked of the API, what became of it is told by one watch, and everything else, calls, files, logs,
goes to the pod itself (`aenv_ray.runtime.container.pod`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from aenv_ray.clock import SystemClock
from aenv_ray.engines.base import Capabilities, Engine, RunningSandbox, Sandbox, SandboxSpec, lost
from aenv_ray.engines.door import DoorSandbox
from aenv_ray.engines.kubernetes import causes, names, start
from aenv_ray.engines.kubernetes import spec as kubernetes_spec
from aenv_ray.engines.kubernetes.boot import Kits
from aenv_ray.engines.kubernetes.client import ApiRefused, KubernetesClient
from aenv_ray.engines.kubernetes.door import read_log
from aenv_ray.engines.kubernetes.instance import READERS_S, Instance
from aenv_ray.engines.kubernetes.janitor import Janitor
from aenv_ray.engines.kubernetes.namespace import Place
from aenv_ray.engines.kubernetes.plan import Planner
from aenv_ray.engines.kubernetes.pods import Pods
from aenv_ray.engines.node.directory import node_directory
from aenv_ray.engines.node.host_key import HostKey
from aenv_ray.errors import AenvError, FabricUnavailable
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import Isolation
from aenv_ray.project.storage import StorageMount
from aenv_ray.runtime.container.handshake import secret_digest
from aenv_ray.runtime.container.pod import TTL_PASSED

logger = logging.getLogger(__name__)

RELEASED: Final = "it was released"
_OVERDUE_S: Final = 2.0
"""How late a pod may be with ending itself."""
_CLOSE_S: Final = 10.0


class KubernetesEngine(Engine):
    """Sandboxes as pods.

    Args:
        host_id: Under which a restarted host finds its sandboxes.
        runtime_dir: For the key of this pod's hosts; ends with the pod.
        data_dir: For kits.
        scope: Tells hosts of one Ray node from others'.
        place: What the cluster's operator set.
        client: To the API. None: as this pod's service account.
        schedule_s: How long a pod waits for a node.
    """

    name = "kubernetes"
    capabilities = Capabilities(
        isolation="pod",
        network_modes=frozenset({"none", "internet"}),
        second_container=True,
        storage=True,
        slow_start=True,
    )

    def __init__(
        self,
        host_id: HostId,
        *,
        runtime_dir: Path,
        data_dir: Path,
        scope: str,
        place: Place,
        client: KubernetesClient | None = None,
        schedule_s: float = start.SCHEDULE_S,
    ) -> None:
        self._host_id = host_id
        self._place = place
        self._clock = SystemClock()
        self._client = client or KubernetesClient(place.namespace)
        self._planner = Planner(self._client, place, host_id)
        self._key = HostKey(node_directory(runtime_dir, names.node_scope(scope)) / "key")
        self._kits = Kits(data_dir / "kubernetes")
        self._schedule_s = schedule_s
        self._instances: dict[str, Instance] = {}
        self._ended: set[str] = set()
        """Uids of pods that ended by themselves, and are in the API still."""
        self._opening = asyncio.Lock()
        self._pods_or_none: Pods | None = None
        self._janitor: Janitor | None = None
        self._removals: set[asyncio.Task[None]] = set()

    # --- the cluster ------------------------------------------------------------------------------

    async def _open(self) -> Pods:
        """Connect; does nothing when connected.

        Raises:
            FabricUnavailable: The API does not answer, or refuses this host's service account.
        """
        async with self._opening:
            if self._pods_or_none is None:
                try:
                    await self._client.open()
                    owner = await self._planner.learn()
                    await asyncio.to_thread(self._key.load)
                    selector = names.host_selector(owner.uid, self._host_id)
                    pods = Pods(self._client, selector, self._on_pod)
                    await pods.enter()
                except ApiRefused as exc:
                    raise causes.in_words(exc, self._client.namespace) from exc
                self._pods_or_none = pods
                self._janitor = Janitor(pods, names.owner_selector(owner.uid), self._is_known)
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
        cause = instance.note(pod, gone)
        if cause is not None:
            self._finish(instance, cause)
            if not gone:
                self._in_background(self._discard(instance))

    # --- starting ---------------------------------------------------------------------------------

    async def start_many(  # noqa: D102
        self, specs: Sequence[SandboxSpec]
    ) -> list[Sandbox | AenvError]:
        await self._open()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._start_one(spec)) for spec in specs]
        return [task.result() for task in tasks]

    async def _start_one(self, spec: SandboxSpec) -> Sandbox | AenvError:
        if spec.instance_id in self._instances:
            return start.failed(spec.instance_id, "it runs already")
        try:
            lack = ""
            while True:
                try:
                    return await self._boot(spec, lack)
                except causes.Unfitting as exc:
                    if lack:
                        return start.failed(spec.instance_id, str(exc))
                    lack = str(exc)
        except ApiRefused as exc:
            return causes.in_words(exc, self._client.namespace, spec.instance_id)
        except AenvError as exc:
            return exc

    async def _boot(self, spec: SandboxSpec, lack: str) -> Sandbox:
        pods = await self._open()
        nonce = secrets.token_hex(8)
        name = names.pod_name(self._planner.owner.uid, spec.instance_id)
        secret = self._key.secret(name, nonce, "boot")
        around = await self._planner.surroundings(spec, name, nonce, secret_digest(secret), lack)
        instance = Instance.new(spec.instance_id, name, nonce)
        instance.has_second = bool(around.second_image)
        body = kubernetes_spec.pod_body(spec, around, self._clock.now())
        self._instances[spec.instance_id] = instance
        try:
            instance.uid = (await pods.create(body))["metadata"]["uid"]
            await start.reachable(instance, self._schedule_s)
            self._planner.note_image(around.image, instance.node)
            ends_in_s = spec.deadline - self._clock.now()
            await start.give(instance, spec, around, self._key, self._kits, ends_in_s)
            instance.is_up = True
            self._keep_deadline(instance, spec.deadline)
            isolation = kubernetes_spec.isolation(spec, around)
            return await self._connect(instance, isolation, kubernetes_spec.start_mode(around))
        except BaseException:
            self._untrack(instance)
            await asyncio.shield(self._in_background(self._discard(instance)))
            raise

    # --- running ----------------------------------------------------------------------------------

    def _untrack(self, instance: Instance) -> None:
        if self._instances.get(instance.id) is instance:
            del self._instances[instance.id]

    async def _connect(self, instance: Instance, isolation: Isolation, mode: str) -> DoorSandbox:
        async def find_cause() -> str:
            return await asyncio.shield(instance.ended)

        async def open_door(port: int) -> DoorSandbox:
            sandbox = DoorSandbox(instance.id, isolation, mode, find_cause, start.CAUSE_WAIT_S)
            await sandbox.connect(await instance.enter(port, self._key, {"kind": "door"}))
            return sandbox

        def on_ended(cause: str, log: str) -> None:
            self._finish(instance, causes.with_log(cause, log))
            self._in_background(self._discard(instance))

        try:
            if instance.has_second:
                instance.second = await open_door(kubernetes_spec.SECOND_PORT)
            sandbox = instance.sandbox = await open_door(kubernetes_spec.PORT)
            await instance.control(self._key, on_ended)  # last: from then on its deadline holds
        except OSError as exc:
            cause = f"its pod does not answer ({exc})"
            raise lost(instance.id, cause) from exc
        sandbox.sidecar = instance.second
        if instance.ended.done():
            sandbox.end(instance.ended.result())
        return sandbox

    async def attach(self, instance_id: InstanceId) -> Sandbox:  # noqa: D102
        pod = await self._find(instance_id)
        annotations = pod["metadata"]["annotations"]
        instance = self._instances.get(instance_id)
        if instance is None or not instance.owns(pod):
            instance = Instance.new(instance_id, pod["metadata"]["name"], annotations[names.NONCE])
            instance.has_second = len(pod["spec"]["containers"]) > 1
            instance.is_up = True
            self._instances[instance_id] = instance
        cause = instance.note(pod, False)
        try:
            if cause is not None or not instance.address.done():
                await self._discard(instance)
                raise lost(instance_id, cause or "it had not started when its host went away")
            self._keep_deadline(instance, float(annotations[names.DEADLINE]))
            isolation = kubernetes_spec.listed_isolation(annotations)
            return await self._connect(instance, isolation, annotations[names.START_MODE])
        except AenvError:
            self._untrack(instance)
            raise

    async def _find(self, instance_id: InstanceId) -> dict[str, Any]:
        """Return the pod of an instance of this host.

        Raises:
            SandboxLost: There is none.
        """
        pods = await self._open()
        try:
            pod = await pods.get(names.pod_name(self._planner.owner.uid, instance_id))
        except ApiRefused as exc:
            raise causes.in_words(exc, self._client.namespace) from exc
        if pod is None:
            raise lost(instance_id, "it ended while its host was away")
        if pod["metadata"]["annotations"][names.HOST] != self._host_id:
            raise lost(instance_id, "it belongs to another host")
        return pod

    async def running(self) -> list[RunningSandbox]:  # noqa: D102
        pods = await self._open()
        try:
            listed = await pods.list()
        except ApiRefused as exc:
            raise causes.in_words(exc, self._client.namespace) from exc
        found = []
        for pod in listed:
            annotations = pod["metadata"]["annotations"]
            # A node tells later than the pod itself that it ended.
            if pod["metadata"]["uid"] not in self._ended and not causes.is_over(pod):
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
        if instance is None or instance.ended.done() or causes.is_over(pod):
            raise lost(instance_id, "it does not run")
        start.check_life(pod, deadline, self._place.grace_s)
        try:
            is_there = await pods.annotate(instance.name, {names.DEADLINE: repr(deadline)})
        except ApiRefused as exc:
            raise causes.in_words(exc, self._client.namespace) from exc
        if not is_there:
            raise lost(instance_id, "it does not run")
        self._keep_deadline(instance, deadline)
        await instance.move_deadline(deadline - self._clock.now())

    def logs(  # noqa: D102
        self, instance_id: InstanceId, *, tail_lines: int | None = None, follow: bool = False
    ) -> AsyncGenerator[bytes, None]:
        instance = self._instances.get(instance_id)
        if instance is None:
            raise lost(instance_id, "it does not run")
        return self._logs(instance, {"kind": "logs", "tail_lines": tail_lines, "follow": follow})

    async def _logs(
        self, instance: Instance, purpose: Mapping[str, Any]
    ) -> AsyncGenerator[bytes, None]:
        finished = asyncio.Event()
        instance.readers.add(finished)
        try:
            sock = await instance.enter(kubernetes_spec.PORT, self._key, purpose)
            async with contextlib.aclosing(read_log(sock)) as pieces:
                async for piece in pieces:
                    yield piece
        except OSError as exc:
            if not instance.ended.done():
                raise FabricUnavailable(f"{instance.id} does not show its log: {exc}") from exc
        finally:
            finished.set()
            instance.readers.discard(finished)

    # --- ends -------------------------------------------------------------------------------------

    def _keep_deadline(self, instance: Instance, deadline: float) -> None:
        """End a pod that does not end itself at its deadline."""

        def overdue() -> None:
            self._finish(instance, TTL_PASSED)
            self._in_background(self._discard(instance))

        if instance.timer is not None:
            instance.timer.cancel()
        wait_s = max(0.0, deadline - self._clock.now()) + _OVERDUE_S
        instance.timer = asyncio.get_running_loop().call_later(wait_s, overdue)

    async def stop(self, instance_ids: Sequence[InstanceId]) -> None:  # noqa: D102
        if not instance_ids:
            return
        await self._open()
        async with asyncio.TaskGroup() as group:
            for instance_id in instance_ids:
                group.create_task(self._stop_one(instance_id))

    async def _stop_one(self, instance_id: InstanceId) -> None:
        pods = await self._open()
        instance = self._instances.get(instance_id)
        if instance is not None:
            self._finish(instance, RELEASED)
        name = names.pod_name(self._planner.owner.uid, instance_id)
        try:
            await pods.delete(name, "" if instance is None else instance.uid)
        except ApiRefused as exc:
            raise causes.in_words(exc, self._client.namespace) from exc
        if instance is not None:
            await instance.let_go()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do what must be done whoever waits for it; `close` lets it finish."""
        task = asyncio.create_task(work)
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)
        return task

    async def _discard(self, instance: Instance) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READERS_S):
                for finished in list(instance.readers):
                    await finished.wait()
        await instance.let_go()
        pods = self._pods_or_none
        if pods is None:
            return  # this host disconnected
        try:
            await pods.delete(instance.name, instance.uid)
        except ApiRefused as exc:
            logger.warning("%s is left to Kubernetes: %s", instance.name, exc.message)
        except FabricUnavailable as exc:
            logger.warning("%s is left to Kubernetes: %s", instance.name, exc.message)

    def _finish(self, instance: Instance, cause: str) -> None:
        """Tell that a sandbox ended; the first cause stays."""
        instance.end(cause)
        self._untrack(instance)
        self._ended.add(instance.uid)

    async def delete_storage(self, storage: StorageMount) -> None:  # noqa: D102
        await self._planner.claims.delete(storage)

    async def close(self) -> None:  # noqa: D102
        if self._janitor is not None:
            self._janitor.leave()
        if self._removals:
            _, late = await asyncio.wait(self._removals, timeout=_CLOSE_S)
            for removal in late:
                removal.cancel()  # the janitor does the rest
        if self._pods_or_none is not None:
            self._pods_or_none.leave()
            self._pods_or_none = None
        for instance in list(self._instances.values()):
            await instance.close()
        self._instances.clear()
        await self._client.close()
