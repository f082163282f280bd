"""The docker engine: instances are containers of the node's Docker daemon.

Container and host share one directory, mounted into that container alone, and speak through a Unix
socket in it: no port is opened anywhere. Containers are no children of the host and go on without
it; `aenv_ray.engines.docker_janitor`, a process of the node, ends those that nobody owns. What
exists is always asked of the daemon, and what became of it is told by its event stream.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from aenv_ray.engines import docker_files, docker_janitor
from aenv_ray.engines import docker_spec as specs
from aenv_ray.engines.base import Capabilities, Engine, RunningSandbox, Sandbox, SandboxSpec, lost
from aenv_ray.engines.docker_client import DaemonRefused, DockerClient
from aenv_ray.engines.docker_containers import REMOVED, Containers, hear, listening
from aenv_ray.engines.docker_files import DockerFiles, container_name
from aenv_ray.engines.docker_plan import Planner
from aenv_ray.engines.docker_presence import Presence
from aenv_ray.engines.door import DoorSandbox
from aenv_ray.engines.launcher_client import node_directory
from aenv_ray.errors import AenvError, FabricUnavailable, SandboxStartFailed
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import Isolation

logger = logging.getLogger(__name__)

BOOT_DEADLINE_S: Final = 60.0
"""A started container says that its project is loaded within this, or is ended."""
RELEASED: Final = "it was released"
CAUSE_WAIT_S: Final = 10.0
"""A daemon under load tells late why a container ended."""
_CLOSE_S: Final = 10.0


@dataclass
class _Instance:
    """A container of this host."""

    id: InstanceId
    name: str
    ended: asyncio.Future[str]
    """Its cause, once it ended."""
    container_id: str = ""
    """The daemon's; an earlier container may have had the same name."""
    is_started: bool = False
    sandbox: DoorSandbox | None = None
    log: str = ""
    was_out_of_memory: bool = False
    burial: asyncio.Task[None] | None = None


