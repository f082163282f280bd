"""`aenv cluster` against an API that refuses as Kubernetes does: up, changed, looked at, down."""

from __future__ import annotations

import base64
import builtins
import json
import re
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from aenv_ray.cluster import api as cluster_api
from aenv_ray.cluster import lifecycle, manifests, yaml_files
from aenv_ray.cluster.checks import Doctor
from aenv_ray.cluster.objects import KINDS
from aenv_ray.cluster.readiness import Snapshot, why
from aenv_ray.engines.base import SandboxSpec
from aenv_ray.engines.kubernetes.manifest import pod_manifest
from aenv_ray.engines.kubernetes.plan import PodPlan
from aenv_ray.engines.kubernetes.settings import OwnerPod, PodSettings
from aenv_ray.errors import ConfigError, DeadlineExceeded, FabricUnavailable, Forbidden
from aenv_ray.findings import Verdict
from aenv_ray.ids import InstanceId
from aenv_ray.project.config import EnvironmentConfig
from tests.contract.kubernetes.kubernetes_objects import add, all_of, edited, one
from tests.emulators.kubernetes import drain
from tests.emulators.kubernetes.api import EmulatedCluster

ROOT = Path(__file__).parents[3]
LONG_S = 60.0


def counts(emulated: EmulatedCluster) -> dict[str, int]:
    return {name: len(all_of(emulated, name)) for name in KINDS}


# --- up -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", ["dev", "production"])
def test_apply_to_an_empty_cluster_comes_up(overlay, emulated, life):
    life.apply(manifests.load(overlay))
    found = life.await_ready(LONG_S)
    assert found.head is not None
    assert found.groups[0]["ready"] == found.groups[0]["min"] > 0
    order = [plural for verb, plural in emulated.calls if verb in {"patch", "create"}]
    assert order[0] == "namespaces"
    assert order.index("secrets") < order.index("statefulsets") < order.index("rayclusters")


def test_apply_again_changes_nothing_and_keeps_the_passwords(emulated, life):
    life.apply(manifests.load("dev"))
    before = [all_of(emulated, kind) for kind in KINDS]
    life.apply(manifests.load("dev"))
    assert [all_of(emulated, kind) for kind in KINDS] == before


def test_passwords_are_long_and_in_no_output(emulated, life, said):
    life.apply(manifests.load("dev"))
    for name in ("aenv-redis", "aenv-admin"):
        (data,) = one(emulated, "Secret", name)["data"].values()
        value = base64.b64decode(data).decode()
        assert len(value) >= 43
        assert value not in "\n".join(said)


def test_the_user_must_provide_the_password_of_an_external_redis(emulated, life):
    """A random one would let nothing in, and its cause would be far from its effect."""
    settings = {"redis.replicas": "0", "redis.secret": "my-redis"}
    with pytest.raises(ConfigError, match="no Secret my-redis") as caught:
        life.apply(manifests.load("dev", None, settings))
    assert "create secret generic my-redis" in (caught.value.hint or "")
    assert all_of(emulated, "RayCluster") == []
    mine = {"apiVersion": "v1", "kind": "Secret", "data": {"password": "eA=="},
            "metadata": {"name": "my-redis", "namespace": "aenv"}}  # fmt: skip
    add(emulated, mine)
    life.apply(manifests.load("dev", None, settings))
    life.await_ready(LONG_S)
    names = {secret["metadata"]["name"] for secret in all_of(emulated, "Secret")}
    assert names == {"my-redis", "aenv-admin", "aenv-registry"}


def test_the_password_of_the_own_redis_is_in_the_secret_of_the_values(emulated, life):
    life.apply(manifests.load("dev", None, {"redis.secret": "other"}))
    assert len(base64.b64decode(one(emulated, "Secret", "other")["data"]["password"])) == 64
    assert "aenv-redis" not in {s["metadata"]["name"] for s in all_of(emulated, "Secret")}


@pytest.mark.parametrize("overlay", ["dev", "production"])
def test_every_pull_secret_that_a_pod_names_exists(overlay, emulated, life):
    """A node reports each one that does not, with every pod."""
    life.apply(manifests.load(overlay))
    named = {
        reference["name"]
        for pod in all_of(emulated, "Pod")
        for reference in pod["spec"].get("imagePullSecrets", ())
    }
    values = yaml_files.read(manifests.bundled() / "overlays" / overlay / "values.yaml")
    named.add(values[0]["spec"]["sandboxes"]["pullSecrets"])
    assert named <= {secret["metadata"]["name"] for secret in all_of(emulated, "Secret")}


