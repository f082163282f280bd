"""The manifests of pods: limits, mounts, users, and what they do not have."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from aenv_ray.config import Settings
from aenv_ray.engines.base import SandboxSpec
from aenv_ray.engines.images.serving import Serving
from aenv_ray.engines.kubernetes import manifest, names, pod_status
from aenv_ray.engines.kubernetes.boot import main_request, sidecar_request
from aenv_ray.engines.kubernetes.manifest import pod_manifest
from aenv_ray.engines.kubernetes.settings import PodSettings
from aenv_ray.errors import (
    ConfigError,
    InsideCause,
)
from aenv_ray.project.config import NetworkMode
from aenv_ray.runtime.fork.jail_spec import DEFAULT_STORAGE_BYTES
from tests.emulators.kubernetes.rules import check_schema, violations
from tests.emulators.kubernetes.validation import check_pod
from tests.unit.engines.kubernetes.pods import NOW, lasting_of, plan_of, pod_with, spec_of


@pytest.mark.parametrize(
    ("deploy", "fields"),
    [
        ({}, {}),
        ({"cpu": 2, "memory": "2G", "ephemeralStorage": "1G"}, {"nodes": ("node-1", "node-2")}),
        ({"container": {"readOnlyRoot": True, "user": "1000:100"}}, {"sidecar_image": "debian:12",
         "carrier_image": "ray:2"}),
        ({}, {"serving": Serving.COMMANDS, "carrier_image": "ray:2",
         "settings": PodSettings(node_selector={"pool": "a"}, pull_secrets=("s",),
                                 priority_class="low", runtime_class="gvisor",
                                 user_namespaces=True)}),
    ],
    ids=["plain", "limits", "two containers", "settings"],
)  # fmt: skip
def test_pods_fit_the_schema_and_the_restricted_level(
    deploy: dict[str, Any], fields: dict[str, Any]
) -> None:
    body = pod_manifest(spec_of(**deploy), plan_of(**fields), NOW)
    check_schema(body)
    assert violations(body["spec"]) == []
    assert body["spec"]["automountServiceAccountToken"] is False
    (owner,) = body["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Pod", "uid-1")


@pytest.mark.parametrize(
    ("deploy", "most"),
    [({}, 4 << 30), ({"ephemeralStorage": "64M"}, 64 << 20),
     ({"container": {"readOnlyRoot": True}}, DEFAULT_STORAGE_BYTES)],
)  # fmt: skip
def test_files_of_a_pod_are_limited_with_its_storage(deploy: dict[str, Any], most: int) -> None:
    """Invariant 7: those that the kubelet mounts, writable and outside every volume, included."""
    spec, plan = spec_of(**deploy), plan_of(sidecar_image="debian:12")
    for request_of in (main_request, sidecar_request):
        message, _ = request_of(spec, plan, b"k", 60.0)
        assert message["file_bytes"] == most + 4096
    body = pod_manifest(spec, plan, NOW)["spec"]
    assert all("sizeLimit" in volume["emptyDir"] for volume in body["volumes"])


KUBERAY = Path(__file__).parents[4] / "clusters/kuberay"


def test_the_image_is_checked_for_the_module_that_init_containers_run() -> None:
    body = pod_manifest(spec_of(), plan_of(carrier_image="ray:2", serving=Serving.COMMANDS), NOW)
    (carrier,) = [c for c in body["spec"]["initContainers"] if c["name"] == names.CARRIER_CONTAINER]
    module = carrier["command"][carrier["command"].index("-m") + 1]
    assert importlib.util.find_spec(module) is not None
    assert f'"import {module}"' in (KUBERAY / "image/Dockerfile").read_text()


ADMISSION = KUBERAY / "admission/sandbox-pods.yaml"


def test_a_pod_is_what_the_admission_policy_for_workers_admits() -> None:
    """Invariant 10: workers can create pods, but none with a Secret of the namespace."""
    policy, binding = yaml.safe_load_all(ADMISSION.read_text())
    for document in (policy, binding):
        check_schema(document)
    words = " ".join(rule["expression"] for rule in policy["spec"]["validations"])
    for field in ("volumes", "envFrom", "automountServiceAccountToken", "hostNetwork", "hostPID"):
        assert f".{field}" in words
    plan = plan_of(sidecar_image="debian:12", carrier_image="ray:2")
    body = pod_manifest(spec_of(ephemeralStorage="1G"), plan, NOW)
    assert body["metadata"]["labels"]["app.kubernetes.io/component"] == "sandbox"
    spec = body["spec"]
    assert {key for volume in spec["volumes"] for key in volume} == {"name", "emptyDir"}
    containers = [*spec["containers"], *spec["initContainers"]]
    values = [v.get("valueFrom") for c in containers for v in c.get("env", ())]
    assert all(value is None or set(value) == {"fieldRef"} for value in values)
    assert not any("envFrom" in container for container in containers)
    assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & set(spec)


def test_no_variable_of_an_instance_is_in_its_pod() -> None:
    """Invariant 10."""
    body = pod_manifest(spec_of(environmentVariables={"KEY": "swordfish"}), plan_of(), NOW)
    assert "hunter2" not in json.dumps(body)
    assert "swordfish" not in json.dumps(body)


@pytest.mark.parametrize(("ttl_s", "life_s"), [(600.0, 86_460), (100_000.0, 100_060)])
def test_a_pod_may_live_as_long_as_renewals_can_move_its_deadline(
    ttl_s: float, life_s: int
) -> None:
    spec = spec_of()
    longer = SandboxSpec(spec.instance_id, spec.project_dir, spec.config, NOW + ttl_s)
    assert pod_manifest(longer, plan_of(), NOW)["spec"]["activeDeadlineSeconds"] == life_s


def test_process_1_begins_on_any_python_3() -> None:
    """An option that an old one does not know would end it before it told its version."""
    for container in pod_manifest(spec_of(), plan_of(), NOW)["spec"]["containers"]:
        assert container["command"][:2] == ["python3", "-c"]
        script = ast.parse(container["command"][2], feature_version=(3, 5))
        assert isinstance(script.body[1], ast.Assign)  # of sys.path, before any other import


def mounts_of(container: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    """Return path and writability of a container's mounts, by volume."""
    return {
        mount["name"]: (mount["mountPath"], not mount.get("readOnly"))
        for mount in container["volumeMounts"]
    }


