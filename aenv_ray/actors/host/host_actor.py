"""The Ray actor around a `Host`: builds it in its own process and forwards calls to it.

It contains no decisions. It gives `Host` everything that comes from Ray, the node and the settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Concatenate, ParamSpec

from aenv_ray import logs, units
from aenv_ray.actors.calls.call_batching import BatchAnswer, BatchServer, Begin
from aenv_ray.actors.calls.caller_notes import Report
from aenv_ray.actors.calls.introduction import Introduction
from aenv_ray.actors.calls.wire import CallMessage, WireResult
from aenv_ray.actors.host.engines import EngineFactory
from aenv_ray.actors.host.environment_relay import ConnectInner
from aenv_ray.actors.host.host import Host
from aenv_ray.actors.host.model_relay import ModelRelay
from aenv_ray.actors.host.node_engines import node_engines
from aenv_ray.actors.host.start_messages import (
    ProjectMissing,
    decode_specs,
    encode_answer,
)
from aenv_ray.actors.ray_shell import operator_policy, ray_api
from aenv_ray.actors.ray_shell.ray_results import write_directly
from aenv_ray.config import settings
from aenv_ray.daemon import protect_from_oom_killer
from aenv_ray.engines.base import Engine, OnProgress
from aenv_ray.engines.live_sandboxes import live_containers, live_pods, live_processes
from aenv_ray.engines.node.directory import node_directory, set_owner, short_name
from aenv_ray.engines.process.engine import raylet_pid
from aenv_ray.errors import AenvError, ConfigError
from aenv_ray.files import make_private
from aenv_ray.hub.store import FileInstanceStore
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import ActorDensity, InstanceInfo, LogMessage, Question
from aenv_ray.runtime.door.roles import DoorRole

P = ParamSpec("P")


def _isolation() -> str:
    return settings().isolation or operator_policy.current().isolation


def make_engine_factory(host_id: HostId) -> EngineFactory:
    """Return a function that creates this node's engines from the settings of this process."""
    owner_pid = raylet_pid()  # read it now: if the raylet dies, this process gets another parent

    def make(name: str) -> Engine:
        given = settings()
        node: dict[str, Any] = {
            "runtime_dir": given.runtime_dir,
            "data_dir": given.data_dir,
            "scope": ray_api.session_scope(),
        }
        if name == "process":
            from aenv_ray.engines.process.engine import ProcessEngine

            return ProcessEngine(
                host_id, **node, owner_pid=owner_pid, isolation=_isolation,
                storage_dir=given.storage_dir, requirements_cache=given.requirements_cache,
                cgroup=given.cgroup,
            )  # fmt: skip
        if name == "docker":
            from aenv_ray.engines.docker.engine import DockerEngine

            return DockerEngine(
                host_id, **node, owner_pid=owner_pid, address=given.docker_host,
                image=given.docker_image, runtime=given.docker_runtime,
                docker_config=given.docker_config, storage_dir=given.storage_dir,
                policy=operator_policy.current,
                disk_bytes=units.parse_memory_bytes(given.docker_disk, what="AENV_DOCKER_DISK"),
            )  # fmt: skip
        if name == "kubernetes":
            from aenv_ray.engines.kubernetes.engine import KubernetesEngine
            from aenv_ray.engines.kubernetes.settings import PodSettings

            return KubernetesEngine(
                host_id, **node, settings=PodSettings.of(given), policy=operator_policy.current
            )
        if name == "fake":
            from aenv_ray.engines.fake.engine import FakeEngine

            return FakeEngine(host_id)
        raise ConfigError(
            f"there is no engine {name!r} here",
            hint="engines: process, docker, kubernetes, fake (for tests)",
        )

    return make


