"""Metrics of the cluster's capacity in Ray's Prometheus exporter, set by the controller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from aenv_ray.actors.controller.placement import HostLoad, host_capacities, usable
from aenv_ray.actors.ray_shell.nodes import NodeFacts

GAUGES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "aenv_nodes": ("Live nodes that take instances", ()),
    "aenv_slots": ("Slots for instances on shared hosts", ("state",)),
    "aenv_queue_creates": ("Creates that wait for room", ()),
    "aenv_queue_instances": ("Instances that waiting creates ask for", ()),
    "aenv_queue_age_seconds": ("Age of the oldest create that waits for room", ()),
}
"""Description and labels of each metric, by name; Ray exports it with the prefix ``ray_``."""


def slots(nodes: Mapping[str, NodeFacts], loads: Iterable[HostLoad]) -> dict[str, int]:
    """Return the free and used slots of the nodes that take instances, with or without hosts."""
    used = sum(load.instances for load in loads)
    capacity = sum(sum(host_capacities(facts)) for facts in usable(nodes).values())
    return {"free": max(0, capacity - used), "used": used}


class ClusterMetrics:
    """Exports the slots and the waiting creates. Create it in the controller's process."""

    def __init__(self) -> None:
        from aenv_ray.actors.ray_shell.ray_metrics import Gauge

        self._gauges = {
            name: Gauge(name, description=text, tag_keys=labels)
            for name, (text, labels) in GAUGES.items()
        }

    def note(
        self,
        nodes: Mapping[str, NodeFacts],
        loads: Iterable[HostLoad],
        queued: tuple[int, int, float],
    ) -> None:
        """Set all metrics.

        Args:
            nodes: The live nodes.
            loads: Loads of the shared hosts that answer.
            queued: Waiting creates, their instances, and the age of the oldest in seconds.
        """
        self._gauges["aenv_nodes"].set(float(len(usable(nodes))))
        for state, count in slots(nodes, loads).items():
            self._gauges["aenv_slots"].set(float(count), tags={"state": state})
        names = ("aenv_queue_creates", "aenv_queue_instances", "aenv_queue_age_seconds")
        for name, value in zip(names, queued, strict=True):
            self._gauges[name].set(float(value))
