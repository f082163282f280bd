"""The manifests of a cluster: the API takes them, and kubectl makes the same of them."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import aenv_ray
from aenv_ray.cluster import kustomize, manifests, objects, settings_check, yaml_files
from aenv_ray.engines.kubernetes.plan import selects
from aenv_ray.errors import ConfigError
from aenv_ray.policy import STRICT
from aenv_ray.runtime.fork.jail_spec import NOBODY
from tests.cluster_schemas import pod_specs, problems
from tests.conftest import require
from tests.emulators.kubernetes.rules import violations

ROOT = Path(__file__).parents[3]
KUBERAY = ROOT / "clusters" / "kuberay"
OVERLAYS = ("dev", "production")
SAMPLE = KUBERAY / "samples" / "sampling-run.yaml"


@cache
def kubectl_refusal() -> str:
    """Return why there is no kubectl to compare with; empty when there is a new one."""
    if shutil.which("kubectl") is None:
        return "kubectl is not installed"
    ran = subprocess.run(
        ["kubectl", "version", "--client"], capture_output=True, text=True, timeout=60, check=False
    )
    match = re.search(r"Kustomize Version: v(\d+)", ran.stdout)
    return "" if match and int(match[1]) >= 5 else f"its kustomize is too old: {ran.stdout}"


def by_kubectl(directory: Path) -> list[dict[str, Any]]:
    require("kubectl", not kubectl_refusal(), kubectl_refusal())
    ran = subprocess.run(
        ["kubectl", "kustomize", str(directory)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return yaml_files.parse(ran.stdout, "kubectl's output")


def as_set(documents: list[dict[str, Any]]) -> dict[str, str]:
    """Return objects by title, as text: ``1`` and ``true`` differ there."""
    texts = {objects.title(d): json.dumps(d, sort_keys=True, indent=1) for d in documents}
    assert len(texts) == len(documents)
    return texts


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An overlay with every component, and with other values than ours."""
    copied = tmp_path_factory.mktemp("everything") / "kuberay"
    manifests.copy_to(copied)
    overlay = copied / "overlays" / "production"
    path = overlay / kustomize.FILE
    path.write_text(path.read_text().replace("  # - ../../", "  - ../../"))
    values = overlay / "values.yaml"
    text = values.read_text()
    for old, new in (
        ("namespace: aenv", "namespace: elsewhere"),
        ('runtimeClass: ""', "runtimeClass: gvisor"),
        ("podSecurity: restricted", "podSecurity: privileged"),
        ("image: aenv-ray:0.1.0  ", "image: registry.example:5000/aenv-ray@sha256:abc  "),
        ("{kubernetes.io/os: linux}", "{kubernetes.io/os: linux, example.com/pool: rays}"),
    ):
        assert old in text
        text = text.replace(old, new)
    values.write_text(text)
    return overlay


def environment_of(pod: dict[str, Any]) -> dict[str, str]:
    """Return the variables of a pod's first container, expanded as Kubernetes does."""
    variables: dict[str, str] = {}
    for entry in pod["containers"][0]["env"]:
        value = str(entry.get("value", ""))
        variables[entry["name"]] = re.sub(
            r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), value
        )
    return variables


