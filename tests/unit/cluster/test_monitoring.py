"""The dashboard and the alerts use metrics that are exported; each alert has a first step."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from aenv_ray.actors.controller.metrics import COUNTERS, GAUGES, NODE, PHASES, slots
from aenv_ray.actors.controller.placement import HostLoad
from aenv_ray.actors.fabric.async_fabric import GATEWAY_QUEUE_S
from aenv_ray.actors.fabric.create_options import QUEUE_S
from aenv_ray.actors.host.host_counters import OK, OUTSIDE
from aenv_ray.actors.ray_shell.nodes import NodeFacts
from aenv_ray.cluster import manifests
from aenv_ray.cluster.manifests import alerts
from aenv_ray.errors import AenvError, CapacityExceeded
from aenv_ray.hub.hub_actor import LATENCY
from aenv_ray.sampling.metrics import SamplingMetrics
from aenv_ray.serve.gateway.metrics import Metrics

ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "clusters" / "kuberay" / "monitoring"
_SUFFIX = re.compile(r"_(bucket|count|sum|total)$")


CLUSTER = set(GAUGES) | set(COUNTERS) | {LATENCY}


def of_samplings() -> set[str]:
    metrics = vars(SamplingMetrics("mini-terminal")).values()
    return {str(m.info["name"]) for m in metrics if hasattr(m, "info")}


def exported() -> set[str]:
    """Return the names of all metrics."""
    gateway = set(re.findall(r"(?m)^# TYPE (\w+) ", Metrics().text().decode()))
    return {_SUFFIX.sub("", name) for name in gateway} | of_samplings() | CLUSTER


def used(text: str) -> set[str]:
    return {_SUFFIX.sub("", name) for name in re.findall(r"ray_(aenv_\w+)", text)}


def test_the_dashboard_and_the_alerts_use_exported_metrics() -> None:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    shown = used(json.dumps(dashboard))
    assert shown <= exported()
    assert CLUSTER | of_samplings() <= shown
    assert used((MONITORING / "pod-monitor.yaml").read_text()) <= exported()
    shown_metrics = re.findall(r"ray_aenv_\w+(.{25})", json.dumps(dashboard["panels"]))
    assert all(rest.startswith("{namespace=~") for rest in shown_metrics)


def rules() -> list[dict[str, Any]]:
    documents = list(yaml.safe_load_all((MONITORING / "pod-monitor.yaml").read_text()))
    return [rule for d in documents for g in d["spec"].get("groups", ()) for rule in g["rules"]]


def test_each_alert_has_an_entry_in_the_run_book_that_begins_with_its_first_step() -> None:
    book = (ROOT / "docs" / "operations.md").read_text()
    entries = dict(re.findall(r"(?ms)^### `(\w+)`\n(.*?)(?=^##)", book))
    assert set(entries) == {rule["alert"] for rule in rules()}
    for rule in rules():
        entry = entries[rule["alert"]]
        assert re.findall(r"(?ms)^```sh\n(.+?)\n", entry)[0] == rule["annotations"]["first_step"]
        assert f"(#{rule['alert'].lower()})" in book  # in the table of contents


def test_commands_for_alerts_are_for_the_namespace_of_the_cluster() -> None:
    found = {alert.name: alert for alert in alerts("elsewhere")}
    assert list(found) == [rule["alert"] for rule in rules()]
    for alert in found.values():
        assert "-n aenv" not in alert.first_step
        assert alert.summary.endswith(".")
    assert found["AenvControllerAbsent"].first_step == "aenv cluster status -n elsewhere"


def test_the_rules_can_be_rewritten_for_another_namespace() -> None:
    text = (MONITORING / "pod-monitor.yaml").read_text()
    (command,) = re.findall(r"(?m)^#   (sed .*)", text)
    made = subprocess.run(
        ["sed", re.findall("'(.*)'", command)[0].replace("NAME", "elsewhere")],
        input=text, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    documents = list(yaml.safe_load_all(made))
    assert {one["metadata"]["namespace"] for one in documents} == {"elsewhere"}
    found = [rule for d in documents for g in d["spec"].get("groups", ()) for rule in g["rules"]]
    assert [one["annotations"]["first_step"] for one in found] == [
        alert.first_step for alert in alerts("elsewhere")
    ]
    assert set(re.findall(r'namespace="(\w+)"', made.partition("kind")[2])) == {"elsewhere"}


def labels_of(metric: str) -> set[str]:
    """Return the labels of a metric of the controller, the hub or the gateway."""
    cluster = {**GAUGES, **COUNTERS, LATENCY: ("", ("outcome",))}
    gateway = {name: ("", one._labelnames) for name, one in vars(Metrics())["_metrics"].items()}
    return set((cluster | gateway)[_SUFFIX.sub("", metric)][1])


def test_alerts_use_labels_that_their_metrics_have() -> None:
    """A matcher or grouping on a label that does not exist never fires, or hides a cluster."""
    for rule in rules():
        known = {"namespace"}
        for metric, matchers in re.findall(r"ray_(aenv_\w+)(?:\{([^}]*)\})?", rule["expr"]):
            own = labels_of(metric)
            assert set(re.findall(r"(\w+)=", matchers)) <= own | {"namespace"}
            known |= own | ({"le"} if metric.endswith("_bucket") else set())
        for names in re.findall(r"\b(?:by|on) \(([^)]*)\)", rule["expr"]):
            assert set(names.split(", ")) <= known
        assert not re.findall(r"\b(?:sum|max|and)\b(?! (?:by|on) \(namespace)", rule["expr"])
        assert "absent(" not in rule["expr"] or 'namespace="aenv"' in rule["expr"]


def test_a_full_cluster_fires_an_alert_before_creates_give_up() -> None:
    """The age of the queue never exceeds what creates wait, and each create begins anew."""
    (expr,) = (rule["expr"] for rule in rules() if rule["alert"] == "AenvQueueOld")
    (limit,) = re.findall(r"ray_aenv_queue_age_seconds\[5m\]\)\) > (\d+)", expr)
    assert int(limit) < min(QUEUE_S, GATEWAY_QUEUE_S)
    assert f'ray_aenv_creates_total{{outcome="{CapacityExceeded.code}"}}' in expr


def test_the_values_of_labels_in_alerts_are_exported() -> None:
    """An alert on an outcome that no error has would never fire."""
    codes = {OK, *(error.code for error in subclasses(AenvError))}
    for rule in rules():
        for label in ("outcome", "error"):
            for values in re.findall(rf'{label}=~?"([^"]+)"', rule["expr"]):
                assert set(values.split("|")) <= codes
        for values in re.findall(r'cause=~"([^"]+)"', rule["expr"]):
            assert set(values.split("|")) <= {OUTSIDE, NODE}
        for phase in re.findall(r'phase="([^"]+)"', rule["expr"]):
            assert phase in PHASES


def subclasses(of: type[AenvError]) -> set[type[AenvError]]:
    return {of}.union(*(subclasses(c) for c in of.__subclasses__()))


def test_slots_of_nodes_without_hosts_are_free() -> None:
    nodes = {"a": NodeFacts(4, 8), "b": NodeFacts(4, 8), "head": NodeFacts(0, None, is_head=True)}
    assert slots(nodes, [HostLoad("h", "a", 3, 8)]) == {"free": 13, "used": 3}


def test_the_run_book_names_what_the_manifests_have() -> None:
    """Containers, Services, pods and labels of its kubectl commands."""
    book = (ROOT / "docs" / "operations.md").read_text()
    commands = "\n".join(re.findall(r"(?ms)^```sh\n(.*?)^```", book))
    objects = manifests.load("production")
    (cluster,) = [one for one in objects if one["kind"] == "RayCluster"]
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    containers = {c["name"] for g in groups for c in g["template"]["spec"]["containers"]}
    assert set(re.findall(r" -c (\w\S+)", commands)) <= containers | {"autoscaler"}  # of KubeRay
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    assert {("Service", name) for name in re.findall(r"svc/(\S+)", commands)} <= names
    pods = re.findall(r"(?:logs|exec) (\S+)-0\b", commands)
    assert {("StatefulSet", name) for name in pods} <= names
    text = json.dumps(objects)
    for label, value in re.findall(r" -l (\S+)=(\S+)", commands):
        assert label == "ray.io/node-type" or f'"{label}": "{value}"' in text, label
    assert set(re.findall(r"-n (aenv\S*)", commands)) == {"aenv"}