def test_a_missing_pull_secret_is_named(emulated, life, said):
    """The login of a user's registry can be created neither by `apply` nor by a pod."""
    life.apply(manifests.load("dev", None, {"sandboxes.pullSecrets": "aenv-registry, mine"}))
    missing = [line for line in said if "missing" in line]
    assert len(missing) == 1
    assert missing[0].startswith("Secret mine: missing")


def test_a_registry_login_of_the_user_is_kept(emulated, life):
    login = b'{"auths":{"registry.example":{}}}'
    mine = {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/dockerconfigjson",
            "metadata": {"name": "aenv-registry", "namespace": "aenv"},
            "data": {".dockerconfigjson": base64.b64encode(login).decode()}}  # fmt: skip
    add(emulated, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "aenv"}})
    add(emulated, mine)
    life.apply(manifests.load("dev"))
    life.delete(LONG_S, storage=True)
    assert [s["data"] for s in all_of(emulated, "Secret")] == [mine["data"]]


def test_apply_keeps_what_the_autoscaler_decided_within_the_new_bounds(emulated, life):
    life.apply(manifests.load("dev"))
    with edited(emulated, "RayCluster", "aenv") as ray:
        group = ray["spec"]["workerGroupSpecs"][0]
        group["replicas"], group["scaleStrategy"] = 3, {"workersToDelete": ["x"]}
    life.apply(manifests.load("dev", None, {"workers.maxReplicas": "8"}))
    group = one(emulated, "RayCluster", "aenv")["spec"]["workerGroupSpecs"][0]
    assert (group["replicas"], group["maxReplicas"]) == (3, 8)
    assert group["scaleStrategy"] == {"workersToDelete": ["x"]}
    life.apply(manifests.load("dev", None, {"workers.maxReplicas": "2"}))
    assert one(emulated, "RayCluster", "aenv")["spec"]["workerGroupSpecs"][0]["replicas"] == 2


def with_redis_volume(size: str, **more: str) -> list[dict[str, Any]]:
    volume = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
    return manifests.load("dev", None, {"redis.volume": json.dumps(volume | more)})


def redis_sizes(emulated: EmulatedCluster) -> tuple[str, str]:
    """Return the size that the claim of Redis asks for, and that in its StatefulSet."""
    claim = one(emulated, "PersistentVolumeClaim", "data-aenv-redis-0")
    (template,) = one(emulated, "StatefulSet", "aenv-redis")["spec"]["volumeClaimTemplates"]
    sizes = [each["spec"]["resources"]["requests"]["storage"] for each in (claim, template)]
    return sizes[0], sizes[1]


def test_apply_enlarges_the_volume_of_redis(emulated, life, said):
    """In its StatefulSet the size is immutable: the API would refuse each further `apply`."""
    life.apply(manifests.load("dev"))
    life.apply(with_redis_volume("5Gi"), dry_run=True)
    assert redis_sizes(emulated) == ("2Gi", "2Gi")
    life.apply(with_redis_volume("5Gi"))
    assert redis_sizes(emulated) == ("5Gi", "2Gi")
    life.upgrade(with_redis_volume("6Gi"), LONG_S)
    assert redis_sizes(emulated) == ("6Gi", "2Gi")
    life.apply(with_redis_volume("3Gi"))
    assert "PersistentVolumeClaim data-aenv-redis-0: keeps 6Gi, because no volume shrinks" in said
    life.delete(LONG_S)
    life.apply(with_redis_volume("7Gi"))
    assert redis_sizes(emulated) == ("7Gi", "7Gi")


def test_a_volume_that_cannot_be_enlarged_is_refused_with_the_ways_out(emulated, life):
    life.apply(manifests.load("dev"))
    with edited(emulated, "StorageClass", "standard") as storage_class:
        storage_class["allowVolumeExpansion"] = False
    with pytest.raises(ConfigError, match="must support resize") as caught:
        life.apply(with_redis_volume("5Gi"))
    for words in ("old size", "allowVolumeExpansion", "back up the hub"):
        assert words in (caught.value.hint or "")
    assert redis_sizes(emulated) == ("2Gi", "2Gi")
    with pytest.raises(ConfigError, match="updates to statefulset spec for fields other than"):
        life.apply(with_redis_volume("2Gi", storageClassName="fast"))


