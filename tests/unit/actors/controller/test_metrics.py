"""What hosts report becomes counters that only grow, and a lost node's instances are counted."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from aenv_ray.actors.controller.controller import Controller
from aenv_ray.actors.controller.metrics import COUNTERS, PHASES, ClusterMetrics, Increments
from aenv_ray.actors.host.host_counters import EngineOutcome, HostCounters, HostMeasures
from aenv_ray.actors.ray_shell import ray_api, ray_metrics
from aenv_ray.errors import FabricUnavailable

OK = EngineOutcome("process", "ok")
FAILED = EngineOutcome("process", "sandbox_start_failed")


def test_counts_of_hosts_become_increments() -> None:
    increments = Increments(is_continued=False)
    assert increments.of({"a": Counter({OK: 3})}) == {OK: 3}
    assert increments.of({"a": Counter({OK: 5}), "b": Counter({FAILED: 1})}) == {OK: 2, FAILED: 1}
    assert increments.of({}) == {}  # silent for once
    assert increments.of({"a": Counter({OK: 6})}) == {OK: 1}


def test_a_restarted_host_begins_at_zero() -> None:
    increments = Increments(is_continued=False)
    increments.of({"a": Counter({OK: 3, FAILED: 1})})
    assert increments.of({"a": Counter({OK: 2})}) == {OK: 2}
    increments.forget(set())
    assert increments.of({"a": Counter({OK: 2})}) == {OK: 2}, "another host of that name"


def test_a_restarted_controller_does_not_count_again() -> None:
    increments = Increments(is_continued=True)
    assert increments.of({"a": Counter({OK: 1000})}) == {}
    assert increments.of({"a": Counter({OK: 1001})}) == {OK: 1}


class Metric:
    """Keeps what is exported."""

    all: dict[str, Metric]

    def __init__(self, name: str, *, description: str, tag_keys: tuple[str, ...]) -> None:
        self.values: dict[tuple[str, ...], float] = {}
        self.keys = tag_keys
        Metric.all[name] = self

    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        self.values[tuple((tags or {})[key] for key in self.keys)] = value

    def inc(self, value: float, tags: dict[str, str]) -> None:
        labels = tuple(tags[key] for key in self.keys)
        self.values[labels] = self.values.get(labels, 0.0) + value


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> dict[str, Metric]:
    Metric.all = {}
    monkeypatch.setattr(ray_metrics, "Gauge", Metric)
    monkeypatch.setattr(ray_metrics, "Counter", Metric)
    return Metric.all


def measures(instances: int, **pods: int) -> HostMeasures:
    counters = HostCounters(
        Counter({OK: instances}), Counter({EngineOutcome("process", "memory"): 1})
    )
    return HostMeasures(instances, 8, counters, Counter(pods))


def test_the_instances_of_a_lost_node_are_lost(exported: dict[str, Any]) -> None:
    metrics = ClusterMetrics(is_continued=False)
    hosts = {"a": "n1", "b": "n2"}
    found = {"a": measures(3, Running=2), "b": measures(2, Running=1, Pending=1)}
    metrics.happened(found, hosts, {"a", "b"}, {"n1", "n2"})
    pods = exported["aenv_pods"].values
    assert {phase for (phase,) in pods} == set(PHASES)
    assert (pods["Running",], pods["Pending",], pods["Failed",]) == (3, 1, 0)
    metrics.happened({"b": found["b"]}, {"b": "n2"}, {"b"}, {"n2"})
    metrics.happened({"b": found["b"]}, {"b": "n2"}, {"b"}, {"n2"})
    lost = exported["aenv_lost_sandboxes"].values
    assert lost == {("process", "memory"): 2, ("any", "node"): 3}
    assert exported["aenv_creates"].values == {("process", "ok"): 5}
    assert pods["Running",] == 1


def test_a_node_is_lost_some_measurements_after_its_hosts_fell_silent(
    exported: dict[str, Any],
) -> None:
    """Ray takes longer to notice a dead node than the time between two measurements."""
    metrics = ClusterMetrics(is_continued=False)
    hosts, nodes = {"a": "n1", "b": "n2"}, {"n1", "n2"}
    found = {"a": measures(3), "b": measures(2)}
    metrics.happened(found, hosts, {"a", "b"}, nodes)
    for known in hosts, {"b": "n2"}:  # the controller drops a host that does not answer
        metrics.happened({"b": found["b"]}, known, {"a", "b"}, nodes)
    lost = exported["aenv_lost_sandboxes"].values
    assert ("any", "node") not in lost
    for _ in range(2):
        metrics.happened({"b": found["b"]}, {"b": "n2"}, {"b"}, {"n2"})
    assert lost["any", "node"] == 3


def test_what_ended_before_its_node_is_not_lost(exported: dict[str, Any]) -> None:
    metrics = ClusterMetrics(is_continued=False)
    metrics.happened({"a": measures(3)}, {"a": "n1"}, {"a"}, {"n1"})
    metrics.happened({}, {}, set(), {"n1"})
    metrics.happened({}, {}, set(), set())
    assert ("any", "node") not in exported["aenv_lost_sandboxes"].values


def test_what_ended_since_its_node_was_measured_is_not_lost(exported: dict[str, Any]) -> None:
    """A worker that drains waits for its instances, and goes at once when they have ended."""
    metrics = ClusterMetrics(is_continued=False)
    hosts = {"a": "n1", "b": "n1", "c": "n2"}
    metrics.happened({host: measures(3) for host in hosts}, hosts, set(hosts), {"n1", "n2"})
    metrics.heard({"a": 0, "c": 9, "new": 1})
    metrics.happened({}, {}, set(), {"n2"})
    assert exported["aenv_lost_sandboxes"].values["any", "node"] == 3, "those of the silent host"


async def test_who_waits_for_a_drain_updates_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the last look before the node goes counts, however long ago the measurement was."""
    monkeypatch.setattr(ray_api, "actor_names", lambda: ["a", "b"])
    monkeypatch.setattr(ray_api, "actor_nodes", lambda: {"a": "n1", "b": "n1"})
    heard: list[dict[str, int]] = []

    async def find(names: list[str]) -> list[str]:
        return names

    async def ask(name: str, *_: Any) -> int:
        if name == "b":
            raise FabricUnavailable("it hangs")
        return 2

    controller: Any = SimpleNamespace(
        _hosts=SimpleNamespace(find=find, nodes={}), _no_hosts=set, _ask=ask, _creating=(),
        _metrics=SimpleNamespace(heard=heard.append),
    )  # fmt: skip
    counts, silent = await Controller._instances_by_node(controller, ["n1"])
    assert (counts, silent, heard) == ({"n1": 2}, {"n1": 1}, [{"a": 2}])


def test_a_host_that_was_silent_counts_only_what_is_new(exported: dict[str, Any]) -> None:
    """Its history would raise alerts about old events."""
    metrics = ClusterMetrics(is_continued=False)
    metrics.happened({"a": measures(4000)}, {"a": "n1"}, {"a"}, {"n1"})
    metrics.happened({}, {}, {"a"}, {"n1"})
    metrics.happened({"a": measures(4001)}, {"a": "n1"}, {"a"}, {"n1"})
    assert exported["aenv_creates"].values == {("process", "ok"): 4001}


def test_refused_creates_are_counted(exported: dict[str, Any]) -> None:
    metrics = ClusterMetrics(is_continued=False)
    metrics.created(EngineOutcome("any", "capacity_exceeded"), 4)
    assert exported["aenv_creates"].values == {("any", "capacity_exceeded"): 4}
    assert set(COUNTERS) <= set(exported)
