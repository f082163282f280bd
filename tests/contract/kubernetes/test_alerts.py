"""Prometheus evaluates the alerts: each fires at its fault, and none in a healthy cluster."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import require

RULES = Path(__file__).parents[3] / "clusters/kuberay/monitoring/pod-monitor.yaml"
HEALTHY = {
    "ray_aenv_nodes": "2x120",
    'ray_aenv_slots{state="free"}': "100x120",
    "ray_aenv_queue_creates": "0x120",
    "ray_aenv_queue_age_seconds": "0x120",
    'ray_aenv_pods{phase="Pending"}': "60x120",
    'ray_aenv_creates_total{engine="process",outcome="ok"}': "0+500x120",
    'ray_aenv_creates_total{engine="kubernetes",outcome="ok"}': "0+1500x120",
    'ray_aenv_creates_total{engine="process",outcome="died_inside"}': "0+50x120",
    'ray_aenv_lost_sandboxes_total{engine="process",cause="inside"}': "0+50x120",
    'ray_aenv_lost_sandboxes_total{engine="process",cause="outside"}': "0+0.2x120",
    'ray_aenv_gateway_errors_total{error="not_found"}': "0+50x120",
    'ray_aenv_hub_seconds_count{outcome="ok"}': "0+600x120",
    'ray_aenv_hub_seconds_count{outcome="config_error"}': "0+1x120",
    'ray_aenv_hub_seconds_bucket{outcome="ok",le="0.02"}': "0+590x120",
    'ray_aenv_hub_seconds_bucket{outcome="ok",le="0.5"}': "0+599x120",
    'ray_aenv_hub_seconds_bucket{outcome="ok",le="2"}': "0+600x120",
    'ray_aenv_hub_seconds_bucket{outcome="ok",le="+Inf"}': "0+600x120",
}
"""Samples of an hour, one every thirty seconds, in the notation of ``promtool test rules``."""


@dataclass(frozen=True)
class Fault:
    """What happens 20 minutes after the beginning, and what it raises.

    Attributes:
        name: What happens.
        alert: The alert.
        series: Samples that replace or join those of a healthy cluster.
        labels: Labels of the alert, beside the namespace.
        within_min: Minutes after which it must have fired.
    """

    name: str
    alert: str
    series: dict[str, str]
    labels: dict[str, str]
    within_min: int = 12


def before(value: str) -> str:
    """Return samples of 20 minutes."""
    return f"{value}x39"


FAULTS = [
    Fault(
        "the head is lost", "AenvControllerAbsent", {"ray_aenv_nodes": f"{before('2')} _x80"}, {}
    ),
    Fault(
        "all workers go, and creates wait", "AenvNoWorkers",
        {
            "ray_aenv_nodes": f"{before('2')} 0x80",
            "ray_aenv_queue_creates": f"{before('0')} 7x80",
            "ray_aenv_queue_age_seconds": f"{before('0')} 0+30x80",
        },
        {},
    ),
    Fault(
        "all workers go, and creates give up at once", "AenvNoWorkers",
        {
            "ray_aenv_nodes": f"{before('2')} 0x80",
            'ray_aenv_creates_total{engine="any",outcome="capacity_exceeded"}': "_x40 1+1x79",
        },
        {},
    ),
    Fault(
        "a full cluster", "AenvQueueOld",
        {"ray_aenv_queue_age_seconds": f"{before('0')} 0+30x8 210x72"}, {}, within_min=15,
    ),
    Fault(
        "a cluster that is too small for a batch", "AenvQueueOld",
        {'ray_aenv_creates_total{engine="any",outcome="capacity_exceeded"}': "_x40 4x79"}, {},
        within_min=8,
    ),
    Fault(
        "a slow Redis", "AenvHubSlow",
        {
            'ray_aenv_hub_seconds_count{outcome="ok"}': "0+600x120",
            'ray_aenv_hub_seconds_bucket{outcome="ok",le="0.5"}': f"{'0+599x39'} 23361+300x80",
        },
        {},
    ),
    Fault(
        "Redis is lost", "AenvHubUnavailable",
        {'ray_aenv_hub_seconds_count{outcome="fabric_unavailable"}': "_x40 1+6x79"}, {},
    ),
    Fault(
        "Redis refuses the password", "AenvHubUnavailable",
        {'ray_aenv_hub_seconds_count{outcome="config_error"}': "0+1x39 40+7x80"}, {},
    ),
    Fault(
        "images cannot be pulled", "AenvCreatesFail",
        {
            'ray_aenv_creates_total{engine="kubernetes",outcome="sandbox_start_failed"}':
            "_x40 5+5x79"
        },
        {"engine": "kubernetes", "outcome": "sandbox_start_failed"},
    ),
    Fault(
        "a batch of creates fails: the first failures of all", "AenvCreatesFail",
        {'ray_aenv_creates_total{engine="docker",outcome="internal_error"}': "_x40 64x79"},
        {"engine": "docker", "outcome": "internal_error"}, within_min=8,
    ),
    Fault(
        "requests fail", "AenvGatewayFails",
        {'ray_aenv_gateway_errors_total{error="fabric_unavailable"}': f"{before('2')} 8+6x80"},
        {"error": "fabric_unavailable"},
    ),
    Fault(
        "a node takes its sandboxes along: the first loss of all", "AenvSandboxesLost",
        {'ray_aenv_lost_sandboxes_total{engine="any",cause="node"}': "_x40 48x79"},
        {"engine": "any", "cause": "node"}, within_min=2,
    ),
    Fault(
        "pods find no node", "AenvPodsPending",
        {
            'ray_aenv_pods{phase="Pending"}': f"{before('3')} 40x80",
            'ray_aenv_creates_total{engine="kubernetes",outcome="ok"}': "0x120",
        },
        {}, within_min=12,
    ),
    Fault(
        "pods find a node after minutes, while others go on to start", "AenvPodsPending",
        {
            'ray_aenv_pods{phase="Pending"}': f"{before('60')} 200x80",
            'ray_aenv_creates_total{engine="kubernetes",outcome="ok"}': "0+1500x39 58530+30x80",
        },
        {}, within_min=25,
    ),
    Fault(
        "the first pods of a cluster find no node", "AenvPodsPending",
        {
            'ray_aenv_pods{phase="Pending"}': f"{before('0')} 40x80",
            'ray_aenv_creates_total{engine="kubernetes",outcome="ok"}': "_x120",
        },
        {}, within_min=12,
    ),
]  # fmt: skip


def in_namespace(series: str, namespace: str) -> str:
    name, _, labels = series.partition("{")
    rest = labels.rstrip("}")
    return f'{name}{{namespace="{namespace}"{"," if rest else ""}{rest}}}'


def rules() -> dict[str, Any]:
    (found,) = (
        one["spec"]
        for one in yaml.safe_load_all(RULES.read_text())
        if one["kind"] == "PrometheusRule"
    )
    return dict(found)


ALERTS = {rule["alert"]: rule for group in rules()["groups"] for rule in group["rules"]}


def check(
    directory: Path, samples: dict[str, str], expected: dict[int, dict[str, list[Any]]]
) -> None:
    """Run Prometheus over an hour.

    Args:
        directory: For the files of ``promtool``.
        samples: Samples by series.
        expected: By minute and alert, the labels with which it fires then.
    """
    promtool = shutil.which("promtool")
    require("prometheus", promtool is not None, "promtool is not installed")
    assert promtool is not None
    (directory / "rules.yaml").write_text(yaml.safe_dump(rules()))
    wanted = [
        {
            "eval_time": f"{minute}m",
            "alertname": name,
            "exp_alerts": [
                {"exp_labels": labels, "exp_annotations": ALERTS[name]["annotations"]}
                for labels in firing
            ],
        }
        for minute, alerts in expected.items()
        for name, firing in alerts.items()
    ]
    series = [{"series": name, "values": values} for name, values in samples.items()]
    test = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "30s",
        "tests": [{"interval": "30s", "input_series": series, "alert_rule_test": wanted}],
    }
    (directory / "test.yaml").write_text(yaml.safe_dump(test))
    done = subprocess.run(
        [promtool, "test", "rules", "test.yaml"],
        cwd=directory, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_healthy_cluster_raises_no_alert(tmp_path: Path) -> None:
    samples = {in_namespace(name, "aenv"): values for name, values in HEALTHY.items()}
    nothing: dict[str, list[Any]] = {name: [] for name in ALERTS}
    check(tmp_path, samples, dict.fromkeys((10, 30, 59), nothing))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_raises_its_alert_and_no_other(fault: Fault, tmp_path: Path) -> None:
    """A second, healthy cluster on the same Prometheus neither hides it nor raises it."""
    samples = {in_namespace(name, "aenv"): values for name, values in HEALTHY.items()}
    samples |= {in_namespace(name, "other"): values for name, values in HEALTHY.items()}
    samples |= {in_namespace(name, "aenv"): values for name, values in fault.series.items()}
    nothing: dict[str, list[Any]] = {name: [] for name in ALERTS}
    labels = {"alertname": fault.alert, "namespace": "aenv", **fault.labels}
    check(
        tmp_path,
        samples,
        {19: nothing, 20 + fault.within_min: nothing | {fault.alert: [labels]}},
    )


def test_each_alert_has_a_fault() -> None:
    assert {fault.alert for fault in FAULTS} == set(ALERTS)