@pytest.mark.parametrize("user", ["root", "1000"])
def test_what_an_agent_may_write_to_is_no_code_and_no_file_of_the_project(user: str) -> None:
    """Invariant 14: of all that is mounted into the containers in which its commands run."""
    spec = spec_of(container={"user": user, "readOnlyRoot": True, "capAdd": ["CHOWN"]})
    plan = plan_of(sidecar_image="debian:12", carrier_image="ray:2", serving=Serving.COMMANDS)
    pod = pod_manifest(spec, plan, NOW)
    main, sidecar = map(mounts_of, lasting_of(pod))
    assert (main["home"], main["project"]) == (("/.aenv", False), ("/project", False))
    assert sidecar["sidecar-home"] == ("/.aenv", False)
    writable = {name for mounts in (main, sidecar) for name in mounts if mounts[name][1]}
    assert writable == {"work", "memory", "shared", "tmp", "sidecar-tmp"}
    unpacker = pod["spec"]["containers"][-1]
    assert mounts_of(unpacker) == {
        "home": ("/unpacked/instance/.aenv", True),
        "project": ("/unpacked/instance/project", True),
        "sidecar-home": ("/unpacked/sidecar/.aenv", True),
        "carried": ("/.aenv-carried", False),
    }
    assert unpacker["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert unpacker["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_unpacker_reserves_little() -> None:
    """The node keeps its requests for as long as the pod runs."""
    large = {"cpu": 2, "memory": "64Gi", "ephemeralStorage": "100Gi"}
    for deploy, limit, requested in (({}, {}, {}), (large, {"cpu": "2000m"}, {"cpu": "1m"})):
        container = pod_manifest(spec_of(**deploy), plan_of(), NOW)["spec"]["containers"][-1]
        sizes = {"memory": str(128 << 20), "ephemeral-storage": str(16 << 20)}
        assert container["resources"]["limits"] == {**sizes, **limit}
        assert container["resources"]["requests"] == {"memory": str(32 << 20), **requested}


@pytest.mark.parametrize("read_only", [False, True])
def test_every_container_of_a_pod_has_limits_of_memory_and_disk(read_only: bool) -> None:
    """Invariant 14: without, its node may evict it for lack of either, which voids its episode."""
    deploy = {"container": {"readOnlyRoot": read_only}}
    given = Settings(kubernetes_memory="3Gi", kubernetes_disk="5Gi")
    for settings, memory, disk in ((Settings(), 2, 4), (given, 3, 5)):
        plan = plan_of(PodSettings.of(settings), sidecar_image="debian:12", carrier_image="ray:2")
        spec = spec_of(**deploy)
        pod = pod_manifest(spec, plan, NOW)
        check_pod(pod)
        containers = [*lasting_of(pod), *pod["spec"]["initContainers"]]
        assert len(containers) == 3
        volumes = 1 << 30
        for container in containers:
            limits = container["resources"]["limits"]
            assert int(limits["memory"]) == memory << 30
            assert int(limits["ephemeral-storage"]) == (0 if read_only else disk << 30) + volumes
            assert container["resources"]["requests"] == limits
        facts = manifest.isolation(spec, plan)
        assert facts.limits["memory"] == f"{memory << 10} MiB per container (cgroup)"
        assert ("image's directories" in facts.limits) != read_only
        assert not any("memory" in words or "storage" in words for words in facts.missing)
        assert any("inodes" in words for words in facts.missing) != read_only


@pytest.mark.parametrize(("storage", "gib"), [("10Gi", 11), ("1Gi", 2), ("64M", 2)])
def test_the_default_limit_of_memory_has_room_for_the_storage_in_it(storage: str, gib: int) -> None:
    """Otherwise a task that writes less than it may is killed, which counts as its failure."""
    spec, plan = spec_of(ephemeralStorage=storage), plan_of(sidecar_image="debian:12")
    for container in lasting_of(pod_manifest(spec, plan, NOW)):
        assert int(container["resources"]["limits"]["memory"]) == gib << 30
    limits = manifest.isolation(spec, plan).limits
    assert limits["memory"] == f"{gib << 10} MiB per container (cgroup)"
    given = spec_of(ephemeralStorage=storage, memory="1Gi")
    assert manifest.memory_bytes(given.config.deploy, plan.settings) == 1 << 30


def test_a_container_that_names_no_limit_dies_inside_when_it_uses_up_memory() -> None:
    """Invariant 14: the agent could otherwise end an episode that it is losing as void."""
    (container,) = lasting_of(pod_manifest(spec_of(), plan_of(), NOW))
    pod = pod_with({"terminated": {"reason": "OOMKilled", "exitCode": 137}})
    pod["spec"]["containers"] = [container]
    assert pod_status.end_cause(pod).inside is InsideCause.MEMORY


def test_requests_are_limits() -> None:
    body = pod_manifest(spec_of(cpu="500m", memory="1Gi", ephemeralStorage="1Gi"), plan_of(), NOW)
    resources = body["spec"]["containers"][0]["resources"]
    assert resources["requests"] == resources["limits"]
    assert (resources["limits"]["cpu"], resources["limits"]["memory"]) == ("500m", str(1 << 30))


def test_pods_share_what_there_is_where_that_is_wanted() -> None:
    settings = PodSettings(requests_share=0.1)
    deploy = {"cpu": "5m", "memory": "1000M", "ephemeralStorage": "1Gi"}
    body = pod_manifest(spec_of(**deploy), plan_of(settings), NOW)
    check_schema(body)
    check_pod(body)
    resources = body["spec"]["containers"][0]["resources"]
    limits, requests = resources["limits"], resources["requests"]
    assert (limits["cpu"], requests["cpu"]) == ("5m", "1m")
    for resource in ("memory", "ephemeral-storage"):
        assert int(requests[resource]) == int(limits[resource]) // 10
    missing = manifest.isolation(spec_of(**deploy), plan_of(settings)).missing
    assert any("reserves 10% of the limits" in words for words in missing)


def test_a_root_user_is_said_and_a_named_one_refused() -> None:
    security = pod_manifest(spec_of(container={"user": "root"}), plan_of(), NOW)["spec"][
        "containers"
    ][0]
    assert security["securityContext"]["runAsUser"] == 0
    assert security["securityContext"]["runAsNonRoot"] is False
    with pytest.raises(ConfigError, match="accepts only numbers"):
        pod_manifest(spec_of(container={"user": "postgres"}), plan_of(), NOW)


def test_facts_say_that_root_can_change_what_its_rewards_run_on() -> None:
    """Invariant 14: in an image that it may write to, and whose Python answers for rewards."""
    commands = plan_of(serving=Serving.COMMANDS)
    for container, plan, may in (
        ({"user": "0:0"}, plan_of(), True),
        ({"user": "1000"}, plan_of(), False),
        ({"user": "0:0", "readOnlyRoot": True}, plan_of(), False),
        ({"user": "0:0"}, commands, False),
    ):
        missing = manifest.isolation(spec_of(container=container), plan).missing
        assert any("the image's Python" in words for words in missing) is may


def test_facts_say_that_nothing_keeps_a_pods_network() -> None:
    """Invariant 7: what is not enforced is not claimed."""
    open_facts = manifest.isolation(spec_of(network="none"), plan_of())
    assert open_facts.network is NetworkMode.HOST
    assert any("NetworkPolicy" in words for words in open_facts.missing)
    unknown = manifest.isolation(spec_of(), plan_of(is_egress_limited=None))
    assert unknown.network is NetworkMode.HOST
    assert any("unknown" in words for words in unknown.missing)
    kept = manifest.isolation(
        spec_of(network="none"), plan_of(network=NetworkMode.NONE, is_egress_limited=True)
    )
    assert kept.network is NetworkMode.NONE
    assert not any("NetworkPolicy" in words for words in kept.missing)