def test_a_field_that_somebody_else_set_is_taken_over_only_when_asked(emulated, life, api):
    life.apply(manifests.load("dev"))
    theirs = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "aenv-gateway"},
              "spec": {"type": "NodePort"}}  # fmt: skip
    api.request(
        "PATCH",
        KINDS["Service"].path("aenv", "aenv-gateway"),
        query={"fieldManager": "somebody", "force": "true"},
        body=json.dumps(theirs),
        content_type="application/apply-patch+yaml",
    )
    with pytest.raises(ConfigError, match='conflict with "somebody"') as caught:
        life.apply(manifests.load("dev"))
    assert "--force" in str(caught.value.hint)
    life.apply(manifests.load("dev"), force=True)
    assert one(emulated, "Service", "aenv-gateway")["spec"]["type"] == "ClusterIP"


def test_a_dry_run_changes_nothing_and_finds_what_the_api_refuses(emulated, life, said):
    before = counts(emulated)
    life.apply(manifests.load("dev"), dry_run=True)
    assert counts(emulated) == before
    assert any("the namespace does not exist yet" in line for line in said)
    add(emulated, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "aenv"}})
    broken = manifests.load("dev", None, {"workers.tolerations": "[{key: 1}]"})
    with pytest.raises(ConfigError, match=r"RayCluster is invalid: spec\.workerGroupSpecs"):
        life.apply(broken, dry_run=True)


def test_without_kuberay_nothing_is_begun(emulated, life):
    emulated.controllers.has_kuberay = False
    before = counts(emulated)
    with pytest.raises(ConfigError, match="KubeRay is not installed") as caught:
        life.apply(manifests.load("dev"))
    assert "helm install kuberay-operator" in str(caught.value.hint)
    assert counts(emulated) == before


def test_a_cluster_that_does_not_come_up_says_why(emulated, life, said):
    emulated.controllers.missing_images.add("nowhere/aenv-ray:1")
    life.apply(manifests.load("dev", None, {"image": "nowhere/aenv-ray:1"}))
    with pytest.raises(DeadlineExceeded, match='Back-off pulling image "nowhere/aenv-ray:1"'):
        life.await_ready(0.0)
    assert len(said) == len(set(said))  # each lack is told once


def test_pods_that_the_namespace_does_not_admit_are_reported(emulated, life):
    add(emulated, {"apiVersion": "v1", "kind": "ResourceQuota",
                   "metadata": {"name": "team", "namespace": "aenv"},
                   "spec": {"hard": {"pods": "0"}}})  # fmt: skip
    life.apply(manifests.load("dev"))
    with pytest.raises(DeadlineExceeded) as caught:
        life.await_ready(0.0)
    for owner in ("StatefulSet aenv-redis: FailedCreate", "RayCluster aenv: FailedToCreate"):
        assert owner in str(caught.value)
    assert "exceeded quota: team" in str(caught.value)


def submit(emulated: EmulatedCluster, **changes: Any) -> dict[str, Any]:
    """Submit the sample run; return the RayJob as KubeRay leaves it."""
    (job,) = yaml_files.read(manifests.bundled() / "samples" / "sampling-run.yaml")
    del job["metadata"]["generateName"]
    job["metadata"] |= {"name": "run", "namespace": "aenv"}
    job["spec"] |= changes
    with httpx.Client(base_url=emulated.url) as client:
        client.post("/apis/ray.io/v1/namespaces/aenv/rayjobs", json=job).raise_for_status()
    return one(emulated, "RayJob", "run")


def test_a_sampling_run_leaves_the_cluster_ready(emulated, life, api):
    """The completed pod of its submitter stays, and no part of the cluster is missing."""
    life.apply(manifests.load("dev"))
    assert submit(emulated)["status"]["jobDeploymentStatus"] == "Complete"
    assert one(emulated, "Pod", "run-submitter-0")["status"]["phase"] == "Succeeded"
    assert life.await_ready(0.0).problems() == []
    with edited(emulated, "Pod", "run-submitter-0") as pod:
        pod["status"]["phase"] = "Failed"
    assert life.await_ready(0.0).problems() == []
    found = {f.name: f.verdict for f in Doctor(api, "aenv", manifests.load("dev")).findings()}
    assert found["cluster"] is Verdict.OK


