"""How many sandboxes all nodes run, as each node itself says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aenv_ray.actors import ray_api
from aenv_ray.actors.host_directory import HostDirectory
from aenv_ray.actors.placement import shared_host_names
from aenv_ray.errors import AenvError

Ask = Callable[[str, str], Awaitable[Any]]
"""Returns what the host of a name answers to an operation; raises AenvError."""


async def count_processes(hosts: HostDirectory, ask: Ask) -> int:
    """Return how many sandbox processes and containers all nodes run.

    A node that comes and goes with demand has nothing while it has no host.

    Raises:
        FabricUnavailable: A node that is up, or the Docker daemon on it, does not say.
    """
    nodes = await asyncio.to_thread(ray_api.alive_nodes)
    names = set(await asyncio.to_thread(ray_api.actor_names))
    async with asyncio.TaskGroup() as group:
        tasks = []
        for node, facts in nodes.items():
            for name, capacity in list(shared_host_names(node, facts).items())[:1]:
                if name in names or not facts.is_elastic:
                    slots = capacity if facts.is_elastic else None
                    tasks.append(group.create_task(_count_on(hosts, ask, node, name, slots)))
    total = 0
    for task in tasks:
        count = task.result()
        if isinstance(count, AenvError):
            raise count
        total += count
    return total


async def _count_on(
    hosts: HostDirectory, ask: Ask, node: str, name: str, slots: int | None
) -> int | AenvError:
    for is_last in (False, True):
        try:
            await hosts.shared(name, node, slots)
            return int(await ask(name, "count_processes"))
        except AenvError as exc:
            if node not in await asyncio.to_thread(ray_api.alive_nodes):
                return 0  # it died meanwhile, and what it ran with it
            if is_last:
                return exc
            hosts.forget(name)  # it may have ended for good: the node gets another
    raise AssertionError
