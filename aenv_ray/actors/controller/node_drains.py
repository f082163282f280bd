"""Draining nodes: their hosts take no new instances, and services move away from those that leave.

`draining` decides in which state a node is. Ray stores which nodes are draining, so a controller
that replaces another one, or a restarted host, knows it again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final

from aenv_ray.actors.controller.draining import NodeState, node_named, node_states
from aenv_ray.actors.controller.host_directory import HostDirectory
from aenv_ray.actors.controller.placement import is_on_node, usable
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.errors import ConfigError, FabricUnavailable

DRAIN_S: Final = 600.0
"""How long a host on a draining node refuses instances after it was last told to. This is longer
than the controller is away if the head is lost."""
DRAIN_DEADLINE_S: Final = 30.0
"""How long Ray may take to drain a node."""
RUNNER_CLASS: Final = "RunnerShell"
"""Class of the actors in `aenv_ray.sampling` that play episodes on the nodes."""

CountInstances = Callable[[Collection[str]], Awaitable[tuple[Counter[str], Counter[str]]]]
"""Returns, for nodes, the number of instances that run or start on each, and of silent hosts."""


class NodeDrains:
    """Which nodes are draining, and what follows from it.

    Args:
        hosts: The hosts of the cluster.
        ask: Runs an operation of a host: ``(host, operation, *arguments)``.
        count_instances: Counts the instances of nodes.
        on_change: Called when other nodes are draining than before.

    Attributes:
        draining: Nodes that take no new instances, and whether they are leaving, as last read from
            Ray.
    """

    def __init__(
        self,
        hosts: HostDirectory,
        ask: Callable[..., Awaitable[Any]],
        count_instances: CountInstances,
        on_change: Callable[[], None],
    ) -> None:
        self.draining: dict[str, bool] = {}
        self._hosts = hosts
        self._ask = ask
        self._count_instances = count_instances
        self._on_change = on_change
        self._lock = asyncio.Lock()

    async def drain(self, name: str, *, is_leaving: bool) -> NodeState:
        """Stop new instances on a node; its present instances continue. Idempotent.

        When this returns, no host of the node accepts new instances; creates that are already in
        progress there still finish. The node's warm sandboxes and spare hosts end.

        Args:
            name: Id of the node, the beginning of it, or the name of its machine.
            is_leaving: The node is to be stopped: replicas of services move to other nodes. This
                cannot be undone.

        Raises:
            ConfigError: No node has this name, or several have it; or the head is to leave.
            FabricUnavailable: Ray does not answer, or a host of the node does not; the node is
                drained nevertheless.
        """
        node = await self._node_named(name)
        async with self._lock:
            await self._store(node, is_leaving=is_leaving)
            await self._tell_hosts({node}, DRAIN_S)
            await self._move_replicas()
        return await self._state_of(node)

    async def undrain(self, name: str) -> NodeState:
        """Let a node take instances again; idempotent.

        Raises:
            ConfigError: As `drain`; or replicas of services have moved from the node.
            FabricUnavailable: As `drain`; a host that does not answer takes instances again after
                `DRAIN_S`.
        """
        node = await self._node_named(name)
        async with self._lock:
            if node in await asyncio.to_thread(ray_api.drained_by_ray):
                raise ConfigError(
                    f"node {node[:12]} takes no instances again: its services have moved",
                    hint="stop the node, and start it again",
                )
            await self._store(node, is_leaving=None)
            await self._tell_hosts({node}, 0.0)
        return await self._state_of(node)

    async def nodes(self) -> list[NodeState]:
        """Return the state of each live node."""
        nodes = await asyncio.to_thread(ray_api.alive_nodes)
        runners = await asyncio.to_thread(ray_api.actors_by_node, _is_runner)
        replicas = await asyncio.to_thread(ray_api.replicas_by_node)
        instances, silent = await self._count_instances(nodes)
        return node_states(nodes, usable(nodes), instances, runners, replicas, silent)

    async def keep(self) -> None:
        """Tell the hosts of draining nodes again, because some may have been restarted."""
        async with self._lock:
            self.draining = await asyncio.to_thread(ray_api.draining_nodes)
            if self.draining:
                await self._tell_hosts(self.draining, DRAIN_S)
                await self._move_replicas()

    async def _store(self, node: str, *, is_leaving: bool | None) -> None:
        """Store which nodes are draining, without nodes that are gone.

        Args:
            node: A node that changes.
            is_leaving: Whether it leaves; a node that is leaving already still does. None: it is
                not draining.
        """
        alive = await asyncio.to_thread(ray_api.alive_nodes)
        if is_leaving and node in alive and alive[node].is_head:
            raise ConfigError(
                "services cannot be moved from the head: the cluster does not work without it",
                hint="drain it without --move-services",
            )
        draining = {n: facts.is_leaving for n, facts in alive.items() if facts.is_draining}
        was_leaving = draining.pop(node, False)
        if is_leaving is not None:
            draining[node] = is_leaving or was_leaving
        await asyncio.to_thread(ray_api.set_draining_nodes, draining)
        self.draining = draining
        self._on_change()

    async def _tell_hosts(self, nodes: Collection[str], seconds: float) -> None:
        """Have the live shared hosts of nodes refuse instances for so long."""
        names = await asyncio.to_thread(ray_api.actor_names)
        mine = [name for name in names if any(is_on_node(name, node) for node in nodes)]
        for host in await self._hosts.find(mine):
            await self._ask(host, "drain", seconds)

    async def _move_replicas(self) -> None:
        """Have Serve move the replicas of services from the nodes that are leaving.

        A node without replicas is left alone, because Ray restarts no actor on a node that it
        drains.
        """
        leaving = [node for node, is_leaving in self.draining.items() if is_leaving]
        if not leaving:
            return
        replicas = await asyncio.to_thread(ray_api.replicas_by_node)
        moved = await asyncio.to_thread(ray_api.drained_by_ray)
        for node in leaving:
            if replicas[node] and node not in moved:
                await asyncio.to_thread(ray_api.drain_by_ray, node, DRAIN_DEADLINE_S)

    async def _state_of(self, node: str) -> NodeState:
        found = [state for state in await self.nodes() if state.node_id == node]
        if not found:
            raise FabricUnavailable(
                f"node {node[:8]} has just left the cluster", hint="see: aenv cluster nodes"
            )
        return found[0]

    async def _node_named(self, name: str) -> str:
        nodes = await asyncio.to_thread(ray_api.alive_nodes)
        return node_named(name, nodes, {node: facts.machine for node, facts in nodes.items()})


def _is_runner(class_name: str) -> bool:
    return class_name.rpartition(".")[2] == RUNNER_CLASS