def test_kuberay_acts_on_no_run_that_has_a_time_to_live_in_a_shared_cluster(emulated, life):
    life.apply(manifests.load("dev"))
    job = submit(emulated, ttlSecondsAfterFinished=3600)
    assert job["status"]["jobDeploymentStatus"] == "ValidationFailed"
    assert not [p for p in all_of(emulated, "Pod") if "submitter" in p["metadata"]["name"]]


def test_a_cluster_that_kuberay_refuses_says_why(emulated, life):
    """The API accepts it, and only an event shows the reason."""
    objects = manifests.load("dev")
    (ray,) = [one for one in objects if one["kind"] == "RayCluster"]
    ray["spec"]["workerGroupSpecs"][0] |= {"minReplicas": 5, "maxReplicas": 4}
    life.apply(objects)
    with pytest.raises(DeadlineExceeded, match="minReplicas 5 greater than maxReplicas 4"):
        life.await_ready(0.0)


def event(
    emulated: EmulatedCluster, name: str, about: tuple[str, str], reason: str, message: str
) -> None:
    add(emulated, {"apiVersion": "v1", "kind": "Event", "type": "Warning", "reason": reason,
                   "metadata": {"name": name, "namespace": "aenv"}, "message": message,
                   "involvedObject": {"kind": about[0], "name": about[1]}})  # fmt: skip


def test_problems_that_only_events_show_are_reported(emulated, life):
    """A pod that is not admitted is in no list, and KubeRay says in no status what is invalid."""
    life.apply(manifests.load("dev"))
    event(emulated, "e1", ("StatefulSet", "aenv-redis"), "FailedCreate", "an older word")
    event(emulated, "e2", ("StatefulSet", "aenv-redis"), "FailedCreate", "exceeded quota: team")
    event(emulated, "e3", ("RayCluster", "aenv"), "InvalidRayClusterSpec", "no such mode")
    event(emulated, "e4", ("Pod", "long-gone"), "FailedMount", "no such secret")
    event(emulated, "e5", ("StatefulSet", "aenv-redis"), "Unhealthy", "of no weight")
    assert life.await_ready(LONG_S).problems() == []  # what is ready has no complaint
    with edited(emulated, "RayCluster", "aenv") as ray:
        ray["metadata"]["generation"], ray["status"]["observedGeneration"] = 2, 1
    with edited(emulated, "Pod", "headgroup-0") as pod:
        pod["status"]["conditions"] = []
    lacks = life.snapshot().problems()
    assert "StatefulSet aenv-redis: FailedCreate: exceeded quota: team" in lacks
    assert "RayCluster aenv: InvalidRayClusterSpec: no such mode" in lacks
    assert not [line for line in lacks if "long-gone" in line or "of no weight" in line]
    with edited(emulated, "RayCluster", "aenv") as ray:
        ray["status"]["observedGeneration"] = 2
    assert "InvalidRayClusterSpec" not in " ".join(life.snapshot().problems())
    emulated.denied.add(("list", "events"))
    assert "exceeded quota" not in " ".join(life.snapshot().problems())


def test_a_throttled_request_is_repeated_and_a_refusal_names_the_permission(
    emulated, life, monkeypatch
):
    pauses: list[float] = []
    monkeypatch.setattr(cluster_api, "time", SimpleNamespace(sleep=pauses.append))
    emulated.throttle(3)
    life.apply(manifests.load("dev"))
    assert pauses == [1.0, 1.0, 1.0]  # as the API says
    pauses.clear()
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=5), usegmt=True)
    emulated.throttle(1, soon)  # as a load balancer says it
    life.apply(manifests.load("dev"))
    assert 2.0 < pauses[0] < 6.0
    emulated.denied.add(("list", "pods"))
    with pytest.raises(Forbidden, match=r"pods is forbidden: User .* cannot list"):
        life.snapshot()


def test_an_unreachable_api_is_reported(tmp_path):
    from kubernetes.client import Configuration

    connection = cluster_api.ClusterApi(configuration=Configuration(host="http://127.0.0.1:1"))
    with pytest.raises(FabricUnavailable, match="is unreachable"):
        connection.find(KINDS["Pod"])
    connection.close()


