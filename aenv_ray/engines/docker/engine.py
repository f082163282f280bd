"""The docker engine: instances are containers of the node's Docker daemon.

Host and container communicate through a Unix socket that no other process in the container can
reach (`aenv_ray.engines.docker.link`), and no port is opened anywhere. Containers are not children
of the host and outlive it; `aenv_ray.engines.docker.janitor`, a process of the node, ends those
that nobody owns. The daemon is the only authority on what exists; its event stream reports ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

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
from aenv_ray.engines.docker.containers import Containers
from aenv_ray.engines.docker.files import DockerFiles
from aenv_ray.engines.docker.host import DockerHost, HostPresence
from aenv_ray.engines.docker.instances import (
    CAUSE_WAIT_S,
    SIDECAR,
    DockerInstance,
    DockerInstances,
    await_boot,
    of_sidecar,
)
from aenv_ray.engines.docker.isolation import isolation
from aenv_ray.engines.docker.janitor import ADOPTION_GRACE_S
from aenv_ray.engines.docker.link import Links
from aenv_ray.engines.docker.names import container_name, docker_scope, sidecar_name
from aenv_ray.engines.docker.plan import DISK_BYTES, ContainerPlan
from aenv_ray.engines.docker.planner import ContainerPlanner
from aenv_ray.engines.docker.spec import container_body, etc_files, sidecar_body, start_mode
from aenv_ray.engines.door import DoorSandbox, not_connected
from aenv_ray.engines.node import docker_labels
from aenv_ray.engines.node.directory import node_directory
from aenv_ray.engines.node.docker_client import DaemonRefused, DockerClient
from aenv_ray.engines.node.local_storage import LocalStorage
from aenv_ray.errors import AenvError, SandboxLost
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import Isolation
from aenv_ray.policy import Policy
from aenv_ray.project.storage import StorageMount

RELEASED: Final = "it was released"


class DockerEngine(Engine):
    """Sandboxes as containers.

    Args:
        host_id: Identifies the sandboxes of a host, also after its restart.
        runtime_dir: Directory for sockets; a short path, and the same one for the daemon.
        data_dir: Directory for bundles; the same path for the daemon.
        scope: The Ray node; each scope has one janitor.
        owner_pid: Process with which everything ends: the raylet.
        address: The address of the daemon: ``unix:///path``.
        image: Image of projects that name none.
        runtime: OCI runtime for projects that name none; None for the daemon's default.
        docker_config: Directory of Docker's ``config.json``, with the logins for registries.
        grace_s: How long containers wait for a host that went away.
        storage_dir: For storage that outlives containers; the same path for the daemon. None: in
            the data directory.
        policy: Returns what projects may request of images.
        disk_bytes: Limit of writes to an image's directories, of projects that name none.
    """

    name = "docker"
    capabilities = Capabilities(
        isolation="container",
        network_modes=frozenset({"none", "host", "internet", "allowlist"}),
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
        owner_pid: int,
        address: str,
        image: str | None = None,
        runtime: str | None = None,
        docker_config: Path = Path("~", ".docker"),
        grace_s: float = ADOPTION_GRACE_S,
        storage_dir: Path | None = None,
        policy: Callable[[], Policy] = Policy,
        disk_bytes: int = DISK_BYTES,
    ) -> None:
        own_scope = docker_scope(scope)
        files = DockerFiles(node_directory(runtime_dir, own_scope))
        self._host = DockerHost(host_id, own_scope, DockerClient(address), files)
        self._files = files
        self._containers = Containers(self._host)
        self._instances = DockerInstances(self._containers)
        self._presence = HostPresence(
            self._host, owner_pid=owner_pid, grace_s=grace_s, on_event=self._instances.on_event,
            on_gap=self._instances.find_ended, on_watch=self._instances.note_oom_kills,
        )  # fmt: skip
        self._planner = ContainerPlanner(
            self._host, cache_dir=data_dir / "docker", image=image, runtime=runtime,
            docker_config=docker_config, policy=policy, disk_bytes=disk_bytes,
        )  # fmt: skip
        self._storage = LocalStorage(storage_dir or data_dir / "storage")
        self._links = Links(self._host)
        self._opening = asyncio.Lock()
        self._is_open = False

    # --- the daemon -----------------------------------------------------------------------------

    async def _open(self) -> None:
        """Connect to the daemon, once.

        Raises:
            FabricUnavailable: The daemon does not answer, or refuses this user.
        """
        async with self._opening:
            if self._is_open:
                return
            await self._planner.learn()
            await self._presence.enter()
            await asyncio.to_thread(self._links.open)
            self._is_open = True

    # --- starting -------------------------------------------------------------------------------

    async def start_many(  # noqa: D102
        self, specs: Sequence[SandboxSpec]
    ) -> list[Sandbox | AenvError]:
        await self._open()
        return await start_each(self._start_one, self.stop, specs)

    async def _start_one(self, spec: SandboxSpec) -> Sandbox | AenvError:
        try:
            return await self._boot(spec)
        except DaemonRefused as exc:
            self._planner.on_refusal(exc)
            return start_failed(spec.instance_id, exc.message)
        except AenvError as exc:
            return exc

    async def _boot(self, spec: SandboxSpec) -> Sandbox:
        if self._instances.find(spec.instance_id) is not None:
            raise start_failed(spec.instance_id, "it runs already")
        name = container_name(self._host.scope, spec.instance_id)
        async with self._planner.plan(spec, name) as plan:
            if spec.storage is None:
                return await self._boot_planned(spec, plan)
            storage = await asyncio.to_thread(self._storage.open, spec.storage)
            return await self._boot_planned(spec, replace(plan, storage=storage))

    async def _boot_planned(self, spec: SandboxSpec, plan: ContainerPlan) -> Sandbox:
        name = plan.name
        instance = self._instances.track(spec.instance_id, name)
        instance.has_sidecar = plan.sidecar is not None
        hides_source = spec.config.deploy.hide_source
        try:
            if hides_source:
                with _writing_files(spec):
                    copy = await asyncio.to_thread(self._files.copy_project, name, spec.project_dir)
                plan = replace(plan, project_dir=copy)
            boot = await self._launch(instance, spec, plan, name, container_body(spec, plan))
            async with self._sidecar_started(instance, spec, plan):
                await boot
            if hides_source:
                with _writing_files(spec):
                    await asyncio.to_thread(self._files.empty_project, name)
            return await self._connect(instance, isolation(spec, plan), start_mode(plan))
        except BaseException:
            for opened in instance.links.values():
                opened.close()
            self._instances.untrack(instance)
            await self._instances.remove_failed(instance)
            raise

    async def _launch(
        self,
        instance: DockerInstance,
        spec: SandboxSpec,
        plan: ContainerPlan,
        name: str,
        body: dict[str, Any],
    ) -> Coroutine[Any, Any, None]:
        """Start one of an instance's containers, and return the wait for its report."""
        with _writing_files(spec):
            self._files.make_directories(name, etc_files(spec, plan))
        link = instance.links[name] = self._links.link(name, body)
        async with self._containers.start_permit():
            instance.ids[name] = await self._containers.create(name, body)
            await self._containers.start(name, instance.ids[name], link)
            instance.started.add(name)
        prefix = "" if name == instance.name else SIDECAR
        return await_boot(instance, link, partial(self._containers.last_log, name), prefix)

    @contextlib.asynccontextmanager
    async def _sidecar_started(
        self, instance: DockerInstance, spec: SandboxSpec, plan: ContainerPlan
    ) -> AsyncIterator[None]:
        """Start the sidecar, if there is one, while the block waits for the main container.

        A sidecar joins the network of the main container, so that both have a private loopback, and
        shares a volume with it. It runs our runtime without any code of the project; the host calls
        it on behalf of the main container's runtime (`aenv_ray.engines.door`).

        Raises:
            SandboxStartFailed: It did not start; an exception of the block takes precedence.
        """
        sidecar = plan.sidecar
        if sidecar is None:
            yield
            return

        async def launch() -> None:
            body = sidecar_body(spec, plan, sidecar)
            try:
                boot = await self._launch(instance, spec, plan, sidecar.name, body)
            except DaemonRefused as exc:
                raise start_failed(spec.instance_id, f"{SIDECAR}{exc.message}") from exc
            await boot

        start = asyncio.create_task(launch())
        try:
            yield
            await start
        finally:
            if not start.done():
                start.cancel()
            await asyncio.wait([start])
            if not start.cancelled():
                start.exception()  # retrieved: the exception of the block is the one to report

    # --- running --------------------------------------------------------------------------------

    async def _connect(self, instance: DockerInstance, facts: Isolation, mode: str) -> DoorSandbox:
        async def find_cause() -> EndCause:
            return await asyncio.shield(instance.ended)

        async def open_door(name: str) -> DoorSandbox:
            dial = instance.links[name].connect
            sandbox = DoorSandbox(instance.id, facts, mode, find_cause, CAUSE_WAIT_S, dial)
            try:
                await sandbox.open()
            except OSError as exc:
                raise not_connected(instance.id, exc) from exc
            return sandbox

        if instance.has_sidecar:
            instance.sidecar = await open_door(sidecar_name(instance.name))
        sandbox = instance.sandbox = await open_door(instance.name)
        sandbox.sidecar = instance.sidecar
        if instance.ended.done():
            sandbox.end(instance.ended.result())
        for connected in instance.sandboxes:
            connected.on_end(partial(self._instances.abandon, instance))
        return sandbox

    async def attach(self, instance_id: InstanceId) -> Sandbox:  # noqa: D102
        await self._open()
        name = container_name(self._host.scope, instance_id)
        try:
            details = await self._containers.details(name)
        except DaemonRefused as exc:
            raise lost(instance_id, "it ended while its host was away") from exc
        if details["Config"]["Labels"][docker_labels.HOST_LABEL] != self._host.id:
            raise lost(instance_id, "it belongs to another host")
        instance = self._instances.find(instance_id) or self._instances.track(instance_id, name)
        try:
            return await self._reconnect(instance, details)
        except SandboxLost as exc:
            # Nobody else would end what still runs of it.
            self._instances.abandon(instance, EndCause(exc.message))
            raise
        except AenvError:
            self._instances.untrack(instance)
            raise

    async def _reconnect(self, instance: DockerInstance, details: dict[str, Any]) -> Sandbox:
        """Connect to an instance that an earlier host actor started.

        Raises:
            SandboxLost: It does not run, or does not answer.
            FabricUnavailable: The daemon does not answer, or the sandbox not now.
        """
        labels = details["Config"]["Labels"]
        instance.has_sidecar = docker_labels.VOLUME_LABEL in labels
        cause = self._find(instance, instance.name, details)
        if cause is None and instance.has_sidecar:
            cause = await self._find_sidecar(instance)
        if cause is not None:
            self._instances.finish(instance, cause)
            await self._instances.discard(instance)
            raise lost(instance.id, cause)
        facts = Isolation.model_validate_json(labels[docker_labels.ISOLATION_LABEL])
        return await self._connect(instance, facts, labels[docker_labels.START_MODE_LABEL])

    def _find(
        self, instance: DockerInstance, name: str, details: dict[str, Any]
    ) -> EndCause | None:
        """Take over a container that an earlier host actor started; return why it does not run."""
        instance.ids[name] = details["Id"]
        instance.started.add(name)
        instance.links[name] = self._links.link(name, details["Config"], details["Id"])
        if details["State"]["Running"]:
            return None
        return self._containers.cause(name, details, instance.out_of_memory)

    async def _find_sidecar(self, instance: DockerInstance) -> EndCause | None:
        name = sidecar_name(instance.name)
        try:
            cause = self._find(instance, name, await self._containers.details(name))
        except DaemonRefused:
            cause = EndCause("it was removed while its host was away")
        return None if cause is None else of_sidecar(cause)

    async def running(self) -> list[RunningSandbox]:  # noqa: D102
        await self._open()
        return await self._containers.running()

    async def set_deadline(  # noqa: D102
        self, instance_id: InstanceId, deadline: float
    ) -> None:
        await self._open()
        name = container_name(self._host.scope, instance_id)
        instance = self._instances.find(instance_id)
        sandbox = None if instance is None else instance.sandbox
        if instance is not None and sandbox is not None and sandbox.end_cause is None:
            has_sidecar = instance.has_sidecar  # it is connected, so it runs
        else:
            try:
                details = await self._containers.details(name)
            except DaemonRefused as exc:
                raise lost(instance_id, "it does not run") from exc
            if not details["State"]["Running"]:
                raise lost(instance_id, "it does not run")
            has_sidecar = docker_labels.VOLUME_LABEL in details["Config"]["Labels"]
        self._files.set_deadline(name, deadline)
        if has_sidecar:
            self._files.set_deadline(sidecar_name(name), deadline)

    def logs(  # noqa: D102
        self, instance_id: InstanceId, *, tail_lines: int | None = None, follow: bool = False
    ) -> AsyncGenerator[bytes, None]:
        instance = self._instances.find(instance_id)
        if instance is None:
            raise lost(instance_id, "it does not run")
        ended = instance.ended if follow else None
        return self._containers.logs(instance.name, lines=tail_lines, ended=ended)

    # --- ends -----------------------------------------------------------------------------------

    async def stop(self, instance_ids: Sequence[InstanceId]) -> None:  # noqa: D102
        if not instance_ids:
            return
        await self._open()
        await stop_each(self._stop_one, instance_ids)

    async def _stop_one(self, instance_id: InstanceId) -> None:
        name = container_name(self._host.scope, instance_id)
        instance = self._instances.find(instance_id)
        if instance is not None:
            self._instances.finish(instance, EndCause(RELEASED))
        async with self._containers.start_permit():
            has_sidecar = instance is None or instance.has_sidecar  # unknown: there may be one
            await self._containers.remove_all(name, has_sidecar=has_sidecar)
        self._files.clean(name)

    async def delete_storage(self, storage: StorageMount) -> None:  # noqa: D102
        await asyncio.to_thread(self._storage.delete, storage)

    async def close(self) -> None:  # noqa: D102
        self._presence.leave()
        self._is_open = False
        await self._instances.settle()
        await self._host.client.close()


@contextlib.contextmanager
def _writing_files(spec: SandboxSpec) -> Iterator[None]:
    """Make the failure to write the files of an instance one of its start."""
    try:
        yield
    except OSError as exc:
        raise start_failed(
            spec.instance_id, f"its files cannot be written: {exc}",
            "check the free space of AENV_RUNTIME_DIR",
        ) from exc  # fmt: skip