def _forwarded(
    method: Callable[Concatenate[Host, P], Any],
) -> Callable[Concatenate[HostShell, P], Coroutine[Any, Any, Any]]:
    """Return an actor method that runs a method of the host."""

    @functools.wraps(method)
    async def forward(self: HostShell, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        result = method(self._host or await self._open(), *args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    return forward


class HostShell:
    """The Ray actor: builds a `Host` in its own process and forwards each method to it.

    A handle uses `call`: one message, one result. Callers with many calls in flight use
    `exchange`, which also carries progress and cancellation. `stream` and `logs` are Ray
    generators: only these return values one by one to an `ObjectRefGenerator`, and pause for a slow
    reader. All other methods are control operations of `Host`.
    """

    def __init__(
        self,
        host_id: HostId,
        density: str,
        slots: int | None,
        spare_s: float | None = None,
        inner_instances: ConnectInner | None = None,
    ) -> None:
        protect_from_oom_killer()
        logs.configure("host")
        self._args = (host_id, ActorDensity(density), slots, spare_s, inner_instances)
        self._host: Host | None = None
        self._opening = asyncio.Lock()
        self._batches = BatchServer(self.call)
        write_directly(ray_api.serialization_context(), WireResult)
        # Open now and not at the first call: a restarted host adopts its sandboxes, whether it is
        # called or not. If this fails, the next call tries again.
        self._opener = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> Host:
        async with self._opening:
            if self._host is None:
                self._host = await _make_host(*self._args)
                # Exclude Ray and all modules from garbage collection: a full collection would
                # traverse them while instances start.
                gc.freeze()
            return self._host

    # --- calls ------------------------------------------------------------------------------

    async def call(self, message: bytes, on_progress: OnProgress | None = None) -> WireResult:
        """See `HostCalls.call`."""
        host = self._host or await self._open()
        return await host.calls.call(CallMessage.decode(message), on_progress)

    async def call_all(
        self, messages: list[bytes]
    ) -> list[WireResult | AenvError] | WireResult | AenvError:
        """Run calls at the same time, and return the outcome of each: its result or its error.

        Ray stores each item of the list as a separate object. For a single call it expects the
        outcome itself, not a list.
        """
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._outcome(message)) for message in messages]
        outcomes = [task.result() for task in tasks]
        return outcomes if len(outcomes) > 1 else outcomes[0]

    async def _outcome(self, message: bytes) -> WireResult | AenvError:
        try:
            return await self.call(message)
        except AenvError as exc:
            return exc

    async def exchange(
        self, begin: list[Begin], follow: list[str], cancel: list[str]
    ) -> list[BatchAnswer]:
        """See `BatchServer.exchange`; directly connected callers cancel calls by name, too."""
        if cancel and self._host is not None:
            self._host.cancel_direct(cancel)
        return await self._batches.exchange(begin, follow, cancel)

    async def stream(
        self, message: bytes
    ) -> AsyncIterator[Report | LogMessage | Question | WireResult]:
        """See `HostCalls.stream`."""
        host = self._host or await self._open()
        async with contextlib.aclosing(host.calls.stream(CallMessage.decode(message))) as reports:
            async for report in reports:
                yield report

    async def logs(
        self, instance_id: InstanceId, tail_lines: int | None, follow: bool
    ) -> AsyncIterator[str]:
        """See `HostCalls.logs`."""
        host = self._host or await self._open()
        async with contextlib.aclosing(
            await host.calls.logs(instance_id, tail_lines, follow)
        ) as pieces:
            async for piece in pieces:
                yield piece

    async def introduce(
        self, instance_id: InstanceId, scope: str, role: str
    ) -> Introduction | None:
        """See `Host.introduce`; None for a caller on another node, which has another scope."""
        if scope != ray_api.session_scope():
            return None
        return await (self._host or await self._open()).introduce(instance_id, DoorRole(role))

    # --- control --------------------------------------------------------------------------------

    async def start(self, specs: bytes, scope: str = "") -> bytes:
        """See `Host.start`; a caller with this host's `scope` is introduced to the instances.

        Specs and answer are encoded as in `start_messages`.
        """
        host = self._host or await self._open()
        outcomes = await host.start(decode_specs(specs))
        if isinstance(outcomes, ProjectMissing):
            return encode_answer(outcomes)
        is_here = scope == ray_api.session_scope()
        return encode_answer(
            [(one, await host.introduce_started(one) if is_here else None) for one in outcomes]
        )

    async def instances(self, is_counted: bool = False) -> list[InstanceInfo] | int:
        """Return `Host.instances`, or `Host.count_instances`.

        This is one method because hosts of an earlier version of aenv-ray are asked, too: an actor
        rejects an argument that it does not know, but its process ends if it lacks the method.
        """
        host = self._host or await self._open()
        return await (host.count_instances() if is_counted else host.instances())

    ready = _forwarded(Host.ready)
    claim = _forwarded(Host.claim)
    prepare = _forwarded(Host.prepare)
    retire = _forwarded(Host.retire)
    info = _forwarded(Host.info)
    renew = _forwarded(Host.renew)
    release = _forwarded(Host.release)
    release_jobs = _forwarded(Host.release_jobs)
    engines = _forwarded(Host.engines)
    load = _forwarded(Host.load)
    measures = _forwarded(Host.measures)
    hold = _forwarded(Host.hold)
    reserve = _forwarded(Host.reserve)
    drain = _forwarded(Host.drain)
    warm = _forwarded(Host.warm)
    pools = _forwarded(Host.pools)
    has_project = _forwarded(Host.has_project)
    put_project = _forwarded(Host.put_project)
    delete_storage = _forwarded(Host.delete_storage)
    count_processes = _forwarded(Host.count_processes)


async def _make_host(
    host_id: HostId,
    density: ActorDensity,
    slots: int | None,
    spare_s: float | None,
    inner_instances: ConnectInner | None,
) -> Host:
    runtime_dir, scope = settings().runtime_dir, ray_api.session_scope()
    directory = node_directory(runtime_dir, scope)
    raylet = raylet_pid()
    set_owner(directory, raylet)  # records outlive launchers, but not the node
    make_private(settings().data_dir)

    def count_sandboxes() -> int:
        containers = live_containers(runtime_dir, scope, settings().docker_host)
        pods = live_pods(scope, settings())
        return len(live_processes(directory)) + len(containers) + len(pods)

    host = Host(
        host_id,
        node_id=ray_api.node_id(),
        density=density,
        slots=slots,
        spare_s=spare_s,
        make_engine=make_engine_factory(host_id),
        find_engines=node_engines,
        policy=operator_policy.current,
        store=FileInstanceStore(directory / "records"),
        projects_dir=settings().data_dir / "projects",
        count_processes=count_sandboxes,
        on_empty=ray_api.end_current_actor,
        is_node_up=lambda: raylet_pid() == raylet,
        requests_path=directory / "pools" / f"{host_id}.json",
        introductions_path=directory / "h" / short_name(host_id) if settings().local_door else None,
        model_relay=ModelRelay(settings()),
        inner_instances=inner_instances,
    )
    await host.open()
    return host


@functools.cache
def host_actor() -> Any:
    """Return the actor class; cached, because each `ray.remote` exports the class again."""
    return ray_api.restartable_actor(HostShell, max_concurrency=100_000)
