"""The dashboard and the alerts use metrics that are exported; each alert has a first step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from aenv_ray.actors.controller.metrics import GAUGES, slots
from aenv_ray.actors.controller.placement import HostLoad
from aenv_ray.actors.ray_shell.nodes import NodeFacts
from aenv_ray.hub.hub_actor import LATENCY
from aenv_ray.sampling.metrics import SamplingMetrics
from aenv_ray.serve.gateway.metrics import Metrics

ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "clusters" / "kuberay" / "monitoring"
_SUFFIX = re.compile(r"_(bucket|count|sum|total)$")


def exported() -> set[str]:
    """Return the names of all metrics."""
    gateway = set(re.findall(r"(?m)^# TYPE (\w+) ", Metrics().text().decode()))
    metrics = vars(SamplingMetrics("mini-terminal")).values()
    sampling = {str(m.info["name"]) for m in metrics if hasattr(m, "info")}
    return {_SUFFIX.sub("", name) for name in gateway | sampling} | set(GAUGES) | {LATENCY}


def used(text: str) -> set[str]:
    return {_SUFFIX.sub("", name) for name in re.findall(r"ray_(aenv_\w+)", text)}


def test_the_dashboard_and_the_alerts_use_exported_metrics() -> None:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    shown = used(json.dumps(dashboard))
    assert shown <= exported()
    assert set(GAUGES) | {LATENCY} <= shown
    assert used((MONITORING / "pod-monitor.yaml").read_text()) <= exported()


def test_each_alert_names_its_first_step_and_is_in_the_run_book() -> None:
    documents = list(yaml.safe_load_all((MONITORING / "pod-monitor.yaml").read_text()))
    rules = [rule for d in documents for g in d["spec"].get("groups", ()) for rule in g["rules"]]
    book = (ROOT / "docs" / "operations.md").read_text()
    assert len(rules) >= 5
    for rule in rules:
        (row,) = [row for row in book.splitlines() if row.startswith(f"| `{rule['alert']}` |")]
        assert row.rpartition(" | ")[2].startswith(f"`{rule['annotations']['first_step']}`")


def test_slots_of_nodes_without_hosts_are_free() -> None:
    nodes = {"a": NodeFacts(4, 8), "b": NodeFacts(4, 8), "head": NodeFacts(0, None, is_head=True)}
    assert slots(nodes, [HostLoad("h", "a", 3, 8)]) == {"free": 13, "used": 3}