def test_without_the_package_it_says_how_to_install_it(monkeypatch):
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("kubernetes"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError) as caught:
        cluster_api.ClusterApi()
    assert caught.value.hint == "install it: pip install 'aenv-ray[kubernetes]'"


# --- changes ------------------------------------------------------------------------------------


def test_scale_sets_the_bounds_of_a_group_and_refuses_invalid_ones(emulated, life):
    life.apply(manifests.load("dev"))
    assert life.scale("kubernetes", 2, 20) | {"pods": 0} == {
        "group": "kubernetes", "min": 2, "max": 20, "slots": "32", "ready": 1, "pods": 0,
    }  # fmt: skip
    assert life.snapshot().groups[0]["ready"] == 2
    assert life.scale("kubernetes", 30, None)["max"] == 30
    with pytest.raises(ConfigError, match="maximum of 1 worker is below the minimum of 2"):
        life.scale("kubernetes", 2, 1)
    with pytest.raises(ConfigError, match="no worker group 'gpu'") as caught:
        life.scale("gpu", 1, 1)
    assert caught.value.hint == "groups: kubernetes"


def test_a_delete_outlasts_requests_that_fail(emulated, life, api, said):
    life.apply(manifests.load("dev"))
    remove = api.delete

    def interrupted(*arguments: Any, **options: Any) -> None:
        remove(*arguments, **options)
        emulated.fail(None, 500)  # whatever comes next

    api.delete = interrupted  # type: ignore[method-assign]
    life.delete(LONG_S, storage=True)
    assert all_of(emulated, "Pod") == all_of(emulated, "Secret") == []
    emulated.fail(None)
    with pytest.raises(FabricUnavailable, match="unreachable"):
        life.delete(LONG_S)


def test_a_wait_for_an_unreachable_api_ends_at_its_deadline(emulated, life):
    life.apply(manifests.load("dev"))
    emulated.fail(500)
    with pytest.raises(FabricUnavailable, match="an internal error occurred"):
        life.await_ready(0.0)


def test_a_worker_that_ends_drains_and_has_time_for_it(emulated, life):
    life.apply(manifests.load("dev", None, {"workers.drainSeconds": "1234"}))
    spec = one(emulated, "Pod", "kubernetes-0")["spec"]
    assert spec["terminationGracePeriodSeconds"] == 1234
    hook = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[:3] == ["aenv", "cluster", "drain"]


# --- machines that are drained ------------------------------------------------------------------


def drained(emulated: EmulatedCluster) -> set[str]:
    """Return the names of the pods that the `kubectl drain` of the run book evicts."""
    book = (ROOT / "docs" / "operations.md").read_text()
    (options,) = re.findall(r"(?m)^kubectl drain NODE (.*)$", book)
    pods = all_of(emulated, "Pod")
    assert drain.refusals(pods, options.split()) == {}
    return drain.evicted(pods, all_of(emulated, "PodDisruptionBudget"))


def add_sandbox(emulated: EmulatedCluster) -> None:
    """Put a pod of an instance there, with the manifest of the engine."""
    uid = one(emulated, "Pod", "kubernetes-0")["metadata"]["uid"]
    config = EnvironmentConfig(name="made")
    spec = SandboxSpec(InstanceId("made-abcdefgh"), Path("/p"), config, 1000.0)
    plan = PodPlan(
        name="aenv-made", host_id="h", owner=OwnerPod("kubernetes-0", uid, "ray:2"), nonce="n",
        settings=PodSettings(), secret_digest="d", image="python:3.12",
    )  # fmt: skip
    pod = pod_manifest(spec, plan, now=0.0)
    pod["metadata"]["namespace"] = "aenv"
    ended = {"name": "unpacker", "state": {"terminated": {"exitCode": 0}}}
    add(emulated, pod | {"status": {"phase": "Running", "containerStatuses": [ended]}})


def test_kubectl_drains_a_machine_with_the_options_of_the_run_book(emulated, life):
    """Workers drain by their hooks; budgets keep it from evicting what is used by others."""
    life.apply(manifests.load("production"))
    add_sandbox(emulated)
    refused = drain.refusals(all_of(emulated, "Pod"), ())
    assert {"headgroup-0", "kubernetes-0", "aenv-redis-0", "aenv-made"} <= refused.keys()
    assert drained(emulated) == {"kubernetes-0", "kubernetes-1"}


