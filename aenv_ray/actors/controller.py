"""The controller: one detached actor that makes hosts, finds instances and ends what is ownerless.

It keeps nothing that cannot be found again: hosts are named actors, and hosts know their instances.
So it may die at any time; Ray restarts it, and meanwhile calls go on, for they do not pass here.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from typing import Any, Final

from aenv_ray.actors import ray_api
from aenv_ray.actors.host_actor import host_actor
from aenv_ray.actors.placement import HostLoad
from aenv_ray.errors import AenvError, DeadlineExceeded, InstanceNotFound
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import ActorDensity, InstanceInfo, InstanceSpec

logger = logging.getLogger(__name__)

CONTROLLER_NAME: Final = "aenv-controller"
SHARED_PREFIX: Final = "aenv-host-"
JOB_CHECK_S: Final = 1.0
"""A job's instances end about this long after the job."""
JOB_RETELL_S: Final = 120.0
"""How long hosts are told again of a job that ended: longer than a start takes."""
HOST_START_DEADLINE_S: Final = 120.0
"""A cold Ray worker takes seconds on a busy machine; Ray itself gives it a minute."""
CONTROL_DEADLINE_S: Final = 60.0
CORES_PER_HOST: Final = 8
"""One shared host serves about two thousand calls a second, more than eight cores make."""