class DockerEngine(Engine):
    """Sandboxes as containers.

    Args:
        host_id: Under which a restarted host finds its sandboxes.
        runtime_dir: For sockets; short, and visible to the daemon under the same path.
        data_dir: For kits; visible to the daemon under the same path.
        scope: One janitor serves each scope: a Ray node.
        owner_pid: Process with which everything ends: the raylet.
        address: Of the daemon: ``unix:///path``.
        image: Of projects that name none.
        runtime: OCI runtime of projects that name none; None for the daemon's.
        grace_s: How long containers wait for a host that went away.
    """

    name = "docker"
    capabilities = Capabilities(
        isolation="container",
        network_modes=frozenset({"none", "host", "internet"}),
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
        grace_s: float = docker_janitor.ADOPTION_GRACE_S,
    ) -> None:
        self._host_id = host_id
        self._scope = f"{scope}/docker"
        self._files = DockerFiles(node_directory(runtime_dir, self._scope))
        self._client = DockerClient(address)
        self._containers = Containers(self._client, self._files, self._scope, host_id)
        self._presence = Presence(
            self._client,
            address=address,
            files=self._files,
            scope=self._scope,
            host_id=host_id,
            owner_pid=owner_pid,
            grace_s=grace_s,
            on_event=self._on_event,
            on_gap=self._find_ended,
        )
        self._planner = Planner(
            self._client, self._files, self._scope, host_id,
            cache_dir=data_dir / "docker", image=image, runtime=runtime,
        )  # fmt: skip
        self._instances: dict[str, _Instance] = {}
        self._opening = asyncio.Lock()
        self._is_open = False
        self._removals: set[asyncio.Task[None]] = set()

    # --- the daemon -----------------------------------------------------------------------------

    async def _open(self) -> None:
        """Connect; does nothing when connected.

        Raises:
            FabricUnavailable: The daemon does not answer, or refuses this user.
        """
        async with self._opening:
            if self._is_open:
                return
            await self._planner.learn()
            await self._presence.enter()
            self._is_open = True

    def _on_event(self, event: dict[str, Any]) -> None:
        attributes = event["Actor"]["Attributes"]
        instance = self._instances.get(attributes.get(docker_files.INSTANCE_LABEL, ""))
        if instance is None or instance.container_id != event["Actor"]["ID"]:
            return
        match event["Action"]:
            case "oom":
                instance.was_out_of_memory = True
            case "die":
                self._bury(instance)
            case "destroy":
                self._finish(instance, REMOVED)

    async def _find_ended(self) -> None:
        """End what ended while the daemon, or its events, were away."""
        rows = {
            row["Names"][0].lstrip("/"): row
            for row in await self._containers.rows(running_only=False)
        }
        for instance in list(self._instances.values()):
            if not instance.is_started:
                continue  # whoever starts it finds out
            row = rows.get(instance.name)
            if row is None:
                self._finish(instance, "its container was removed while the daemon was away")
            elif row["State"] != "running":
                self._bury(instance)

    # --- starting -------------------------------------------------------------------------------

    async def start_many(  # noqa: D102
        self, specs: Sequence[SandboxSpec]
    ) -> list[Sandbox | AenvError]:
        await self._open()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._start_one(spec)) for spec in specs]
        return [task.result() for task in tasks]

    async def _start_one(self, spec: SandboxSpec) -> Sandbox | AenvError:
        try:
            return await self._boot(spec)
        except DaemonRefused as exc:
            return SandboxStartFailed(
                f"{spec.instance_id} did not start: {exc.message}", instance_id=spec.instance_id
            )
        except AenvError as exc:
            return exc

    async def _boot(self, spec: SandboxSpec) -> Sandbox:
        if spec.instance_id in self._instances:
            raise SandboxStartFailed(
                f"{spec.instance_id} did not start: it runs already", instance_id=spec.instance_id
            )
        name = container_name(self._scope, spec.instance_id)
        around = await self._planner.surroundings(spec, name)
        instance = self._track(spec.instance_id, name)
        directory = self._files.make_run_directory(name)
        hides_source = spec.config.deploy.hide_source
        try:
            if hides_source:
                copy = await asyncio.to_thread(self._files.copy_project, name, spec.project_dir)
                around = replace(around, project_dir=copy)
            with listening(directory / "boot") as listener:
                async with self._containers.slot():
                    body = specs.container_body(spec, around)
                    instance.container_id = await self._containers.create(name, body)
                    await self._containers.start(name)
                    instance.is_started = True
                await self._await_boot(instance, listener)
            if hides_source:
                await asyncio.to_thread(self._files.empty_project, name)
            return await self._connect(
                instance, specs.isolation(spec, around), specs.start_mode(around)
            )
        except BaseException:
            self._untrack(instance)
            await self._remove_surely(instance)
            raise

    async def _await_boot(self, instance: _Instance, listener: socket.socket) -> None:
        """Wait until the container says that it is up.

        Raises:
            SandboxStartFailed: It said why not, died, or said nothing in time.
        """
        report = asyncio.create_task(hear(listener))
        try:
            async with asyncio.timeout(BOOT_DEADLINE_S):
                futures: set[asyncio.Future[Any]] = {report, instance.ended}
                await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
                message = report.result() if report.done() else {}
                if "ready" in message:
                    return
                # One that closed without a word is dying; the daemon says how.
                why = message.get("failed") or await asyncio.shield(instance.ended)
        except TimeoutError:
            why = f"it was not up after {BOOT_DEADLINE_S:g} s"
        finally:
            report.cancel()
        raise SandboxStartFailed(f"{instance.id} did not start: {why}", instance_id=instance.id)

    # --- running --------------------------------------------------------------------------------

    def _track(self, instance_id: InstanceId, name: str) -> _Instance:
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        instance = self._instances[instance_id] = _Instance(instance_id, name, ended)
        return instance

    def _untrack(self, instance: _Instance) -> None:
        if self._instances.get(instance.id) is instance:
            del self._instances[instance.id]

    async def _connect(self, instance: _Instance, isolation: Isolation, mode: str) -> DoorSandbox:
        async def find_cause() -> str:
            return await asyncio.shield(instance.ended)

        sandbox = DoorSandbox(instance.id, isolation, mode, find_cause, CAUSE_WAIT_S)
        sock = socket.socket(socket.AF_UNIX)
        try:
            # A connect to a listening Unix socket does not block: the backlog takes it.
            sock.connect(str(self._files.run_directory(instance.name) / "door"))
            await sandbox.connect(sock)
        except OSError as exc:
            sock.close()
            raise lost(instance.id, f"its socket is gone ({exc.strerror})") from exc
        instance.sandbox = sandbox
        if instance.ended.done():
            sandbox.end(instance.ended.result())
        return sandbox

    async def attach(self, instance_id: InstanceId) -> Sandbox:  # noqa: D102
        await self._open()
        name = container_name(self._scope, instance_id)
        instance = self._instances.get(instance_id) or self._track(instance_id, name)
        try:
            details = await self._containers.details(name)
            instance.container_id, instance.is_started = details["Id"], True
            row_labels = details["Config"]["Labels"]
            if row_labels[docker_files.HOST_LABEL] != self._host_id:
                raise lost(instance_id, "it belongs to another host")
            if not details["State"]["Running"]:
                cause = self._containers.cause(
                    name, details, was_out_of_memory=instance.was_out_of_memory
                )
                await self._containers.remove(name)
                self._files.clean(name)
                raise lost(instance_id, cause)
            return await self._connect(
                instance,
                specs.listed_isolation(row_labels),
                row_labels[docker_files.START_MODE_LABEL],
            )
        except DaemonRefused as exc:
            self._untrack(instance)
            raise lost(instance_id, "it ended while its host was away") from exc
        except AenvError:
            self._untrack(instance)
            raise

    async def running(self) -> list[RunningSandbox]:  # noqa: D102
        await self._open()
        found = []
        for row in await self._containers.rows(running_only=True):
            row_labels, name = row["Labels"], row["Names"][0].lstrip("/")
            deadline = self._files.deadline(name, row_labels[docker_files.DEADLINE_LABEL])
            instance_id = InstanceId(row_labels[docker_files.INSTANCE_LABEL])
            found.append(RunningSandbox(instance_id, self._host_id, deadline))
        return found

    async def set_deadline(  # noqa: D102
        self, instance_id: InstanceId, deadline: float
    ) -> None:
        await self._open()
        name = container_name(self._scope, instance_id)
        instance = self._instances.get(instance_id)
        sandbox = None if instance is None else instance.sandbox
        if sandbox is None or sandbox.end_cause is not None:  # else its connection is the proof
            try:
                details = await self._containers.details(name)
            except DaemonRefused as exc:
                raise lost(instance_id, "it does not run") from exc
            if not details["State"]["Running"]:
                raise lost(instance_id, "it does not run")
        self._files.move_deadline(name, deadline)

    # --- ends -----------------------------------------------------------------------------------

    async def stop(self, instance_ids: Sequence[InstanceId]) -> None:  # noqa: D102
        if not instance_ids:
            return
        await self._open()
        async with asyncio.TaskGroup() as group:
            for instance_id in instance_ids:
                group.create_task(self._stop_one(instance_id))

    async def _stop_one(self, instance_id: InstanceId) -> None:
        name = container_name(self._scope, instance_id)
        instance = self._instances.get(instance_id)
        if instance is not None:
            self._finish(instance, RELEASED)
        async with self._containers.slot():
            await self._containers.remove(name)
        self._files.clean(name)

    async def _remove_surely(self, instance: _Instance) -> None:
        """Remove what failed to start, also when this task is being cancelled."""
        await asyncio.shield(self._in_background(self._discard(instance)))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do what must be done whoever waits for it; `close` lets it finish."""
        task = asyncio.create_task(work)
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)
        return task

    async def _discard(self, instance: _Instance) -> None:
        try:
            await self._containers.remove(instance.name)
        except FabricUnavailable as exc:
            logger.warning("%s is left to the janitor: %s", instance.name, exc)
            return
        self._files.clean(instance.name)

    def _bury(self, instance: _Instance) -> None:
        """Find out why a container died, tell, and remove it."""
        if instance.burial is None and not instance.ended.done():
            instance.burial = self._in_background(self._inquire(instance))

    async def _inquire(self, instance: _Instance) -> None:
        name = instance.name
        try:
            details = await self._containers.details(name)
            cause = self._containers.cause(
                name, details, was_out_of_memory=instance.was_out_of_memory
            )
            if details["State"]["Status"] != "removing":
                instance.log = await self._containers.log(name)
        except (DaemonRefused, FabricUnavailable):
            left = self._files.cause(name)
            cause = left or REMOVED
        self._finish(instance, cause)
        await self._discard(instance)

    def _finish(self, instance: _Instance, cause: str) -> None:
        """Tell that a sandbox ended; the first cause stays."""
        if instance.ended.done():
            return
        if instance.log and cause not in (docker_janitor.TTL_PASSED, docker_janitor.HOST_GONE):
            cause = f"{cause}; the end of its log:\n{instance.log}"
        instance.ended.set_result(cause)
        self._untrack(instance)
        if instance.sandbox is not None:
            instance.sandbox.end(cause)

    async def close(self) -> None:  # noqa: D102
        self._presence.leave()
        self._is_open = False
        if self._removals:
            await asyncio.wait(self._removals, timeout=_CLOSE_S)  # the janitor does the rest
        for instance in list(self._instances.values()):
            if instance.sandbox is not None:
                await instance.sandbox.close()
        self._instances.clear()
        await self._client.close()