def test_kubectl_evicts_sandboxes_where_no_budget_keeps_them(emulated, life):
    """As the run book says of `dev`."""
    life.apply(manifests.load("dev"))
    add_sandbox(emulated)
    assert "aenv-made" in drained(emulated)


# --- down ---------------------------------------------------------------------------------------


def sandbox(emulated: EmulatedCluster, name: str) -> None:
    owner = one(emulated, "Pod", "kubernetes-0")["metadata"]["uid"]
    labels = {"app.kubernetes.io/part-of": "aenv-ray", "app.kubernetes.io/component": "sandbox"}
    add(emulated, {"apiVersion": "v1", "kind": "Pod", "spec": {}, "status": {"phase": "Running"},
                   "metadata": {"name": name, "namespace": "aenv", "labels": labels,
                                "ownerReferences": [{"uid": owner}]}})  # fmt: skip


def test_delete_leaves_no_pod_and_keeps_what_was_stored(emulated, life):
    life.apply(manifests.load("production"))
    sandbox(emulated, "aenv-one")
    assert len(life.snapshot().sandboxes) == 1
    kept = life.delete(LONG_S)
    left = {name: count for name, count in counts(emulated).items() if count}
    assert left == {"Namespace": 1, "Secret": 3, "PersistentVolumeClaim": 2,
                    "Node": 1, "StorageClass": 1, "Deployment": 1}  # fmt: skip
    assert sorted(kept) == [
        "PersistentVolumeClaim aenv-artifacts", "PersistentVolumeClaim data-aenv-redis-0",
        "Secret aenv-admin", "Secret aenv-redis", "Secret aenv-registry",
    ]  # fmt: skip
    assert emulated.controllers.redis_outlived_ray
    life.apply(manifests.load("production"))
    assert life.await_ready(LONG_S).head is not None


def test_delete_with_storage_keeps_nothing_and_is_idempotent(emulated, life):
    life.apply(manifests.load("dev"))
    assert life.delete(LONG_S, storage=True) == []
    assert life.delete(LONG_S, storage=True) == []
    assert not all_of(emulated, "PersistentVolumeClaim")
    assert not all_of(emulated, "Secret")


def test_policies_outlive_the_pods_they_are_for(emulated, life):
    life.apply(manifests.load("dev"))
    emulated.calls.clear()
    life.delete(LONG_S)
    deleted = [plural for verb, plural in emulated.calls if verb == "delete"]
    assert deleted.index("rayclusters") < deleted.index("statefulsets")
    assert deleted.index("statefulsets") < deleted.index("networkpolicies")


def test_priority_classes_stay_for_clusters_in_other_namespaces(emulated, life, said):
    life.apply(manifests.load("dev"))
    other = manifests.load("dev", None, {"namespace": "other"})
    second = lifecycle.Lifecycle(life._api, "other", said.append, pause=lambda _: None)
    second.apply(other)
    life.delete(LONG_S)
    assert len(all_of(emulated, "PriorityClass")) == 3
    assert second.await_ready(LONG_S).head is not None
    second.delete(LONG_S)
    assert not all_of(emulated, "PriorityClass")


def test_a_delete_that_hangs_names_what_it_waits_for(emulated, life):
    life.apply(manifests.load("dev"))
    emulated.controllers.is_operator_running = False
    with pytest.raises(DeadlineExceeded, match=r"RayCluster aenv: waits for ray.io/gcs-ft"):
        life.delete(0.0)
    assert all_of(emulated, "StatefulSet")  # Redis stays for KubeRay to clean up


def test_another_namespaces_objects_and_a_users_own_stay(emulated, life):
    life.apply(manifests.load("dev"))
    mine = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "mine", "namespace": "aenv"},
    }
    add(emulated, mine)
    life.delete(LONG_S, storage=True)
    assert [body["metadata"]["name"] for body in all_of(emulated, "Service")] == ["mine"]


# --- permissions --------------------------------------------------------------------------------