def the(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    return next(d for d in documents if (d["kind"], d["metadata"]["name"]) == (kind, name))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_the_same_with_and_without_kubectl(overlay):
    assert as_set(manifests.load(overlay)) == as_set(by_kubectl(KUBERAY / "overlays" / overlay))


def test_components_and_values_of_a_users_own_are_the_same_with_and_without_kubectl(everything):
    ours = manifests.load(str(everything))
    assert as_set(ours) == as_set(by_kubectl(everything))
    groups = the(ours, "RayCluster", "aenv")["spec"]["workerGroupSpecs"]
    assert [group["groupName"] for group in groups] == ["kubernetes", "process", "docker"]
    assert {d["metadata"].get("namespace", "elsewhere") for d in ours} == {"elsewhere"}
    binding = the(ours, "RoleBinding", "aenv-worker")
    assert binding["subjects"][0]["namespace"] == "elsewhere"


def test_only_the_grace_period_bounds_the_drain_of_a_worker(everything):
    """A hook that ended earlier would end the worker, with instances that may go on for longer."""
    for group in the(manifests.load(str(everything)), "RayCluster", "aenv")["spec"][
        "workerGroupSpecs"
    ]:
        hook = group["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert STRICT.max_ttl_s is not None
        assert float(hook[hook.index("--timeout") + 1]) > 10 * STRICT.max_ttl_s


def test_what_is_written_out_is_read_back_the_same(everything):
    documents = manifests.load(str(everything))
    text = yaml_files.dump(documents)
    assert as_set(yaml_files.parse(text, "it")) == as_set(documents)
    assert as_set(list(yaml.safe_load_all(text))) == as_set(documents)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_api_takes_every_object(overlay):
    for document in manifests.load(overlay):
        assert problems(document) == [], objects.title(document)


def test_the_api_takes_the_components_and_the_sample(everything):
    for document in [*manifests.load(str(everything)), *yaml_files.read(SAMPLE)]:
        assert problems(document) == [], document["kind"]


def test_the_check_of_ray_objects_finds_what_it_is_for():
    cluster = the(manifests.load("dev"), "RayCluster", "aenv")
    cluster["spec"]["workerGroupSpec"] = []
    cluster["spec"]["authOptions"]["mode"] = "always"
    cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    assert len(problems(cluster)) == 3


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_all_pods_are_what_restricted_pod_security_takes(overlay):
    documents = manifests.load(overlay)
    namespace = the(documents, "Namespace", "aenv")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for document in [*documents, *yaml_files.read(SAMPLE)]:
        for pod in pod_specs(document):
            assert violations(pod) == []
    cluster = the(documents, "RayCluster", "aenv")
    autoscaler = {"name": "autoscaler", **cluster["spec"]["autoscalerOptions"]}
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    assert violations({**head, "containers": [autoscaler]}) == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_container_asks_for_what_it_needs_and_has_limits(overlay):
    for document in manifests.load(overlay):
        for pod in pod_specs(document):
            for container in [*pod.get("initContainers", []), *pod["containers"]]:
                resources = container["resources"]
                assert set(resources["requests"]) == set(resources["limits"]) == {"cpu", "memory"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_object_holds_a_secret(overlay):
    documents = manifests.load(overlay)
    assert not [d for d in documents if d["kind"] == "Secret"]
    text = yaml_files.dump(documents)
    assert not re.search(
        r"(?i)(password|token): +[^\s]", re.sub(r"\w+Token: (true|false)", "", text)
    )


def test_the_head_runs_no_instance_and_owns_what_has_one_address():
    spec = the(manifests.load("production"), "RayCluster", "aenv")["spec"]
    head = spec["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    ports = {
        p["name"]: p["containerPort"] for p in head["template"]["spec"]["containers"][0]["ports"]
    }
    assert head["rayStartParams"]["metrics-export-port"] == str(ports["metrics"])
    assert len(set(ports.values())) == len(ports)  # KubeRay's own choice is the gateway's port
    command = " ".join(head["template"]["spec"]["containers"][0]["command"])
    assert "ray start" not in command  # else KubeRay leaves its own out
    assert spec["autoscalerOptions"]["version"] == "v2"
    assert spec["gcsFaultToleranceOptions"]["redisAddress"] == "aenv-redis:6379"
    for group in spec["workerGroupSpecs"]:
        assert int(group["resources"]["env_slot"]) > 0
        assert group["labels"]["aenv-ray.io/engine"] == group["groupName"]
        assert group["rayStartParams"] == {}  # KubeRay takes resources in one place alone


def test_rays_autoscaler_knows_what_a_worker_brings():
    """It reads the RayCluster, and not what KubeRay makes of it."""
    from ray.autoscaler._private.kuberay import autoscaling_config

    ray = the(manifests.load("dev"), "RayCluster", "aenv")
    found = autoscaling_config._derive_autoscaling_config_from_ray_cr(ray)
    types = found["available_node_types"]
    assert types[found["head_node_type"]]["resources"]["CPU"] == 0
    assert types["kubernetes"]["resources"]["env_slot"] == 32
    assert (types["kubernetes"]["min_workers"], types["kubernetes"]["max_workers"]) == (1, 3)
    assert found["idle_timeout_minutes"] == 5.0


def test_the_image_that_is_named_is_this_version_with_this_ray():
    from importlib.metadata import version

    if "lowest" in os.environ.get("AENV_TEST_RESOLUTION", ""):
        pytest.skip("the image has the newest Ray, these tests run on the oldest")
    for overlay in OVERLAYS:
        spec = the(manifests.load(overlay), "RayCluster", "aenv")["spec"]
        assert spec["rayVersion"] == version("ray")
        for pod in pod_specs({"kind": "RayCluster", "spec": spec}):
            assert pod["containers"][0]["image"] == f"aenv-ray:{aenv_ray.__version__}"
    dockerfile = (KUBERAY / "image" / "Dockerfile").read_text()
    assert f"rayproject/ray:{version('ray')}-py311" in dockerfile
    assert f"aenv-ray:{aenv_ray.__version__}" in SAMPLE.read_text()


def test_the_image_lets_sandboxes_in_where_its_python_is():
    """Pods run as nobody, and Ray's image has Python in a home that its owner alone may enter."""
    lines = (KUBERAY / "image" / "Dockerfile").read_text().splitlines()
    opened = lines.index("RUN chmod go+rx /home/ray")
    tried = next(n for n, line in enumerate(lines) if line.startswith("RUN python3 -P -c"))
    assert lines.index(f"USER {NOBODY}:{NOBODY}") in range(opened, tried)
    assert lines[-1] == "USER 1000:100"


def test_the_wheel_carries_the_manifests_where_they_are_looked_for():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = config["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    places = {str(KUBERAY.relative_to(ROOT)): str(manifests._PACKAGED.relative_to(ROOT))}
    assert included == places
    assert manifests.bundled() == KUBERAY


def test_values_come_from_a_file_and_from_single_settings(tmp_path):
    values = tmp_path / "mine.yaml"
    values.write_text("spec:\n  workers:\n    maxReplicas: 77\n    envSlots: 5\nkind: Values\n")
    settings = {"workers.minReplicas": "3", "gateway.replicas": "2"}
    settings["redis.resources.limits"] = "{cpu: '9', memory: 1Gi}"
    found = manifests.load("dev", values, settings)
    spec = the(found, "RayCluster", "aenv")["spec"]
    group = spec["workerGroupSpecs"][0]
    assert (group["minReplicas"], group["maxReplicas"]) == (3, 77)
    assert group["resources"]["env_slot"] == "5"
    environment = spec["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "GATEWAY_REPLICAS", "value": "2"} in environment
    redis = the(found, "StatefulSet", "aenv-redis")["spec"]["template"]["spec"]["containers"][0]
    assert redis["resources"]["limits"]["cpu"] == "9"


def test_a_redis_and_an_object_store_elsewhere_are_values():
    values = KUBERAY / "samples" / "redis-tls.yaml"
    settings = {"artifacts.url": "s3://bucket/aenv", "artifacts.secret": "my-store"}
    settings["artifacts.identity"] = "{eks.amazonaws.com/role-arn: 'arn:aws:iam::1:role/aenv'}"
    found = manifests.load("production", values, settings)
    assert the(found, "StatefulSet", "aenv-redis")["spec"]["replicas"] == 0
    spec = the(found, "RayCluster", "aenv")["spec"]
    secret = {"secretKeyRef": {"name": "my-redis", "key": "password"}}
    ray = spec["gcsFaultToleranceOptions"]
    assert ray["redisPassword"] == {"valueFrom": secret}
    assert ray["redisAddress"] == "rediss://redis.example:6380"
    pods = pod_specs({"kind": "RayCluster", "spec": spec})
    for pod in pods:
        container = pod["containers"][0]
        variables = {entry["name"]: entry for entry in container["env"]}
        assert variables["AENV_REDIS_PASSWORD"]["valueFrom"] == secret
        assert variables["AENV_REDIS_URL"]["value"].startswith("rediss://redis.example:6380/1?")
        assert variables["AENV_ARTIFACTS_URL"]["value"] == "s3://bucket/aenv"
        assert container["envFrom"] == [{"secretRef": {"name": "my-store", "optional": True}}]
    (tls,) = [volume for volume in pods[0]["volumes"] if volume["name"] == "redis-tls"]
    assert tls["secret"]["secretName"] == "my-redis-tls"
    assert "serviceAccountName" not in pods[0]  # KubeRay takes the one named after the cluster
    assert pods[1]["serviceAccountName"] == "aenv-worker"
    for account in (objects.NAME, "aenv-worker"):
        annotations = the(found, "ServiceAccount", account)["metadata"]["annotations"]
        assert annotations == {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/aenv"}
    assert [problem for document in found for problem in problems(document)] == []


@pytest.mark.parametrize(
    "address", ["127.0.0.1:{}", "rediss://127.0.0.1:{}", "redis://127.0.0.1:{}"]
)
def test_the_head_waits_for_the_redis_of_the_values(address):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = address.format(server.getsockname()[1])
        found = manifests.load("dev", None, {"redis.address": f"'{address}'"})
        head = the(found, "RayCluster", "aenv")["spec"]["headGroupSpec"]["template"]["spec"]
        (wait,) = head["initContainers"]
        variables = {entry["name"]: entry["value"] for entry in wait["env"]}
        command = [sys.executable, *wait["command"][1:]]
        subprocess.run(command, env={**os.environ, **variables}, check=True, timeout=60)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"imagge": "x"}, "unknown value imagge"),
        ({"workers.maxReplica": "3"}, "unknown value workers.maxReplica"),
        ({"wrokers.maxReplicas": "3"}, "unknown value wrokers"),
        ({"workers.maxReplicas": "many"}, "value workers.maxReplicas is 'many', and must be a who"),
        ({"head.resources": "3"}, "value head.resources is 3, and must be a mapping"),
        ({"namespace": "Bad_Name"}, "value namespace is 'Bad_Name': expected up to 63 lowercase"),
        ({"image": ""}, "value image is '': expected REGISTRY/NAME:TAG"),
        ({"workers.envSlots": "1.5"}, "value workers.envSlots is 1.5: expected a whole number"),
        ({"processWorkers.envSlots": "many"}, "value processWorkers.envSlots is 'many'"),
        ({"gateway.replicas": "0"}, "value gateway.replicas is 0: expected a whole number"),
        ({"rayVersion": "latest"}, "value rayVersion is 'latest': expected the version of Ray"),
        ({"sandboxes.memory": "lots"}, "worker group kubernetes would not start: .*MEMORY 'lots'"),
        (
            {"sandboxes.requests": "3"},
            "kubernetes would not start: .*REQUESTS.* less than",
        ),
        ({"sandboxes.nodeSelector": "gpu"}, "NODE_SELECTOR: invalid entry 'gpu'"),
        ({"logFormat": "xml"}, "the head would not start: .*AENV_LOG_FORMAT"),
        ({"workers.minReplicas": "-1"}, "value workers.minReplicas is -1: expected a whole number"),
        ({"workers.minReplicas": "9", "workers.maxReplicas": "2"}, "are 9 and 2"),
        ({"image": "{"}, "not valid YAML"),
    ],
)
def test_a_value_that_is_not_there_or_does_not_fit_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        manifests.load("dev", None, settings)


def test_a_variable_in_rendered_manifests_is_checked_as_the_head_checks_it(tmp_path):
    rendered = yaml.safe_dump_all(manifests.load("dev"))
    (tmp_path / "all.yaml").write_text(rendered.replace("kubernetes=$(", "kubernetes=few$("))
    with pytest.raises(
        ConfigError, match=r"the head would not start: .*AENV_ENGINE_SLOTS"
    ) as caught:
        manifests.load(str(tmp_path / "all.yaml"))
    assert "container ray-head" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("variables", "is_valid"),
    [
        ([("N", "3"), ("AENV_ENGINE_SLOTS", "process=$(N)")], True),
        ([("AENV_ENGINE_SLOTS", "process=$(N)"), ("N", "3")], False),  # not defined before
        ([("N", "3"), ("AENV_ENGINE_SLOTS", "process=$$(N)")], False),  # not a reference
        ([("N", None), ("AENV_ENGINE_SLOTS", "process=$(N)")], True),  # known only in the cluster
        ([("AENV_ENGINE_SLOTS", "")], True),
    ],
)
def test_references_of_variables_are_read_as_kubernetes_reads_them(variables, is_valid):
    entries = [
        {"name": name, "valueFrom": {"secretKeyRef": {}}} if text is None
        else {"name": name, "value": text}
        for name, text in variables
    ]  # fmt: skip
    pods = {"spec": {"containers": [{"name": "ray-head", "env": entries}]}}
    documents = [{}, {"kind": "RayCluster", "spec": {"headGroupSpec": {"template": pods}}}]
    with nullcontext() if is_valid else pytest.raises(ConfigError, match="AENV_ENGINE_SLOTS"):
        settings_check.check_settings(documents)


def test_values_of_other_manifests_are_refused_only_if_they_are_wrong():
    settings_check.check_values({"imagePullPolicy": "", "gateway": {"serviceType": ""}})
    settings_check.check_values({"workers": {"minReplicas": 1}})
    settings_check.check_values({"workers": {"minReplicas": "1", "maxReplicas": "10"}})
    settings_check.check_settings([{"kind": "RayCluster", "spec": {"headGroupSpec": None}}])


def test_an_overlay_that_is_not_there_names_those_that_are():
    with pytest.raises(ConfigError) as caught:
        manifests.load("prod")
    assert caught.value.hint == "overlays: dev, production"


def test_both_overlays_have_the_same_values():
    def names(value: Any, above: str = "") -> set[str]:
        if not isinstance(value, dict) or above.count(".") == 2:
            return {above}
        return set().union(*(names(v, f"{above}.{k}") for k, v in value.items()))

    found = [
        names(yaml_files.read(KUBERAY / "overlays" / overlay / "values.yaml")[0]["spec"])
        for overlay in OVERLAYS
    ]
    assert found[0] == found[1]


def test_every_file_says_what_it_is_for():
    for path in [*KUBERAY.rglob("*.yaml"), KUBERAY / "image" / "Dockerfile"]:
        if path.name != "workers.yaml":  # its component says it
            assert path.read_text().startswith("# "), path


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_workers_may_do_what_the_kubernetes_engine_asks_and_nothing_else(overlay):
    from aenv_ray.engines.kubernetes.permissions import Access, Permission

    documents = manifests.load(overlay)
    granted = {
        Permission(verb, resource, group)
        for rule in the(documents, "Role", "aenv-worker")["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == {access.value for access in Access}
    assert [d["metadata"]["name"] for d in documents if d["kind"] == "Role"] == ["aenv-worker"]
    (worker,) = the(documents, "RayCluster", "aenv")["spec"]["workerGroupSpecs"]
    assert worker["template"]["spec"]["serviceAccountName"] == "aenv-worker"


def test_network_policies_select_what_the_engine_makes_and_open_nothing_to_it():
    """Invariant 7, as far as manifests keep it."""
    documents = manifests.load("dev")
    sandbox = {"app.kubernetes.io/part-of": "aenv-ray", "app.kubernetes.io/component": "sandbox"}
    policy = the(documents, "NetworkPolicy", "aenv-sandbox")["spec"]
    assert policy["podSelector"]["matchLabels"] == sandbox
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in policy
    internet = the(documents, "NetworkPolicy", "aenv-sandbox-internet")["spec"]
    assert internet["podSelector"]["matchLabels"] == {"aenv-ray.io/network": "internet"}
    addresses, names = internet["egress"]
    assert "10.0.0.0/8" in addresses["to"][0]["ipBlock"]["except"]
    assert {port["port"] for port in names["ports"]} == {53}
    for name in ("aenv-ray", "aenv-redis"):
        for rule in the(documents, "NetworkPolicy", name)["spec"]["ingress"]:
            assert [peer["podSelector"]["matchLabels"] for peer in rule["from"]] == [
                {"ray.io/cluster": "aenv"}
            ]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_variable_of_ours_is_a_setting(overlay, monkeypatch):
    from aenv_ray.config import Settings, read_settings

    known = {field.alias for field in Settings.model_fields.values()}
    spec = the(manifests.load(overlay), "RayCluster", "aenv")["spec"]
    for pod in pod_specs({"kind": "RayCluster", "spec": spec}):
        variables = environment_of(pod)
        mine = {name for name in variables if name.startswith("AENV_")} - {"AENV_REDIS_PASSWORD"}
        assert mine <= known
        with monkeypatch.context() as patch:
            for name in mine:
                patch.setenv(name, variables[name])
            assert read_settings().engine is None


@pytest.mark.parametrize(
    ("slots", "engines"),
    [
        (
            {"workers": "32", "processWorkers": "512", "dockerWorkers": "64"},
            ("kubernetes", "process", "docker"),
        ),
        ({"workers": "0", "processWorkers": "512", "dockerWorkers": "0"}, ("process",)),
        ({"workers": "0", "processWorkers": "0", "dockerWorkers": "64"}, ("docker",)),
    ],
)
def test_the_head_knows_the_engines_of_its_workers(everything, slots, engines, monkeypatch):
    """No pod names an engine: the label of a worker says what runs there."""
    from aenv_ray.config import read_settings

    settings = {f"{group}.envSlots": f"'{count}'" for group, count in slots.items()}
    documents = manifests.load(str(everything), None, settings)
    head = the(documents, "RayCluster", "aenv")["spec"]["headGroupSpec"]
    monkeypatch.delenv("AENV_ENGINE", raising=False)
    variables = environment_of(head["template"]["spec"])
    monkeypatch.setenv("AENV_ENGINE_SLOTS", variables["AENV_ENGINE_SLOTS"])
    assert read_settings().joining_engines == engines
    for group in the(documents, "RayCluster", "aenv")["spec"]["workerGroupSpecs"]:
        assert "AENV_ENGINE" not in environment_of(group["template"]["spec"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_deleted_head_ends_at_once(overlay):
    """Recovery begins only when the old head is gone: neither container may wait for its grace."""
    spec = the(manifests.load(overlay), "RayCluster", "aenv")["spec"]
    head = spec["headGroupSpec"]["template"]["spec"]
    assert environment_of(head)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "0"
    assert head["terminationGracePeriodSeconds"] <= 20
    program = f"{sys.executable} -c 'import time; print(1, flush=True); time.sleep(600)'"
    autoscaler = subprocess.Popen(
        [*spec["autoscalerOptions"]["command"], program], stdout=subprocess.PIPE, text=True
    )
    with autoscaler:
        assert autoscaler.stdout is not None
        assert autoscaler.stdout.readline() == "1\n"
        autoscaler.terminate()
        assert autoscaler.wait(60) == 0
        assert autoscaler.stdout.read() == ""  # the program has ended, too


def test_the_end_of_the_autoscaler_is_the_end_of_its_container():
    spec = the(manifests.load("dev"), "RayCluster", "aenv")["spec"]
    program = f"{sys.executable} -c 'import sys; sys.exit(7)'"
    ended = subprocess.run([*spec["autoscalerOptions"]["command"], program], check=False)
    assert ended.returncode == 7


def test_argo_cd_and_flux_render_the_copied_manifests(tmp_path):
    manifests.copy_to(tmp_path / "my-cluster")
    (application,) = yaml_files.read(KUBERAY / "samples" / "argo-cd.yaml")
    repository, flux = yaml_files.read(KUBERAY / "samples" / "flux.yaml")
    assert flux["spec"]["sourceRef"]["name"] == repository["metadata"]["name"]
    source = application["spec"]["source"]
    assert source["repoURL"] == repository["spec"]["url"]
    assert source["path"] == flux["spec"]["path"].removeprefix("./")
    rendered = by_kubectl(tmp_path / source["path"])
    assert as_set(rendered) == as_set(manifests.load("production"))
    assert manifests.namespace_of(rendered) == application["spec"]["destination"]["namespace"]


IGNORED = re.compile(r"\[\]|[^.\[\]]+")


def without(document: dict[str, Any], rule: dict[str, Any]) -> dict[str, Any]:
    """Return a document without the fields that a rule of ``ignoreDifferences`` names."""
    result = copy.deepcopy(document)
    paths = [pointer.strip("/").split("/") for pointer in rule.get("jsonPointers", ())]
    for path in (*paths, *map(IGNORED.findall, rule.get("jqPathExpressions", ()))):
        found = [result]
        for step in path[:-1]:
            found = [each for one in found for each in (one if step == "[]" else [one[step]])]
        for one in found:
            one.pop(path[-1], None)
    return result


def merge_patch(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Merge Patch (RFC 7386) between documents of which nothing is deleted."""
    patch = {}
    for key, value in after.items():
        if isinstance(value, dict) and isinstance(before.get(key), dict):
            patch |= {key: inner} if (inner := merge_patch(before[key], value)) else {}
        elif value != before.get(key):
            patch[key] = value
    return patch


def merged(document: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Apply a JSON Merge Patch, which replaces each list as a whole."""
    result = dict(document)
    for key, value in patch.items():
        is_map = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if is_map else value
    return result


def synced(application: dict[str, Any], live: dict[str, Any], wanted: dict[str, Any]) -> Any:
    """Return what a sync of Argo CD makes of a custom resource; None if it is in sync.

    With ``RespectIgnoreDifferences`` Argo CD copies the ignored fields of the live object to the
    one from Git, by the patch between the live object without and with them (argo-cd #17694).
    """
    (rule,) = application["spec"]["ignoreDifferences"]
    bare_live, bare_wanted = without(live, rule), without(wanted, rule)
    if bare_live == bare_wanted:
        return None
    return merged(bare_wanted, merge_patch(bare_live, live))


def test_argo_cd_creates_the_raycluster_and_then_leaves_its_spec():
    """Of a change in Git it delivers all or nothing, or head and workers would differ."""
    (application,) = yaml_files.read(KUBERAY / "samples" / "argo-cd.yaml")
    live = the(manifests.load("production"), "RayCluster", "aenv")
    live["spec"]["workerGroupSpecs"][0] |= {
        "replicas": 7, "scaleStrategy": {"workersToDelete": ["one"]},
    }  # fmt: skip
    changed = the(manifests.load("production", settings={"image": "new:2"}), "RayCluster", "aenv")
    assert synced(application, live, changed) is None
    changed["metadata"].setdefault("labels", {})["team"] = "rl"
    after = synced(application, live, changed)
    assert after["metadata"]["labels"]["team"] == "rl"
    assert after["spec"] == live["spec"]
    options = application["spec"]["syncPolicy"]["syncOptions"]
    assert "RespectIgnoreDifferences=true" in options  # else a sync for another reason resets it
    assert "ApplyOutOfSyncOnly=true" in options


def test_flux_creates_the_raycluster_and_then_leaves_it(tmp_path):
    """As kustomize applies the patches of a Flux Kustomization."""
    _, flux = yaml_files.read(KUBERAY / "samples" / "flux.yaml")
    manifests.copy_to(tmp_path / "kuberay")
    path = tmp_path / "kuberay" / "overlays" / "production" / kustomize.FILE
    content = yaml_files.read(path)[0]
    content["patches"] += flux["spec"]["patches"]
    path.write_text(yaml_files.dump([content]))
    changed = {
        objects.title(document)
        for document in by_kubectl(path.parent)
        if "kustomize.toolkit.fluxcd.io/ssa" in document["metadata"].get("annotations", {})
    }
    assert changed == {"RayCluster aenv"}


@pytest.mark.parametrize("name", ["kuberay-operator", "kuberay"])
def test_the_operator_of_a_chart_or_a_kustomization_reaches_the_job_api(name):
    spec = the(manifests.load("dev"), "NetworkPolicy", "aenv-head")["spec"]
    (rule,) = [rule for rule in spec["ingress"] if rule["ports"][0]["port"] == 8265]
    labels = {"app.kubernetes.io/name": name}
    assert any(selects(peer["podSelector"], labels) for peer in rule["from"])
