"""The decisions of the kubernetes engine: specs, causes, refusals, networks, proofs."""

from __future__ import annotations

import ast
import base64
import importlib.util
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from aenv_ray.config import Settings
from aenv_ray.engines.base import SandboxSpec
from aenv_ray.engines.images.serving import Serving
from aenv_ray.engines.kubernetes import manifest, names, pod_status
from aenv_ray.engines.kubernetes.boot import main_request, sidecar_request
from aenv_ray.engines.kubernetes.client import ApiRefused
from aenv_ray.engines.kubernetes.manifest import pod_manifest
from aenv_ray.engines.kubernetes.permissions import Access
from aenv_ray.engines.kubernetes.plan import PodPlan, limits_egress, network_mode, selects
from aenv_ray.engines.kubernetes.settings import OwnerPod, PodSettings, parse_pairs
from aenv_ray.engines.node.host_key import HostKey
from aenv_ray.errors import (
    CapacityExceeded,
    ConfigError,
    FabricUnavailable,
    InsideCause,
    SandboxStartFailed,
)
from aenv_ray.ids import InstanceId
from aenv_ray.project.config import EnvironmentConfig, NetworkMode
from aenv_ray.runtime.container.pod import ENDED_BY_SIGTERM
from aenv_ray.runtime.container.pod_log import KEEP_BYTES, LIMIT_BYTES, PodLog
from aenv_ray.runtime.fork.jail_spec import DEFAULT_STORAGE_BYTES
from tests.emulators.kubernetes.rules import check_schema, violations
from tests.emulators.kubernetes.validation import check_pod

NOW = 1_000_000.0


def spec_of(**deploy: Any) -> SandboxSpec:
    config = EnvironmentConfig.model_validate({"name": "made", "deployConfig": deploy})
    return SandboxSpec(
        instance_id=InstanceId("made-1"), project_dir=Path("/p"), config=config,
        deadline=NOW + 600.0, environment_variables={"TOKEN": "hunter2"},
    )  # fmt: skip