def test_the_doctor_checks_the_permissions_of_apply_and_delete(emulated, life):
    """Every call is a listed permission, and every listed one is used."""

    def used() -> set[tuple[str, str]]:
        return set(emulated.calls)

    life.apply(manifests.load("production"), dry_run=True)
    life.apply(manifests.load("production"))
    life.await_ready(LONG_S)
    asked = used()
    listed = {(p.verb, p.resource) for p in cluster_api.APPLY}
    assert asked <= listed
    # Server-side apply is a patch, and of what is not there yet a create.
    assert {pair for pair in listed - asked if pair[0] != "create"} == set()
    sandbox(emulated, "aenv-one")
    with edited(emulated, "Pod", "aenv-one") as pod:
        pod["metadata"]["ownerReferences"] = []
    add(
        emulated,
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": {
                "name": "run",
                "namespace": "aenv",
                "labels": {"app.kubernetes.io/part-of": "aenv-ray"},
            },
        },
    )
    emulated.calls.clear()
    life.delete(LONG_S, storage=True)
    known = {(p.verb, p.resource) for p in cluster_api.DELETE}
    assert used() - listed <= known
    assert known - used() == set()


def test_the_doctor_names_the_permission_kind_quota_class_and_node(emulated, api):
    def state(name: str) -> tuple[Verdict, str]:
        found = {f.name: f for f in Doctor(api, "aenv", manifests.load("dev")).findings()}
        return found[name].verdict, found[name].found

    for name in ("API", "KubeRay", "operator", "permissions", "grants", "storage", "quota"):
        assert state(name)[0] is Verdict.OK, state(name)
    assert state("cluster") == (Verdict.OK, "none in namespace aenv yet")

    emulated.denied |= {("create", "poddisruptionbudgets"), ("watch", "pods")}
    assert state("permissions") == (
        Verdict.FAILED, "missing in namespace aenv: create poddisruptionbudgets.policy",
    )  # fmt: skip
    assert state("grants") == (Verdict.FAILED, "missing in namespace aenv: watch pods")

    with edited(emulated, "StorageClass", "standard") as storage_class:
        storage_class["metadata"]["annotations"] = {}
    assert state("storage") == (Verdict.FAILED, "no StorageClass is the default")

    add(emulated, {"apiVersion": "v1", "kind": "ResourceQuota",
                   "metadata": {"name": "team", "namespace": "aenv"},
                   "spec": {"hard": {"requests.memory": "4Gi", "pods": "10"}}})  # fmt: skip
    found = state("quota")
    assert found[0] is Verdict.FAILED
    assert "ResourceQuota team: requests.memory is 4Gi, and the smallest cluster needs" in found[1]

    with edited(emulated, "Node", "one") as node:
        node["status"]["allocatable"]["memory"] = "1Gi"
    assert state("nodes")[0] is Verdict.FAILED
    assert "the largest node has 1.0Gi" in state("nodes")[1]

    emulated.denied.add(("list", "nodes"))
    assert state("nodes")[0] is Verdict.WARNING
    emulated.controllers.has_kuberay = False
    assert state("KubeRay")[0] is Verdict.FAILED


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"phase": "Pending"}, "it is starting"),
        ({"phase": "Running"}, "it is running, but not ready"),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on memory"},
         "it failed: Evicted: low on memory"),
        ({"phase": "Failed", "containerStatuses": [
            {"state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}]},
         "it failed: OOMKilled: exit code 137"),
        ({"phase": "Pending", "conditions": [
            {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: 3 too small"}]},
         "no node is suitable: 0/3 nodes: 3 too small"),
        ({"phase": "Pending", "initContainerStatuses": [
            {"state": {"waiting": {"reason": "ErrImagePull", "message": "no such\nimage"}}}]},
         "ErrImagePull: no such image"),
    ],
)  # fmt: skip
def test_the_reason_why_a_pod_is_not_ready_is_readable(status, words):
    assert why({"metadata": {"name": "p"}, "status": status}) == words


def test_a_cluster_is_ready_while_the_claim_of_a_service_is_pending():
    def told(component):
        labels = {"app.kubernetes.io/component": component}
        claim = {"kind": "PersistentVolumeClaim", "metadata": {"name": "kept", "labels": labels}}
        return any(claim["kind"] in text for text in Snapshot(None, None, [], [claim]).problems())

    assert not told("storage")
    assert told("artifacts")
