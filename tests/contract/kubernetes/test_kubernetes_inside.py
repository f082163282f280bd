"""What people run inside of a cluster on Kubernetes: the built-in environment, and the doctor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from aenv_ray.actors.host.fresh_sandbox import fresh_sandbox
from aenv_ray.actors.ray_shell.remote_tasks import chosen
from aenv_ray.cli import doctor as doctor_command
from aenv_ray.cli.checks import kubernetes as checks_kubernetes
from aenv_ray.cli.main import main
from aenv_ray.config import Settings, read_settings
from aenv_ray.engines.kubernetes.client import KubernetesClient
from aenv_ray.engines.kubernetes.permissions import Access
from aenv_ray.findings import Finding, Verdict
from aenv_ray.project import project
from aenv_ray.testing.contract_bench import eventually
from tests.contract.kubernetes.kubernetes_node import RAY_POD, KubernetesNode
from tests.emulators.kubernetes.api import NAMESPACE
from tests.emulators.kubernetes.node import PYTHON_IMAGE

pytestmark = pytest.mark.namespaces

WITHIN_S = 60.0


@pytest.fixture(scope="module")
def node() -> Iterator[KubernetesNode]:
    with KubernetesNode() as node:
        yield node


async def test_a_task_of_the_built_in_terminal_is_solved_in_a_pod(node: KubernetesNode) -> None:
    """What `aenv quickstart --engine kubernetes` does, once."""
    source = project.resolve("mini-terminal")
    split = "mkdir parts && split -l 1000 -a 3 -d --additional-suffix=.log journal.log parts/part-"
    async with fresh_sandbox(source, lifetime_s=WITHIN_S, make_engine=node.engine) as sandbox:
        for method, params in (
            ("aenv/function", {"name": "start_task", "arguments": {"task_id": "split-file-30"}}),
            ("tools/call", {"name": "execute_command", "arguments": {"command": split}}),
        ):
            answer = await sandbox.request(method, params, deadline_s=WITHIN_S)
            assert not answer.get("isError"), answer
        arguments = {"arguments": {"task_id": "split-file-30"}}
        reward = await sandbox.request("aenv/reward", arguments, deadline_s=WITHIN_S)
        assert reward["data"]["score"] == 1.0
    await eventually(lambda: not node.left_over(), "nothing is left", WITHIN_S)


# --- the doctor -----------------------------------------------------------------------------------


def settings_of(node: KubernetesNode, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name, value in {
        "POD_NAME": RAY_POD,
        "AENV_KUBERNETES_IMAGE": PYTHON_IMAGE,
        "AENV_RUNTIME_DIR": str(node.root / "doctor"),
        "AENV_DATA_DIR": str(node.root / "data"),
    }.items():
        monkeypatch.setenv(name, value)
    return read_settings()


def client_of(url: str) -> KubernetesClient:
    from kubernetes.aio import client

    return KubernetesClient(NAMESPACE, client.Configuration(host=url))


@pytest.fixture
def granted(node: KubernetesNode) -> Iterator[set[tuple[str, str]]]:
    node.cluster.granted = {(a.value.verb, a.value.resource) for a in Access}
    yield node.cluster.granted
    node.cluster.granted = None


async def test_the_doctor_tries_a_pod_and_leaves_none(
    node: KubernetesNode, granted: set[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(node, monkeypatch)
    tried, network = await checks_kubernetes.examine(settings, client_of(node.cluster.url))
    assert tried.verdict is Verdict.OK, tried
    assert f"namespace {NAMESPACE}" in tried.found
    assert network.verdict is Verdict.WARNING
    assert "no NetworkPolicy" in network.found
    await eventually(lambda: not node.left_over(), "nothing is left", WITHIN_S)


async def test_the_doctor_finds_that_nothing_enforces_network_policies(
    node: KubernetesNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulated cluster does not enforce policies, like some real ones."""
    group = "networking.k8s.io"
    policy: dict[str, Any] = {
        "apiVersion": f"{group}/v1", "kind": "NetworkPolicy", "metadata": {"name": "all"},
        "spec": {"podSelector": {}, "policyTypes": ["Egress"]},
    }  # fmt: skip
    node.cluster.create("networkpolicies", policy, group)
    settings = settings_of(node, monkeypatch)
    _, network = await checks_kubernetes.examine(settings, client_of(node.cluster.url))
    node.cluster.delete("networkpolicies", "all", group)
    assert network.verdict is Verdict.WARNING
    assert "nothing enforces them" in network.found


async def test_the_doctor_names_missing_permissions_of_the_service_account(
    node: KubernetesNode, granted: set[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    granted -= {("create", "pods"), ("list", "networkpolicies")}
    settings = settings_of(node, monkeypatch)
    (found,) = await checks_kubernetes.examine(settings, client_of(node.cluster.url))
    assert found.verdict is Verdict.FAILED
    assert found.found.endswith("create pods, list networkpolicies.networking.k8s.io")
    assert f"Role of namespace {NAMESPACE}" in found.mend


async def test_the_doctor_reports_an_unreachable_api(
    node: KubernetesNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(node, monkeypatch)
    (found,) = await checks_kubernetes.examine(settings, client_of("http://127.0.0.1:1"))
    assert found.verdict is Verdict.FAILED
    assert "cannot be reached" in found.found


def test_a_worker_that_is_labelled_for_pods_is_asked_first() -> None:
    label = ("aenv-ray.io/engine", "kubernetes")
    head = {"NodeID": "h", "Alive": True, "Resources": {}, "Labels": {}}
    other = {"NodeID": "o", "Alive": True, "Resources": {"env_slot": 4.0}, "Labels": {}}
    mine = {**other, "NodeID": "m", "Labels": {label[0]: label[1]}}
    assert chosen([head], label) is None
    assert chosen([head, other], label) == "o"
    assert chosen([head, other, mine], label) == "m"
    assert chosen([{**mine, "Alive": False}], label) is None


@pytest.mark.parametrize(("wanted", "code"), [(None, 0), ("process", 0), ("kubernetes", 1)])
def test_the_doctor_fails_where_the_engine_that_is_wanted_does_not_work(
    wanted: str | None,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = [
        Finding("engine process", Verdict.OK, "works"),
        Finding(checks_kubernetes.ENGINE, Verdict.FAILED, "no", "mend it"),
    ]
    monkeypatch.setattr(doctor_command, "_all_checks", lambda: found)
    monkeypatch.delenv("AENV_ENGINE", raising=False)
    if wanted is not None:
        monkeypatch.setenv("AENV_ENGINE", wanted)
    assert main(["doctor", "-o", "json"]) == code
    output = capsys.readouterr()
    assert [row["verdict"] for row in json.loads(output.out)] == ["ok", "failed"]
    assert "mend it" in output.err


def test_outside_of_a_cluster_the_doctor_says_where_to_run_it() -> None:
    settings = read_settings().model_copy(
        update={"engine": "kubernetes", "pod_name": None, "ray_address": None}
    )
    assert checks_kubernetes.applies(settings)
    (found,) = checks_kubernetes.engine(settings)
    assert "aenv cluster doctor" in found.mend
    assert not checks_kubernetes.applies(settings.model_copy(update={"engine": "process"}))
