"""The process engine: instances are processes, forked from a template by the node's launcher.

The default: it needs neither Docker nor root and starts an instance in milliseconds.
`aenv_ray.engines.process.launcher` owns the processes, `aenv_ray.runtime.fork.template` forks them,
and `aenv_ray.runtime.fork.jail` isolates them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aenv_ray.bounded_cache import BoundedCache
from aenv_ray.engines.base import (
    Capabilities,
    EndCause,
    Engine,
    RunningSandbox,
    Sandbox,
    SandboxSpec,
    lost,
)
from aenv_ray.engines.door import (
    CAUSE_WAIT_S,
    DoorSandbox,
    connect_to_door,
    not_connected,
)
from aenv_ray.engines.node.directory import node_directory, short_name
from aenv_ray.engines.node.local_storage import LocalStorage
from aenv_ray.engines.node.variables import instance_variables
from aenv_ray.engines.process import interpreters, logs, virtual_environment
from aenv_ray.engines.process.launcher import HOST_GONE, TTL_PASSED
from aenv_ray.engines.process.launcher_client import (
    ANSWER_DEADLINE_S,
    BOOT_DEADLINE_S,
    TEMPLATE_DEADLINE_S,
    LauncherClient,
    end_cause,
)
from aenv_ray.engines.process.plan import (
    NETWORK_MODES,
    Plan,
    check_project,
    isolation_of,
    loaded,
    why_not_from_template,
    with_storage,
)
from aenv_ray.errors import AenvError, FabricUnavailable, InsideCause, SandboxStartFailed
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.project.storage import StorageMount

_PACKAGE: Final = Path(__file__).resolve().parents[2]
_MAX_PLANS: Final = 256


@dataclass(frozen=True)
class _Connection:
    """A running sandbox. Removed when its process ends; then the sandbox itself tells the cause."""

    sandbox: DoorSandbox
    exited: asyncio.Future[EndCause]
    """Done, with the cause, when the launcher reports the end of the process."""


class ProcessEngine(Engine):
    """Sandboxes as processes of the node's launcher.

    Args:
        host_id: Id of the host, by which a restarted host finds its sandboxes.
        runtime_dir: Directory for sockets; its path must be short.
        data_dir: Directory for caches.
        scope: Name of the Ray node; each scope has its own launcher.
        owner_pid: The raylet; the launcher and all sandboxes end with it.
        isolation: ``auto``, ``none`` or ``required``, or a function that returns it for each start.
        storage_dir: Directory of storage that outlives sandboxes. None: below the data directory.
        requirements_cache: Directory of virtual environments. None: below the data directory.
        cgroup: Directory of the sandboxes' control groups. None: they have none.
    """

    name = "process"
    capabilities = Capabilities(
        isolation="namespaces" if sys.platform == "linux" else "none",
        network_modes=NETWORK_MODES,
        storage=sys.platform == "linux",
    )

    def __init__(
        self,
        host_id: HostId,
        *,
        runtime_dir: Path,
        data_dir: Path,
        scope: str,
        owner_pid: int,
        isolation: str | Callable[[], str] = "auto",
        storage_dir: Path | None = None,
        requirements_cache: Path | None = None,
        cgroup: Path | None = None,
    ) -> None:
        self._cgroup = cgroup
        name = hashlib.sha256(str(_PACKAGE).encode()).hexdigest()[:12]
        self._runtime_path = data_dir / "runtime" / name
        """Holds a link to this package alone, for the path of virtual environments."""
        self._environments = requirements_cache or data_dir / "environments"
        self._isolation = isolation
        self._storage = LocalStorage(storage_dir or data_dir / "storage")
        self._directory = node_directory(runtime_dir, scope)
        self._launcher = LauncherClient(
            self._directory, host_id, owner_pid, self._on_exit, self._on_launcher_lost
        )
        self._connections: dict[InstanceId, _Connection] = {}
        self._plans: BoundedCache[tuple[Any, ...], Plan] = BoundedCache(_MAX_PLANS)
        """By all that they depend on besides their configurations."""
        self._ready: BoundedCache[str, dict[str, Any]] = BoundedCache(_MAX_PLANS)
        self._raised: BoundedCache[str, dict[str, Any]] = BoundedCache(_MAX_PLANS)
        """Reports of templates in which the project's code raised; they are not started again."""

    # --- starting -------------------------------------------------------------------------------

    async def start_many(  # noqa: D102
        self, specs: Sequence[SandboxSpec]
    ) -> list[Sandbox | AenvError]:
        await self._launcher.connect()
        results = await self._start(specs)
        # If the template was ended as idle, or died, start it again, but only once.
        again = [spec for spec in specs if results[spec.instance_id] is None]
        if again:
            try:
                results |= await self._start(again)
            except BaseException:
                for instance_id, outcome in results.items():
                    if isinstance(outcome, Sandbox):  # its caller will not hear of it
                        self._end_process(instance_id)
                raise
        return [results[spec.instance_id] or _template_gone(spec) for spec in specs]

    async def _start(
        self, specs: Sequence[SandboxSpec]
    ) -> dict[InstanceId, Sandbox | AenvError | None]:
        """Start sandboxes; None stands for one whose template is gone."""
        results: dict[InstanceId, Sandbox | AenvError | None] = {}
        items: list[dict[str, Any]] = []
        modes: dict[str, tuple[str, dict[str, Any]]] = {}
        plans: dict[tuple[Path, int, StorageMount | None], Plan | AenvError] = {}
        for spec in specs:
            group = (spec.project_dir, id(spec.config), spec.storage)
            if group not in plans:
                plans[group] = await self._plan(spec)
            plan = plans[group]
            if isinstance(plan, AenvError):
                results[spec.instance_id] = plan
                continue
            try:
                key, mode, ready = await self._choose_template(plan, spec)
            except AenvError as exc:
                results[spec.instance_id] = exc
                continue
            modes[spec.instance_id] = (mode, ready)
            items.append(
                {
                    "id": spec.instance_id,
                    "template": key,
                    "env": instance_variables(spec, ready["isolation"]["kind"], plan.python),
                    "arguments": list(spec.arguments),
                    "mode": mode,
                    "deadline": spec.deadline,
                }
            )
        if items:
            results |= await self._launch(items, modes)
        return results

    async def _launch(
        self, items: list[dict[str, Any]], modes: dict[str, tuple[str, dict[str, Any]]]
    ) -> dict[InstanceId, Sandbox | AenvError | None]:
        results: dict[InstanceId, Sandbox | AenvError | None] = {}
        seq, answers = self._launcher.send("start", items=items)
        try:
            for _ in items:
                answer = await self._launcher.receive(
                    answers, "the start of an instance", BOOT_DEADLINE_S
                )
                instance_id = InstanceId(answer["id"])
                mode, ready = modes[instance_id]
                if "started" in answer:
                    sandbox = await self._connect(instance_id, mode, ready)
                    if isinstance(sandbox, AenvError):
                        self._end_process(instance_id)
                    results[instance_id] = sandbox
                elif "no_template" in answer:
                    self._ready.pop(answer["no_template"])
                    results[instance_id] = None
                else:
                    results[instance_id] = _start_failure(instance_id, mode, answer["failed"])
        except BaseException:
            with contextlib.suppress(FabricUnavailable):
                self._launcher.send("stop", ids=[item["id"] for item in items])
            raise
        finally:
            self._launcher.forget(seq)
        return results

    async def _plan(self, spec: SandboxSpec) -> Plan | AenvError:
        try:
            check_project(spec.config)
            isolation = self._isolation if isinstance(self._isolation, str) else self._isolation()
            interpreter = None
            if spec.config.requires_python:
                interpreter = await asyncio.to_thread(interpreters.choose, spec.config)
            python = await virtual_environment.ensure(
                spec.project_dir, self._environments, isolation, interpreter
            )
            storage = None
            if spec.storage is not None:
                directory = await asyncio.to_thread(self._storage.open, spec.storage)
                storage = (spec.storage, directory)
            self._link_package()
            key = (spec.project_dir, python, isolation, storage)
            plan = self._plans.get(key)
            if plan is None or plan.config != spec.config:
                plan = Plan(
                    spec.project_dir, spec.config, python, isolation, self._runtime_path, storage,
                    cgroup=self._cgroup,
                )  # fmt: skip
                self._plans.put(key, plan)
            return plan
        except AenvError as exc:
            return exc

    async def _choose_template(
        self, plan: Plan, spec: SandboxSpec
    ) -> tuple[str, str, dict[str, Any]]:
        """Return the template's key, the start mode in words, and the template's report."""
        if spec.storage is not None:
            # Code that was loaded in the template has not seen the data of earlier instances.
            key, setup = plan.setup(preload=False)
            return key, "bare: it has storage", with_storage(await self._template(key, setup))
        key, setup = plan.setup(preload=True)
        report = self._raised.get(key) or await self._template(key, setup)
        reason = report.get("bare_reason") or why_not_from_template(spec, setup["env"], report)
        if not reason and report.get("raised"):
            # It may need something that only an instance has: a writable directory, a device, time.
            self._raised.put(key, report)
            reason = "its code does not load in a template"
        if not reason:
            return key, "template", loaded(report)
        # Try this even if the code did not load: it may need this instance's variables.
        key, setup = plan.setup(preload=False)
        return key, f"bare: {reason}", loaded(await self._template(key, setup))

    async def _template(self, key: str, setup: dict[str, Any]) -> dict[str, Any]:
        """Return the template's report; it contains ``failed`` if there is no template."""
        known = self._ready.get(key)
        if known is not None:
            return known
        answer = await self._launcher.ask(
            "template", deadline_s=TEMPLATE_DEADLINE_S, key=key, setup=setup
        )
        if "ready" not in answer:
            return answer
        self._ready.put(key, answer["ready"])
        return dict(answer["ready"])

    def _link_package(self) -> None:
        link = self._runtime_path / "aenv_ray"
        if not link.is_symlink():
            self._runtime_path.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                link.symlink_to(_PACKAGE)

    # --- running --------------------------------------------------------------------------------

    async def _connect(
        self, instance_id: InstanceId, mode: str, report: dict[str, Any]
    ) -> Sandbox | AenvError:
        previous = self._connections.get(instance_id)
        exited = previous.exited if previous else asyncio.get_running_loop().create_future()
        sandbox = DoorSandbox(
            instance_id,
            isolation_of(report),
            mode,
            lambda: self._find_cause(instance_id, exited),
            2 * CAUSE_WAIT_S,
            lambda: self._dial(instance_id),
        )
        try:
            await sandbox.open()
        except OSError as exc:
            return not_connected(instance_id, exc)
        self._connections[instance_id] = _Connection(sandbox, exited)
        sandbox.on_end(lambda _: self._on_door_end(instance_id))
        return sandbox

    async def _find_cause(
        self, instance_id: InstanceId, exited: asyncio.Future[EndCause]
    ) -> EndCause:
        """Return why a connection broke: the launcher reports the end of a process in milliseconds.

        Connections on a node do not break by themselves: one that ended while its process runs
        was ended by that process.
        """
        await asyncio.wait([exited], timeout=CAUSE_WAIT_S)
        if not exited.done():
            with contextlib.suppress(FabricUnavailable):
                found = await self._launcher.ask("find", id=instance_id)
                if found["ended"] is not None:  # the kernel needs long to free its memory
                    return end_cause(found["ended"])
                if found["instance"] is not None:
                    words = "it closed its connection to its host, and its process runs on"
                    return EndCause(words, InsideCause.CONNECTION)
        return await asyncio.shield(exited)

    async def _dial(self, instance_id: InstanceId) -> socket.socket:
        """Return a connection to the door of a sandbox.

        Raises:
            OSError: It does not answer, or another process listens in its place.
        """
        sock = await connect_to_door(self._directory / "s" / short_name(instance_id))
        try:
            if not self._launcher.is_listener_of(sock):
                raise ConnectionRefusedError(errno.ECONNREFUSED, "another process listens there")
        except OSError:
            sock.close()
            raise
        return sock

    def _on_door_end(self, instance_id: InstanceId) -> None:
        """End a sandbox whose door failed while its process runs."""
        if instance_id in self._connections:
            self._end_process(instance_id)

    def _end_process(self, instance_id: InstanceId) -> None:
        with contextlib.suppress(FabricUnavailable):
            seq, _ = self._launcher.send("stop", ids=[instance_id])
            self._launcher.forget(seq)  # its exit is reported as an event

    async def attach(self, instance_id: InstanceId) -> Sandbox:  # noqa: D102
        await self._launcher.connect()
        found = await self._launcher.ask("find", id=instance_id)
        row, ended = found["instance"], found["ended"]
        if ended is not None:
            raise lost(instance_id, _with_log(end_cause(ended), ended["log"]))
        if row is None or row["host"] != self._launcher.host_id:
            raise lost(instance_id, "it ended while its host was away")
        sandbox = await self._connect(instance_id, row["mode"], row)
        if isinstance(sandbox, AenvError):
            raise sandbox
        return sandbox

    async def running(self) -> list[RunningSandbox]:  # noqa: D102
        await self._launcher.connect()
        answer = await self._launcher.ask("list")
        return [
            RunningSandbox(InstanceId(row["id"]), HostId(row["host"]), row["deadline"])
            for row in answer["instances"]
            if row["host"] == self._launcher.host_id
        ]

    async def set_deadline(  # noqa: D102
        self, instance_id: InstanceId, deadline: float
    ) -> None:
        await self._launcher.connect()
        connection = self._connections.get(instance_id)
        answer = await self._launcher.ask("deadline", id=instance_id, deadline=deadline)
        if not answer["known"]:
            cause = connection.sandbox.end_cause if connection else None
            raise lost(instance_id, cause or "it does not run")

    async def stop(self, instance_ids: Sequence[InstanceId]) -> None:  # noqa: D102
        if not instance_ids:
            return
        await self._launcher.connect()
        seq, answers = self._launcher.send("stop", ids=list(instance_ids))
        try:
            for _ in instance_ids:
                answer = await self._launcher.receive(
                    answers, "the end of an instance", ANSWER_DEADLINE_S
                )
                self._on_exit(answer["id"], EndCause("it was released"), "")
        finally:
            self._launcher.forget(seq)

    async def delete_storage(self, storage: StorageMount) -> None:  # noqa: D102
        await asyncio.to_thread(self._storage.delete, storage)

    def logs(  # noqa: D102
        self, instance_id: InstanceId, *, tail_lines: int | None = None, follow: bool = False
    ) -> AsyncGenerator[bytes, None]:
        connection = self._connections.get(instance_id)
        if connection is None:
            raise lost(instance_id, "it does not run")
        path = self._directory / "log" / short_name(instance_id)
        return logs.read(path, tail_lines, connection.exited if follow else None)

    def _on_exit(self, instance_id: str, cause: EndCause, log: str) -> None:
        connection = self._connections.pop(InstanceId(instance_id), None)
        if connection is None:
            return  # it was stopped, or never connected
        cause = _with_log(cause, log)
        if not connection.exited.done():
            connection.exited.set_result(cause)
        connection.sandbox.end(cause)

    def _on_launcher_lost(self) -> None:
        self._ready.clear()
        for instance_id in list(self._connections):
            cause = EndCause("the node's launcher died, and its sandboxes with it")
            self._on_exit(instance_id, cause, "")

    async def close(self) -> None:  # noqa: D102
        for connection in list(self._connections.values()):
            await connection.sandbox.close()
        self._connections.clear()
        await self._launcher.close()


def _with_log(cause: EndCause, log: str) -> EndCause:
    return cause if cause.text in (TTL_PASSED, HOST_GONE) else cause.with_log(log)


def _template_gone(spec: SandboxSpec) -> AenvError:
    return SandboxStartFailed(
        f"{spec.instance_id} did not start: its template ended twice during the start",
        instance_id=spec.instance_id,
        hint="the node may be out of memory; see launcher.log in AENV_RUNTIME_DIR",
    )


def _start_failure(instance_id: InstanceId, mode: str, reason: str) -> AenvError:
    hint = "correct the project; `aenv run` shows the same error" if mode != "template" else None
    return SandboxStartFailed(
        f"{instance_id} did not start: {reason}", instance_id=instance_id, hint=hint
    )


def raylet_pid() -> int:
    """Return the pid of the process that started this Ray worker: the raylet."""
    return os.getppid()
