"""Metrics of the cluster in Ray's Prometheus exporter, from the controller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from typing import Any, Final

from aenv_ray.actors.controller.placement import HostLoad, host_capacities, usable
from aenv_ray.actors.host.host_counters import ANY_ENGINE, EngineOutcome, HostMeasures
from aenv_ray.actors.ray_shell.nodes import NodeFacts

GAUGES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "aenv_nodes": ("Live nodes that take instances", ()),
    "aenv_slots": ("Slots for instances on shared hosts", ("state",)),
    "aenv_queue_creates": ("Creates that wait for room", ()),
    "aenv_queue_instances": ("Instances that waiting creates ask for", ()),
    "aenv_queue_age_seconds": ("Age of the oldest create that waits for room", ()),
    "aenv_pods": ("Pods of instances", ("phase",)),
}
"""Description and labels of each gauge, by name; Ray exports it with the prefix ``ray_``."""
COUNTERS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "aenv_creates": ("Creates that ended", ("engine", "outcome")),
    "aenv_lost_sandboxes": ("Sandboxes that ended before their instance", ("engine", "cause")),
}
"""Counters, by name: description and labels."""
PHASES: Final = ("Pending", "Running", "Succeeded", "Failed", "Unknown")
NODE: Final = "node"
"""Cause of the loss of the instances of a lost node."""


def slots(nodes: Mapping[str, NodeFacts], loads: Iterable[HostLoad]) -> dict[str, int]:
    """Return the used slots, and the free ones of the nodes that take instances.

    Nodes without hosts count, too.
    """
    taking = usable(nodes)
    used = Counter[bool]()
    for load in loads:
        used[load.node_id in taking] += load.instances
    capacity = sum(sum(host_capacities(facts)) for facts in taking.values())
    return {"free": max(0, capacity - used[True]), "used": used.total()}


class Increments:
    """What was added to counts that hosts report cumulatively.

    Args:
        is_continued: Whether an earlier controller may have exported the first counts.
    """

    def __init__(self, *, is_continued: bool) -> None:
        self._is_continued = is_continued
        self._last: dict[str, Counter[EngineOutcome]] = {}

    def of(self, reports: Mapping[str, Counter[EngineOutcome]]) -> Counter[EngineOutcome]:
        """Return what all hosts added since the last call.

        Counts that are lower than before come from a restarted host, which began at zero.
        """
        added: Counter[EngineOutcome] = Counter()
        for host, counts in reports.items():
            before = self._last.get(host, Counter())
            is_restarted = any(counts[labels] < number for labels, number in before.items())
            if not self._is_continued:
                added += counts if is_restarted else counts - before
            self._last[host] = Counter(counts)
        self._is_continued = False
        return added

    def forget(self, alive: Set[str]) -> None:
        """Forget hosts that are gone."""
        self._last = {host: counts for host, counts in self._last.items() if host in alive}


class ClusterMetrics:
    """Exports the state of the cluster. Create it in the controller's process.

    Args:
        is_continued: Whether this controller replaces an earlier one.
    """

    def __init__(self, *, is_continued: bool) -> None:
        from aenv_ray.actors.ray_shell import ray_metrics

        self._gauges: dict[str, Any] = {
            name: ray_metrics.Gauge(name, description=text, tag_keys=labels)
            for name, (text, labels) in GAUGES.items()
        }
        self._counters: dict[str, Any] = {
            name: ray_metrics.Counter(name, description=text, tag_keys=labels)
            for name, (text, labels) in COUNTERS.items()
        }
        self._creates = Increments(is_continued=is_continued)
        self._lost = Increments(is_continued=is_continued)
        self._instances: dict[str, tuple[str, int]] = {}
        """The node of each host, and its instances when it last answered."""

    def note(
        self, nodes: Mapping[str, NodeFacts], loads: Iterable[HostLoad],
        queued: tuple[int, int, float],
    ) -> None:  # fmt: skip
        """Set the slots and the waiting creates.

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

    def happened(
        self,
        measures: Mapping[str, HostMeasures],
        hosts: Mapping[str, str],
        alive: Set[str],
        nodes: Set[str],
    ) -> None:
        """Count what hosts report, and the instances of nodes that are gone.

        Ray notices a dead node only after some seconds, in which its hosts do not answer.

        Args:
            measures: By the host's name; hosts that do not answer are missing.
            hosts: The nodes of these hosts, by name.
            alive: The names of all actors that Ray considers alive, read before `nodes`.
            nodes: The live nodes.
        """
        gone = sum(count for node, count in self._instances.values() if node not in nodes)
        self._count("aenv_lost_sandboxes", "cause", {EngineOutcome(ANY_ENGINE, NODE): gone})
        now = {host: (hosts[host], found.instances) for host, found in measures.items()}
        self._instances = {
            host: (node, count)
            for host, (node, count) in (self._instances | now).items()
            if host in alive and node in nodes
        }
        for name, label, increments, reports in (
            ("aenv_creates", "outcome", self._creates,
             {host: found.counters.creates for host, found in measures.items()}),
            ("aenv_lost_sandboxes", "cause", self._lost,
             {host: found.counters.lost for host, found in measures.items()}),
        ):  # fmt: skip
            increments.forget(alive)
            self._count(name, label, increments.of(reports))
        pods: Counter[str] = Counter(dict.fromkeys(PHASES, 0))
        for found in measures.values():
            pods.update(found.pods)
        for phase, count in pods.items():
            self._gauges["aenv_pods"].set(float(count), tags={"phase": phase})

    def heard(self, instances: Mapping[str, int]) -> None:
        """Update how many instances hosts have, between two measurements.

        Instances of a drained node have ended before the node goes, perhaps since it was measured.

        Args:
            instances: By the host's name, for hosts that answered. Other hosts keep what they had.
        """
        for host, (node, count) in self._instances.items():
            self._instances[host] = (node, instances.get(host, count))

    def created(self, labels: EngineOutcome, number: int = 1) -> None:
        """Count creates that the controller itself ended."""
        self._count("aenv_creates", "outcome", {labels: number})

    def _count(self, name: str, label: str, counts: Mapping[EngineOutcome, int]) -> None:
        for (engine, outcome), number in counts.items():
            if number:
                self._counters[name].inc(float(number), tags={"engine": engine, label: outcome})
