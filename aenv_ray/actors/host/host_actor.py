"""The Ray actor around a `Host`: builds it in its own process and passes calls on.

The shell decides nothing; what it needs of Ray, this node and the settings it hands to `Host`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

from aenv_ray.actors.calls.call_batching import Answer, Begin, CarriedCalls
from aenv_ray.actors.calls.followed_calls import FollowedCalls, Reports
from aenv_ray.actors.calls.wire import CallMessage, WireResult, decode_specs, encode_outcomes
from aenv_ray.actors.host.engines import EngineFactory
from aenv_ray.actors.host.host import Host
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.actors.ray_shell.ray_results import write_directly
from aenv_ray.config import settings
from aenv_ray.engines.base import Engine
from aenv_ray.engines.census import live_containers, live_pods, live_processes
from aenv_ray.engines.node.directory import node_directory, set_owner
from aenv_ray.engines.process.engine import raylet_pid
from aenv_ray.errors import ConfigError
from aenv_ray.hub.store import FileInstanceStore
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import ActorDensity


def make_engine_factory(host_id: HostId) -> EngineFactory:
    """Return what makes this node's engines, by the settings of this process."""
    owner_pid = raylet_pid()  # asked later, it would be the adopter of orphans if the raylet died

    def make(name: str) -> Engine:
        if name == "process":
            from aenv_ray.engines.process.engine import ProcessEngine

            return ProcessEngine(
                host_id,
                runtime_dir=settings().runtime_dir,
                data_dir=settings().data_dir,
                scope=ray_api.session_scope(),
                owner_pid=owner_pid,
                isolation=settings().isolation,
                storage_dir=settings().storage_dir,
            )
        if name == "docker":
            from aenv_ray.engines.docker.engine import DockerEngine

            return DockerEngine(
                host_id,
                runtime_dir=settings().runtime_dir,
                data_dir=settings().data_dir,
                scope=ray_api.session_scope(),
                owner_pid=owner_pid,
                address=settings().docker_host,
                image=settings().docker_image,
                runtime=settings().docker_runtime,
                docker_config=settings().docker_config,
                storage_dir=settings().storage_dir,
            )
        if name == "kubernetes":
            from aenv_ray.engines.kubernetes.engine import KubernetesEngine
            from aenv_ray.engines.kubernetes.namespace import place_of

            return KubernetesEngine(
                host_id,
                runtime_dir=settings().runtime_dir,
                data_dir=settings().data_dir,
                scope=ray_api.session_scope(),
                place=place_of(settings()),
            )
        if name == "fake":
            from aenv_ray.engines.fake.engine import FakeEngine

            return FakeEngine(host_id)
        raise ConfigError(
            f"there is no engine {name!r} here",
            hint="engines: process, docker, kubernetes, fake (for tests)",
        )

    return make


class HostShell:
    """The Ray actor: builds a `Host` in its own process and passes every call on."""

    def __init__(self, host_id: HostId, density: str, slots: int | None) -> None:
        self._args = (host_id, ActorDensity(density), slots)
        self._host: Host | None = None
        self._opening = asyncio.Lock()
        self._followed = FollowedCalls()
        self._carried = CarriedCalls()
        write_directly(ray_api.serialization_context(), WireResult)
        # Ray runs this on the actor's loop, after a restart too: what an earlier host left is taken
        # over at once, though nobody may call for long. Should it fail, the next call tries again.
        self._opener = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> Host:
        async with self._opening:
            if self._host is None:
                self._host = await _make_host(*self._args)
            return self._host

    async def ready(self) -> str:
        """Return the host's id once it answers for its earlier instances."""
        return await (self._host or await self._open()).ready()

    async def start(self, specs: bytes) -> bytes:
        """See `Host.start`, in the bytes of `wire`."""
        host = self._host or await self._open()
        return encode_outcomes(await host.start(decode_specs(specs)))

    async def call(self, message: bytes) -> WireResult:
        """See `HostCalls.call`."""
        host = self._host or await self._open()
        return await host.calls.call(CallMessage.decode(message))

    async def exchange(self, begin: list[Begin], follow: list[str]) -> list[Answer]:
        """See `CarriedCalls.exchange`."""
        host = self._host or await self._open()
        return await self._carried.exchange(
            begin, follow, lambda message: host.calls.call(CallMessage.decode(message))
        )

    async def drop(self, keys: list[str]) -> None:
        """See `CarriedCalls.drop`."""
        self._carried.drop(keys)

    async def follow_json(self, message: bytes, token: str, name: str) -> bytes | Reports:
        """See `FollowedCalls.next`."""
        host = self._host or await self._open()
        return await self._followed.next(
            token, name, lambda report: host.calls.call(CallMessage.decode(message), report)
        )

    async def cancel_named(self, name: str) -> bool:
        """See `FollowedCalls.cancel` and `CarriedCalls.cancel`."""
        return self._followed.cancel(name) | self._carried.cancel(name)

    async def stream(self, message: bytes) -> AsyncIterator[Any]:
        """See `HostCalls.stream`."""
        host = self._host or await self._open()
        async with contextlib.aclosing(host.calls.stream(CallMessage.decode(message))) as reports:  # type: ignore[type-var]
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

    async def control(self, operation: str, *args: Any) -> Any:
        """Run any other operation of `Host` by name."""
        host = self._host or await self._open()
        method = _CONTROL[operation]
        result = method(host, *args)
        return await result if asyncio.iscoroutine(result) else result


_CONTROL: Final[Mapping[str, Callable[..., Any]]] = {
    "count_processes": Host.count_processes,
    "delete_storage": Host.delete_storage,
    "has_project": Host.has_project,
    "hold": Host.hold,
    "info": Host.info,
    "instances": Host.instances,
    "load": Host.load,
    "pools": Host.pools,
    "put_project": Host.put_project,
    "release": Host.release,
    "release_jobs": Host.release_jobs,
    "renew": Host.renew,
    "reserve": Host.reserve,
    "warm": Host.warm,
}


async def _make_host(host_id: HostId, density: ActorDensity, slots: int | None) -> Host:
    runtime_dir, scope = settings().runtime_dir, ray_api.session_scope()
    directory = node_directory(runtime_dir, scope)
    raylet = raylet_pid()
    set_owner(directory, raylet)  # records outlive launchers, but not the node

    def count_sandboxes() -> int:
        containers = live_containers(runtime_dir, scope, settings().docker_host)
        pods = live_pods(scope, settings())
        return len(live_processes(directory)) + len(containers) + len(pods)

    host = Host(
        host_id,
        node_id=ray_api.node_id(),
        density=density,
        slots=slots,
        make_engine=make_engine_factory(host_id),
        store=FileInstanceStore(directory / "records"),
        projects_dir=settings().data_dir / "projects",
        count_processes=count_sandboxes,
        on_empty=ray_api.end_current_actor,
        is_node_up=lambda: raylet_pid() == raylet,
        requests_path=directory / "pools" / f"{host_id}.json",
    )
    await host.open()
    return host


@functools.cache
def host_actor() -> Any:
    """Return the actor class; made once, since every `ray.remote` exports the class anew."""
    return ray_api.restartable_actor(HostShell, max_concurrency=100_000)