class Controller:
    """Makes hosts, finds instances, ends what is ownerless."""

    def __init__(self) -> None:
        self._hosts: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        self._nodes: dict[str, str] = {}
        self._seen_dead: set[str] = set()
        self._dead_since: dict[str, float] = {}
        self._making = asyncio.Lock()
        self._background: set[asyncio.Task[Any]] = set()
        self._watcher: asyncio.Task[None] | None = None

    # --- hosts ------------------------------------------------------------------------------

    async def shared_hosts(self) -> list[tuple[HostLoad, Any]]:
        """Return the shared hosts of all live nodes with their load, making missing ones."""
        self._watch()
        async with self._making:
            nodes = await asyncio.to_thread(ray_api.alive_nodes)
            names = {
                f"{SHARED_PREFIX}{node[:12]}-{index}": node
                for node, cores in nodes.items()
                for index in range(max(1, cores // CORES_PER_HOST))
            }
            for name, node in names.items():
                if name not in self._hosts:
                    self._hosts[name] = await self._make(name, node, ActorDensity.SHARED)
                    self._nodes[name] = node
        loads: list[tuple[HostLoad, Any]] = []
        async with asyncio.TaskGroup() as group:
            asked = [(n, group.create_task(self._load(n))) for n in names]
        for name, task in asked:
            load = task.result()
            if load is not None and name in self._hosts:
                loads.append((load, self._hosts[name]))
        return loads

    async def _load(self, name: str) -> HostLoad | None:
        host = self._hosts.get(name)
        if host is None:
            return None
        try:
            with ray_api.translated(f"asking host {name}"):
                async with asyncio.timeout(HOST_START_DEADLINE_S):
                    count, capacity = await host.control.remote("load")
        except (AenvError, TimeoutError) as exc:
            logger.warning("host %s does not answer: %s", name, exc)
            self._hosts.pop(name, None)
            return None
        return HostLoad(name, self._nodes.get(name, ""), count, capacity)

    async def _make(self, name: str, node: str | None, density: ActorDensity) -> Any:
        options: dict[str, Any] = {
            "name": name,
            "namespace": ray_api.NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,  # Ray may run this again after a death of the controller
        }
        if node is not None:
            options["scheduling_strategy"] = ray_api.pinned(node)
        actor = host_actor().options(**options).remote(HostId(name), density.value)
        try:
            async with asyncio.timeout(HOST_START_DEADLINE_S):
                with ray_api.translated(f"starting host {name}"):
                    await actor.ready.remote()
        except TimeoutError:
            ray_api.kill(actor)
            raise DeadlineExceeded(
                f"host {name} did not start within {HOST_START_DEADLINE_S:g} s",
                hint="the cluster may be out of memory, or starting workers slowly",
            ) from None
        return actor

    async def dedicated_host(self, instance_id: InstanceId, node: str | None) -> Any:
        """Return a new host actor for one instance, named after it."""
        self._watch()
        # Pinned, so that a restart finds the sandbox that it left on that node.
        nodes = await asyncio.to_thread(ray_api.alive_nodes)
        target = node or list(nodes)[len(self._where) % len(nodes)]
        self._hosts[instance_id] = await self._make(instance_id, target, ActorDensity.DEDICATED)
        self._where[instance_id] = instance_id
        return self._hosts[instance_id]

    async def create_dedicated(
        self, specs: Sequence[InstanceSpec], archive: bytes | None
    ) -> list[tuple[Any, InstanceInfo | AenvError]]:
        """Make a host and an instance for each spec."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._create_one(spec, archive)) for spec in specs]
        return [task.result() for task in tasks]

    async def _create_one(
        self, spec: InstanceSpec, archive: bytes | None
    ) -> tuple[Any, InstanceInfo | AenvError]:
        host = None
        try:
            host = await self.dedicated_host(spec.instance_id, None)
            with ray_api.translated(f"creating {spec.instance_id}"):
                if archive is not None and not await host.control.remote(
                    "has_project", spec.digest
                ):
                    await host.control.remote("put_project", spec.digest, archive)
                (outcome,) = await host.control.remote("start", [spec])
        except AenvError as exc:
            outcome = exc
        if isinstance(outcome, AenvError) and host is not None:
            self._forget(spec.instance_id)
            ray_api.kill(host)
        return host, outcome

    # --- instances --------------------------------------------------------------------------

    async def locate(self, instance_id: InstanceId) -> tuple[Any, InstanceInfo]:
        """Return the host of an instance and what is known of it.

        Raises:
            InstanceNotFound: No host has it.
        """
        self._watch()
        for name in await self._candidates(instance_id):
            host = self._hosts.get(name)
            try:
                with ray_api.translated(f"asking {name}"):
                    async with asyncio.timeout(CONTROL_DEADLINE_S):
                        info = await host.control.remote("info", instance_id) if host else None
            except (AenvError, TimeoutError):
                continue
            if info is None:
                continue
            self._where[instance_id] = name
            return host, info
        raise InstanceNotFound(
            f"there is no instance {instance_id}",
            instance_id=instance_id,
            hint="aenv_ray.list_instances() shows those that live",
        )

    async def _candidates(self, instance_id: str) -> list[str]:
        """Return host names to ask: the known one first, then all shared ones."""
        names = await asyncio.to_thread(ray_api.actor_names)
        hosts = [n for n in names if n == instance_id or n.startswith(SHARED_PREFIX)]
        for name in hosts:
            if name not in self._hosts:
                actor = await asyncio.to_thread(ray_api.find_actor, name)
                if actor is not None:
                    self._hosts[name] = actor
        known = self._where.get(instance_id)
        present = [n for n in hosts if n in self._hosts]
        return sorted(present, key=lambda n: (n != instance_id, n != known))

    async def release(self, instance_ids: Sequence[InstanceId]) -> None:
        """End instances wherever they are; from every state, any number of times."""
        groups: dict[str, list[InstanceId]] = {}
        for instance_id in instance_ids:
            if (name := self._where.get(instance_id)) in self._hosts:
                groups.setdefault(str(name), []).append(instance_id)
                continue
            for name in await self._responsible(instance_id):
                groups.setdefault(name, []).append(instance_id)
        async with asyncio.TaskGroup() as tasks:
            for name, ids in groups.items():
                tasks.create_task(self._release_on(name, ids))
        for instance_id in instance_ids:
            self._where.pop(instance_id, None)

    async def _release_on(self, name: str, ids: list[InstanceId]) -> None:
        host = self._hosts.get(name)  # None: somebody else found it gone meanwhile
        if host is not None:
            try:
                with ray_api.translated(f"releasing on {name}"):
                    async with asyncio.timeout(CONTROL_DEADLINE_S):
                        await host.control.remote("release", ids)
                return
            except (AenvError, TimeoutError):
                self._forget(name)
        # The host is gone for good: another of its node, or the launcher, ends what it left.
        if name in ids:
            for other in await self._responsible(name):
                if other != name:
                    await self._release_on(other, [InstanceId(name)])

    async def _responsible(self, instance_id: str) -> list[str]:
        """Return the instance's own host, or every host that may end it when that is gone."""
        candidates = await self._candidates(instance_id)
        return [name for name in candidates if name == instance_id] or candidates

    def _forget(self, name: str) -> None:
        self._hosts.pop(name, None)
        self._where.pop(name, None)

    async def list_instances(self) -> list[InstanceInfo]:
        """Return the live instances of all hosts."""
        self._watch()
        for name in await asyncio.to_thread(ray_api.actor_names):
            if name != CONTROLLER_NAME and name not in self._hosts:
                actor = await asyncio.to_thread(ray_api.find_actor, name)
                if actor is not None:
                    self._hosts[name] = actor
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._list_on(n)) for n in list(self._hosts)]
        found = [info for task in tasks for info in task.result()]
        self._where |= {info.id: info.host for info in found}
        return sorted(found, key=lambda info: info.created_at)

    async def _list_on(self, name: str) -> list[InstanceInfo]:
        host = self._hosts.get(name)
        if host is None:
            return []
        try:
            with ray_api.translated(f"listing {name}"):
                async with asyncio.timeout(CONTROL_DEADLINE_S):
                    found: list[InstanceInfo] = await host.control.remote("instances")
                    return found
        except (AenvError, TimeoutError):
            self._forget(name)
            return []

    async def count_processes(self) -> int:
        """Return how many sandbox processes all nodes run, as their operating systems say."""
        by_node = {load.node_id: host for load, host in await self.shared_hosts()}
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_awaited(host.control.remote("count_processes")))
                for host in by_node.values()
            ]
        return sum(task.result() for task in tasks)

    async def ping(self) -> str:
        """Answer, so that a caller knows that the fabric is up."""
        self._watch()
        return CONTROLLER_NAME

    # --- owners -----------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch_jobs())

    async def _watch_jobs(self) -> None:
        """End the instances of Ray jobs that ended, for ever."""
        while True:
            try:
                dead = await asyncio.to_thread(ray_api.dead_jobs) - self._seen_dead
                if dead:
                    await self._end_jobs(dead)
                now = asyncio.get_running_loop().time()
                for job in dead:
                    # Told again for a while: a start under way when its job died ends later.
                    if now - self._dead_since.setdefault(job, now) > JOB_RETELL_S:
                        self._seen_dead.add(job)
            except Exception as exc:  # noqa: BLE001  # the loop that ends the ownerless goes on
                logger.warning("looking for ended jobs: %r", exc)
            await asyncio.sleep(JOB_CHECK_S)

    async def _end_jobs(self, dead: set[str]) -> None:
        await self.list_instances()
        for name, host in list(self._hosts.items()):
            try:
                with ray_api.translated(f"ending jobs on {name}"):
                    async with asyncio.timeout(CONTROL_DEADLINE_S):
                        await host.control.remote("release_jobs", sorted(dead))
            except (AenvError, TimeoutError) as exc:
                logger.warning("host %s: %s", name, exc)
                self._forget(name)


async def _awaited(reference: Any) -> Any:
    return await reference


@functools.cache
def controller_actor() -> Any:
    """Return the actor class; made once, since every `ray.remote` exports the class anew."""
    return ray_api.restartable_actor(Controller, max_concurrency=10_000)


def ensure_controller() -> Any:
    """Return the controller of this cluster, making it when there is none."""
    return (
        controller_actor()
        .options(
            name=CONTROLLER_NAME,
            namespace=ray_api.NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
        )
        .remote()
    )