def lasting_of(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the containers that run as long as a pod does."""
    found = [c for c in pod["spec"]["containers"] if c["name"] != names.UNPACKER_CONTAINER]
    assert len(found) == len(pod["spec"]["containers"]) - 1
    return found


def plan_of(settings: PodSettings | None = None, **fields: Any) -> PodPlan:
    facts: dict[str, Any] = {
        "name": "aenv-1", "host_id": "host-1", "owner": OwnerPod("ray-1", "uid-1", "ray:2"),
        "settings": settings or PodSettings(), "nonce": "n", "secret_digest": "d",
        "image": "python:3.12",
    }  # fmt: skip
    return PodPlan(**(facts | fields))


# --- specs ----------------------------------------------------------------------------------------


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


# --- causes ---------------------------------------------------------------------------------------


def pod_with(state: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    containers = [{"name": "instance", "resources": {"limits": {"memory": str(64 << 20)}}}]
    rows = [] if state is None else [{"name": "instance", "image": "i:1", "state": state}]
    return {
        "metadata": {"name": "p", "uid": "u"},
        "spec": {"containers": containers},
        "status": {"containerStatuses": rows, **status},
    }


LEFT = json.dumps(
    {"cause": "its main process exited with code 3", "log": base64.b64encode(b"bye\n").decode()}
)


@pytest.mark.parametrize(
    ("pod", "words"),
    [
        (pod_with({"terminated": {"reason": "OOMKilled", "exitCode": 137}}), "limit 64 MiB"),
        (pod_with({"terminated": {"exitCode": 137}}), "SIGKILL"),
        (pod_with({"terminated": {"exitCode": 3, "message": LEFT}}), "code 3; the end of its log"),
        (pod_with(reason="DeadlineExceeded"), "its TTL passed"),
        (pod_with(reason="Evicted", message="low on memory"), "evicted it: low on memory"),
        (pod_with(reason="NodeLost", message="gone"), "its node was lost: gone"),
        (pod_with(conditions=[{"type": "DisruptionTarget", "status": "True",
                               "reason": "DeletionByTaintManager", "message": "m"}]),
         "its node no longer answers"),
        (pod_with(conditions=[{"type": "DisruptionTarget", "status": "True",
                               "reason": "PreemptionByScheduler"}]), "higher priority"),
        (pod_with(), "deleted by someone other than its host"),
    ],
)  # fmt: skip
def test_an_end_has_a_cause_in_words(pod: dict[str, Any], words: str) -> None:
    """Invariant 2."""
    assert words in str(pod_status.end_cause(pod))


def with_unpacker(pod: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    pod["spec"]["containers"].append({"name": "unpacker"})
    row = {"name": "unpacker", "image": "i:1", "state": state}
    pod["status"]["containerStatuses"].append(row)
    pod["status"].update(phase="Running", podIP="10.0.0.7")
    return pod


DONE = {"terminated": {"exitCode": 0, "reason": "Completed"}}


def test_the_end_of_the_unpacker_is_not_that_of_its_pod() -> None:
    pod = with_unpacker(pod_with({"running": {}}), DONE)
    assert not pod_status.is_over(pod)
    assert pod_status.address(pod) == "10.0.0.7"
    assert pod_status.start_failure(pod, "made-1") is None
    ended = with_unpacker(pod_with({"terminated": {"exitCode": 3, "message": LEFT}}), DONE)
    assert pod_status.is_over(ended)
    assert "code 3; the end of its log" in str(pod_status.end_cause(ended))


def test_a_pod_whose_files_cannot_be_unpacked_does_not_start() -> None:
    state = {"terminated": {"exitCode": 1, "message": "No space left on device"}}
    failure = pod_status.start_failure(with_unpacker(pod_with({"running": {}}), state), "made-1")
    assert isinstance(failure, SandboxStartFailed)
    assert "cannot be unpacked: exit code 1 No space left" in failure.message


def test_an_image_without_python_lacks_it_in_the_unpacker_too() -> None:
    """The node may try that one first."""
    message = 'exec: "python3": executable file not found in $PATH'
    state = {"terminated": {"reason": "StartError", "exitCode": 128, "message": message}}
    pod = with_unpacker(pod_with({"waiting": {"reason": "ContainerCreating"}}), state)
    assert isinstance(pod_status.start_failure(pod, "made-1"), pod_status.UnsuitableImage)


@pytest.mark.parametrize(
    ("pod", "inside"),
    [
        (pod_with(reason="Evicted", message="The node was low on resource: ephemeral-storage."),
         None),
        (pod_with(reason="Evicted",
                  message="Pod ephemeral local storage usage exceeds the total limit of "
                          "containers 64Mi. "), InsideCause.DISK),
        (pod_with(reason="Evicted",
                  message='Usage of EmptyDir volume "work" exceeds the limit "64Mi". '),
         InsideCause.DISK),
        (pod_with({"terminated": {"reason": "OOMKilled", "exitCode": 137, "message": LEFT}}),
         InsideCause.MEMORY),
        (pod_with({"terminated": {"exitCode": 137}}), None),
        (pod_with({"terminated": {"exitCode": 1, "message": "[" * 100_000}}), InsideCause.EXIT),
        (pod_with(reason="NodeLost"), None),
    ],
)  # fmt: skip
def test_ends_from_inside_are_told_from_losses(
    pod: dict[str, Any], inside: InsideCause | None
) -> None:
    """Invariant 14: a process inside can write the message of its container before it dies."""
    assert pod_status.end_cause(pod).inside is inside


def test_the_message_of_a_container_that_was_killed_is_not_believed() -> None:
    """Process 1 had no time to write it, but any process of the container had."""
    cause = pod_status.end_cause(pod_with({"terminated": {"exitCode": 137, "message": LEFT}}))
    assert cause.text == "its main process was killed by SIGKILL"


def test_a_sigterm_is_from_outside_only_if_the_api_shows_a_reason() -> None:
    """Invariants 2 and 14: who sent it cannot be told in the pod."""
    left = json.dumps({"cause": ENDED_BY_SIGTERM, "inside": None, "log": ""})
    ended = {"terminated": {"exitCode": 0, "message": left}}
    unexplained = pod_status.unexplained_end(pod_with(ended))
    assert unexplained is not None
    assert unexplained.inside is InsideCause.SIGNAL
    deleted = pod_with(ended)
    deleted["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    disrupted = [{"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}]
    for pod in (
        deleted,
        pod_with(ended, reason="Terminated"),
        pod_with(ended, conditions=disrupted),
    ):
        assert pod_status.unexplained_end(pod) is None
        assert pod_status.end_cause(pod).inside is None
    exited = {"terminated": {"exitCode": 3, "message": LEFT}}
    assert pod_status.unexplained_end(pod_with(exited)) is None


@pytest.mark.parametrize(
    ("limit", "words"), [("524288k", "500 MiB"), ("2Gi", "2048 MiB"), ("much", "much")]
)
def test_a_memory_limit_is_one_however_the_api_writes_it(limit: str, words: str) -> None:
    """Invariant 14: the API writes 524288000 as 524288k, and a webhook as it likes."""
    pod = pod_with({"terminated": {"reason": "OOMKilled", "exitCode": 137}})
    pod["spec"]["containers"][0]["resources"]["limits"]["memory"] = limit
    cause = pod_status.end_cause(pod)
    assert cause.inside is InsideCause.MEMORY
    assert f"limit {words}" in cause.text


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"waiting": {"reason": "ImagePullBackOff", "message": "Back-off"}}, "cannot be pulled"),
        ({"waiting": {"reason": "ErrImagePull", "message": "i:1: not found"}}, "does not exist"),
        ({"waiting": {"reason": "InvalidImageName"}}, "InvalidImageName"),
        ({"waiting": {"reason": "CreateContainerConfigError", "message": "no secret"}},
         "no secret"),
        ({"terminated": {"reason": "StartError", "exitCode": 128, "message": "bad"}}, "bad"),
    ],
)  # fmt: skip
def test_a_start_that_cannot_be_is_said(state: dict[str, Any], words: str) -> None:
    failure = pod_status.start_failure(pod_with(state), "made-1")
    assert isinstance(failure, SandboxStartFailed)
    assert words in failure.message
    assert failure.instance_id == "made-1"


def test_a_python_that_nobody_may_start_names_the_user_to_set() -> None:
    message = 'exec: "python3": permission denied'
    state = {"terminated": {"reason": "StartError", "exitCode": 128, "message": message}}
    failure = pod_status.start_failure(pod_with(state), "made-1")
    assert isinstance(failure, SandboxStartFailed)
    assert "deployConfig.container.user" in str(failure.hint)


@pytest.mark.parametrize(
    "state",
    [
        {"waiting": {"reason": "ContainerCreating"}},
        {"waiting": {"reason": "ErrImagePull", "message": "i/o timeout"}},
        {"running": {}},
    ],
)
def test_what_may_still_come_is_no_failure(state: dict[str, Any]) -> None:
    assert pod_status.start_failure(pod_with(state), "made-1") is None


@pytest.mark.parametrize(
    "message",
    [
        'exec: "python3": executable file not found in $PATH',
        'finding executable "python3" in PATH: no such file or directory',
        "Failed to exec python3: ENOENT: No such file or directory",
    ],
)
def test_an_image_without_python_is_known_by_its_error(message: str) -> None:
    state = {"terminated": {"reason": "StartError", "exitCode": 128, "message": message}}
    assert isinstance(
        pod_status.start_failure(pod_with(state), "made-1"), pod_status.UnsuitableImage
    )


def test_a_pod_is_reachable_when_all_its_containers_run() -> None:
    assert pod_status.address(pod_with({"running": {}}, podIP="10.1.2.3")) == "10.1.2.3"
    assert pod_status.address(pod_with({"waiting": {}}, podIP="10.1.2.3")) is None
    assert pod_status.address(pod_with({"running": {}})) is None


@pytest.mark.parametrize(
    ("status", "message", "error", "words"),
    [
        (403, 'pods is forbidden: User "u" cannot create resource "pods"', FabricUnavailable,
         "may not create pods in namespace aenv"),
        (403, 'pods "p" is forbidden: exceeded quota: q, used: pods=2', CapacityExceeded,
         "has no room"),
        (403, 'pods "p" is forbidden: violates PodSecurity', ConfigError, "refuses its pod"),
        (422, "Pod is invalid", SandboxStartFailed, "Pod is invalid"),
        (401, "Unauthorized", FabricUnavailable, "may not create pods"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_it_means(
    status: int, message: str, error: type[Exception], words: str
) -> None:
    refused = ApiRefused(Access.CREATE_POD, status, "Forbidden", message)
    found = pod_status.error_of(refused, "aenv", "made-1")
    assert type(found) is error
    assert words in found.message
    assert message in found.message


# --- networks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selector", "holds"),
    [
        ({}, True),
        ({"matchLabels": {"a": "1"}}, True),
        ({"matchLabels": {"a": "2"}}, False),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["1"]}]}, True),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["1"]}]}, False),
        ({"matchExpressions": [{"key": "b", "operator": "Exists"}]}, False),
        ({"matchExpressions": [{"key": "b", "operator": "DoesNotExist"}]}, True),
    ],
)
def test_selectors_are_those_of_kubernetes(selector: dict[str, Any], holds: bool) -> None:
    assert selects(selector, {"a": "1"}) is holds


def test_only_a_policy_for_what_goes_out_keeps_a_network() -> None:
    selector = {"matchLabels": {names.NETWORK: "none"}}
    inward = {"spec": {"podSelector": selector, "policyTypes": ["Ingress"]}}
    outward = {"spec": {"podSelector": selector, "policyTypes": ["Egress"]}}
    labels = names.labels("uid", "host", NetworkMode.NONE)
    assert not limits_egress([inward], labels)
    assert limits_egress([inward, outward], labels)
    assert not limits_egress([outward], names.labels("uid", "host", NetworkMode.INTERNET))


@pytest.mark.parametrize("mode", ["host", "allowlist"])
def test_a_network_that_pods_do_not_have_is_refused(mode: str) -> None:
    allow = {"allow": ["pypi.org:443"]} if mode == "allowlist" else {}
    with pytest.raises(ConfigError, match=mode):
        network_mode(spec_of(network=mode, **allow).config)


# --- settings, keys, logs -------------------------------------------------------------------------


def test_pod_settings_come_from_settings(tmp_path: Path) -> None:
    settings = Settings(
        data_dir=tmp_path, runtime_dir=tmp_path, docker_config=tmp_path,
        kubernetes_node_selector="pool=a, disk=ssd", kubernetes_pull_secrets="x,y",
        kubernetes_life="2h", kubernetes_requests=0.5, pod_name="ray-1",
    )  # fmt: skip
    found = PodSettings.of(settings)
    assert found.node_selector == {"pool": "a", "disk": "ssd"}
    assert found.pull_secrets == ("x", "y")
    assert found.requests_share == 0.5
    assert (found.longest_life_s, found.pod_name) == (7200.0, "ray-1")
    with pytest.raises(ConfigError, match="SETTING"):
        parse_pairs("pool", "SETTING")


def test_hosts_of_one_pod_have_one_key_and_others_another(tmp_path: Path) -> None:
    keys = [HostKey(tmp_path / name / "key") for name in ("a", "a", "b")]
    for key in keys:
        key.load()
    first, same, other = (key.secret("pod", "nonce", "boot") for key in keys)
    assert first == same != other
    assert first != keys[0].secret("pod", "nonce", "8070")
    assert (tmp_path / "b" / "key").stat().st_mode & 0o777 == 0o600


def test_a_log_keeps_its_end_and_says_what_is_gone() -> None:
    """Invariant 12."""
    log = PodLog()
    log.add(b"x" * LIMIT_BYTES)
    log.add(b"end\n")
    log.end()
    first, content = log.read(None, follow=False)
    gone = LIMIT_BYTES + 4 - KEEP_BYTES
    assert first == f"[log cut: the first {gone} bytes are gone]\n".encode()
    assert len(content) == KEEP_BYTES
    assert b"".join(log.read(1, follow=False)).endswith(b"end\n")


def test_a_reader_that_is_too_slow_is_told_what_it_missed() -> None:
    """Invariant 12."""
    log = PodLog()
    log.add(b"first\n")
    pieces = log.read(None, follow=True)
    assert next(pieces) == b"first\n"
    writer = threading.Thread(target=lambda: (log.add(b"y" * (LIMIT_BYTES + 1)), log.end()))
    writer.start()
    writer.join()
    rest = b"".join(pieces)
    assert rest.startswith(b"[log cut: ")
    assert len(rest) > KEEP_BYTES
