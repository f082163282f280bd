"""The states of nodes, and in particular of draining nodes: pure decisions.

A node that will be stopped is drained first: it takes no new instances, and its present ones run to
their end. Ray stores which nodes are draining, see `ray_api.set_draining_nodes`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from aenv_ray.actors.ray_shell.nodes import NodeFacts
from aenv_ray.errors import ConfigError

LEAST_PREFIX: Final = 6
"""Least length of an abbreviated node id."""


class NodeStatus(StrEnum):
    """Whether a node takes instances."""

    READY = "ready"
    """It takes instances."""
    CONTROL = "control"
    """It takes no instances: it runs only the control plane, or has no slots while others have."""
    DRAINING = "draining"
    """It takes no new instances, but still has instances, runners of samplings or hosts that do not
    answer; or it is leaving, and still has replicas of services."""
    DRAINED = "drained"
    """It takes no instances and has none: it can be stopped."""


@dataclass(frozen=True)
class NodeState:
    """A live node as `aenv cluster nodes` shows it.

    Attributes:
        instances: Number of instances that run or start there.
        runners: Number of samplings that play episodes there.
        replicas: Number of replicas of services.
        silent: Number of hosts that do not answer, and may have instances.
    """

    node_id: str
    machine: str
    status: NodeStatus
    instances: int
    runners: int
    replicas: int = 0
    silent: int = 0


def node_named(name: str, alive: Iterable[str], machines: Mapping[str, str]) -> str:
    """Return the id of a node, given its id, the beginning of it, or the name of its machine.

    Raises:
        ConfigError: No node has this name, or several have it.
    """
    found = [node for node in alive if name in (node, machines.get(node))]
    if not found and len(name) >= LEAST_PREFIX:
        found = [node for node in alive if node.startswith(name)]
    if len(found) == 1:
        return found[0]
    problem = f"{len(found)} nodes are called" if found else "there is no live node"
    raise ConfigError(f"{problem} {name!r}", hint="list the nodes with: aenv cluster nodes")


def node_states(
    nodes: Mapping[str, NodeFacts],
    taking: Collection[str],
    instances: Mapping[str, int],
    runners: Mapping[str, int],
    replicas: Mapping[str, int],
    silent: Mapping[str, int],
) -> list[NodeState]:
    """Return the state of each live node.

    Args:
        nodes: The live nodes.
        taking: Ids of the nodes that take new instances.
        instances: Number of instances that run or start, by node.
        runners: Number of runners of samplings, by node.
        replicas: Number of replicas of services, by node.
        silent: Number of hosts that do not answer, by node.
    """

    def status(node: str, facts: NodeFacts) -> NodeStatus:
        if facts.is_draining:
            is_used = instances.get(node, 0) or runners.get(node, 0) or silent.get(node, 0)
            if facts.is_leaving:
                is_used = is_used or replicas.get(node, 0)
            return NodeStatus.DRAINING if is_used else NodeStatus.DRAINED
        return NodeStatus.READY if node in taking else NodeStatus.CONTROL

    return [
        NodeState(
            node,
            facts.machine,
            status(node, facts),
            instances.get(node, 0),
            runners.get(node, 0),
            replicas.get(node, 0),
            silent.get(node, 0),
        )
        for node, facts in sorted(nodes.items(), key=lambda pair: (pair[1].machine, pair[0]))
    ]
