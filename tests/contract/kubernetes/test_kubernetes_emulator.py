"""The emulated cluster behaves as a real one, which other tests rely on."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from aenv_ray.cluster import manifests
from aenv_ray.engines.base import SandboxSpec
from aenv_ray.engines.kubernetes.client import ApiRefused, KubernetesClient
from aenv_ray.engines.kubernetes.manifest import pod_manifest
from aenv_ray.engines.kubernetes.permissions import Access
from aenv_ray.engines.kubernetes.plan import PodPlan
from aenv_ray.engines.kubernetes.settings import OwnerPod, PodSettings
from aenv_ray.ids import InstanceId
from aenv_ray.project.config import EnvironmentConfig
from aenv_ray.testing.contract_bench import eventually
from tests.emulators.kubernetes.api import NAMESPACE, EmulatedCluster
from tests.emulators.kubernetes.node import RAY_IMAGE

WITHIN_S = 60.0


@pytest.fixture(scope="module")
def api() -> Iterator[EmulatedCluster]:
    with EmulatedCluster() as api:
        api.fill_nodes(True)  # nothing is to run here
        yield api


@pytest.fixture
async def client(api: EmulatedCluster) -> AsyncIterator[KubernetesClient]:
    from kubernetes.aio import client as models

    client = KubernetesClient(NAMESPACE, models.Configuration(host=api.url))
    yield client
    await client.close()
    for pod in api.objects("pods"):
        api.delete("pods", pod["metadata"]["name"])


@pytest.fixture
def owner(api: EmulatedCluster) -> OwnerPod:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray-1"},
           "spec": {"containers": []}, "status": {}}  # fmt: skip
    return OwnerPod("ray-1", api.create("pods", pod)["metadata"]["uid"], "ray:2")


def body(owner: OwnerPod, name: str) -> dict[str, Any]:
    config = EnvironmentConfig(name="made")
    spec = SandboxSpec(InstanceId(name), Path("/p"), config, 1000.0)
    plan = PodPlan(
        name=name, host_id="h", owner=owner, settings=PodSettings(), nonce="n", secret_digest="d",
        image="python:3.12",
    )  # fmt: skip
    return pod_manifest(spec, plan, 0.0)


async def refusal(client: KubernetesClient, access: Access, name: str = "", **options: Any) -> str:
    """Return status and reason of a request that is refused."""
    with pytest.raises(ApiRefused) as raised:
        await client.request(access, name, **options)
    return f"{raised.value.status} {raised.value.reason}"


async def test_objects_have_a_schema_a_name_and_a_uid(
    client: KubernetesClient, owner: OwnerPod
) -> None:
    pod = body(owner, "one")
    wrong = copy.deepcopy(pod)
    wrong["spec"]["activeDeadlineSecond"] = 3
    assert await refusal(client, Access.CREATE_POD, body=wrong) == "422 Invalid"
    made = await client.request(Access.CREATE_POD, body=pod)
    assert await refusal(client, Access.CREATE_POD, body=pod) == "409 AlreadyExists"
    options = {"preconditions": {"uid": "another"}}
    assert await refusal(client, Access.DELETE_POD, "one", body=options) == "409 Conflict"
    options = {"preconditions": {"uid": made["metadata"]["uid"]}}
    await client.request(Access.DELETE_POD, "one", body=options)
    assert await refusal(client, Access.GET_POD, "one") == "404 NotFound"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hostname": "Not_a_label"}, "spec.hostname"),
        ({"activeDeadlineSeconds": 0}, "must be between 1 and 2147483647"),
        ({"volumes": []}, 'volumeMounts.name: Not found: "home"'),
        ({"nodeSelector": {"a b": "c"}}, "spec.nodeSelector"),
        ({"priorityClassName": "none"}, "no PriorityClass with name none was found"),
        ({"runtimeClassName": "none"}, 'RuntimeClass "none" not found'),
    ],
)
async def test_a_pod_that_only_looks_right_is_refused(
    client: KubernetesClient, owner: OwnerPod, change: dict[str, Any], words: str
) -> None:
    pod = body(owner, "one")
    pod["spec"] |= change
    with pytest.raises(ApiRefused) as raised:
        await client.request(Access.CREATE_POD, body=pod)
    assert words in raised.value.message


async def test_names_labels_and_limits_are_those_that_the_api_server_takes(
    client: KubernetesClient, owner: OwnerPod
) -> None:
    pod = body(owner, "Upper")
    pod["metadata"]["labels"]["aenv-ray.io/x"] = "not a value"
    container = pod["spec"]["containers"][0]
    container["ports"][0]["name"] = "longer-than-fifteen"
    container["resources"] = {"requests": {"cpu": "2"}, "limits": {"cpu": "500m"}}
    with pytest.raises(ApiRefused) as raised:
        await client.request(Access.CREATE_POD, body=pod)
    for words in ("metadata.name", "not a value", "longer-than-fifteen", "at most cpu limit"):
        assert words in raised.value.message


async def test_a_create_that_lost_a_race_is_tried_again(
    api: EmulatedCluster, client: KubernetesClient, owner: OwnerPod
) -> None:
    api.race(2)
    made = await client.request(Access.CREATE_POD, body=body(owner, "one"))
    assert made["metadata"]["name"] == "one"


async def test_a_pods_own_deadline_only_comes_earlier(
    client: KubernetesClient, owner: OwnerPod
) -> None:
    made = await client.request(Access.CREATE_POD, body=body(owner, "one"))
    life_s = made["spec"]["activeDeadlineSeconds"]
    later = {"spec": {"activeDeadlineSeconds": life_s + 1}}
    assert await refusal(client, Access.PATCH_POD, "one", body=later) == "422 Invalid"
    earlier = {"spec": {"activeDeadlineSeconds": life_s - 1}}
    changed = await client.request(Access.PATCH_POD, "one", body=earlier)
    assert changed["spec"]["activeDeadlineSeconds"] == life_s - 1
    other = {"spec": {"hostname": "other"}}
    assert await refusal(client, Access.PATCH_POD, "one", body=other) == "422 Invalid"


async def test_lists_come_in_pages_and_by_label(client: KubernetesClient, owner: OwnerPod) -> None:
    for name in ("a", "b", "c"):
        await client.request(Access.CREATE_POD, body=body(owner, name))
    selector = "app.kubernetes.io/component=sandbox"
    query = {"labelSelector": selector, "limit": "2"}
    first = await client.request(Access.LIST_PODS, query=query)
    query["continue"] = first["metadata"]["continue"]
    second = await client.request(Access.LIST_PODS, query=query)
    found = [pod["metadata"]["name"] for pod in first["items"] + second["items"]]
    assert found == ["a", "b", "c"]
    assert "continue" not in second["metadata"]
    query = {"labelSelector": "app.kubernetes.io/component!=sandbox"}
    (ray,) = (await client.request(Access.LIST_PODS, query=query))["items"]
    assert ray["metadata"]["name"] == "ray-1"


def container_of(script: str, **fields: Any) -> dict[str, Any]:
    """Return a container that runs a script in bash as its process 1."""
    return {
        "name": "main", "image": RAY_IMAGE, "command": ["/bin/bash", "-c", script],
        "volumeMounts": [], "securityContext": {"runAsUser": 65534, "runAsGroup": 65534},
        **fields,
    }  # fmt: skip


def pod_of(container: dict[str, Any], grace_s: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "graceful"},
        "spec": {"containers": [container], "volumes": [], "restartPolicy": "Never",
                 "terminationGracePeriodSeconds": grace_s},
    }  # fmt: skip


def autoscaler() -> dict[str, Any]:
    """Return the container that KubeRay adds to the head, with a program in place of Ray's."""
    documents = manifests.load("dev")
    (ray,) = [document for document in documents if document["kind"] == "RayCluster"]
    command = ray["spec"]["autoscalerOptions"]["command"]
    return container_of("", command=command, args=["bash -c 'echo up; sleep 600'"])


@pytest.mark.namespaces
@pytest.mark.parametrize(
    ("container", "grace_s", "phase"),
    [
        (container_of("echo up; sleep 600; true"), 1, "Failed"),
        (container_of("trap 'exit 0' TERM; echo up; sleep 600 & wait"), 600, "Succeeded"),
        (autoscaler(), 600, "Succeeded"),
    ],
    ids=["without a handler", "with a handler", "the head's autoscaler"],
)
async def test_a_container_that_ignores_sigterm_stays_until_its_grace_period_ends(
    container: dict[str, Any], grace_s: int, phase: str
) -> None:
    with EmulatedCluster() as cluster:
        async with httpx.AsyncClient(base_url=cluster.url) as client:
            pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
            made = await client.post(pods, json=pod_of(container, grace_s))
            assert made.status_code == 200, made.text
            await eventually(
                lambda: cluster.phases.get("graceful") == "Running", "it runs", WITHIN_S
            )
            await eventually(
                lambda: cluster.node.log("graceful", "main") == "up\n", "it is up", WITHIN_S
            )
            await client.delete(f"{pods}/graceful")
            await eventually(lambda: not cluster.objects("pods"), "it is gone", WITHIN_S)
        assert cluster.phases["graceful"] == phase


THREADS = 200
HOLD_THREADS = f"""
import threading, time
for _ in range({THREADS}):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("up", flush=True)
time.sleep(600)
"""
LIMIT_THREADS = f"""
import resource, threading
resource.setrlimit(resource.RLIMIT_NPROC, ({THREADS}, {THREADS}))
try:
    threading.Thread(target=print).start()
except RuntimeError:
    print("refused", flush=True)
"""


@pytest.mark.namespaces
async def test_the_threads_of_a_user_are_counted_across_pods() -> None:
    """As on a real node where pods have no user namespace: RLIMIT_NPROC sees them all."""
    user = {"runAsUser": 61_234, "runAsGroup": 61_234}
    with EmulatedCluster() as cluster:
        async with httpx.AsyncClient(base_url=cluster.url) as client:
            for name, program, output in (
                ("holder", HOLD_THREADS, "up\n"),
                ("limited", LIMIT_THREADS, "refused\n"),
            ):
                container = container_of("", command=["python3", "-c", program])
                pod = pod_of({**container, "securityContext": user}, 1)
                pod["metadata"] = {"name": name}
                made = await client.post(f"/api/v1/namespaces/{NAMESPACE}/pods", json=pod)
                assert made.status_code == 200, made.text

                def has_printed(name: str = name, output: str = output) -> bool:
                    return cluster.node.log(name, "main") == output

                await eventually(has_printed, f"{name} printed", WITHIN_S)


async def test_what_is_owned_goes_with_its_owner(
    api: EmulatedCluster, client: KubernetesClient, owner: OwnerPod
) -> None:
    await client.request(Access.CREATE_POD, body=body(owner, "owned"))
    api.delete("pods", "ray-1")
    await eventually(lambda: not api.objects("pods"), "the owned one is gone", WITHIN_S)
    await client.request(Access.CREATE_POD, body=body(owner, "orphan"))
    await eventually(lambda: not api.objects("pods"), "and one of no owner", WITHIN_S)


async def test_a_watch_goes_on_where_it_was_unless_that_is_forgotten(
    api: EmulatedCluster, client: KubernetesClient, owner: OwnerPod
) -> None:
    listed = await client.request(Access.LIST_PODS)
    query = {"resourceVersion": listed["metadata"]["resourceVersion"]}
    await client.request(Access.CREATE_POD, body=body(owner, "seen"))
    async with client.watch(Access.WATCH_PODS, query) as events:
        event = await anext(events)
        assert (event["type"], event["object"]["metadata"]["name"]) == ("ADDED", "seen")
    api.break_watches(forget=True)
    with pytest.raises(ApiRefused) as raised:
        async with client.watch(Access.WATCH_PODS, query) as events:
            await anext(events)
    assert raised.value.status == 410


async def test_an_apply_takes_no_field_of_another_manager_and_drops_its_own(
    api: EmulatedCluster,
) -> None:
    path = f"/api/v1/namespaces/{NAMESPACE}/services/shared"
    headers = {"Content-Type": "application/apply-patch+yaml"}
    async with httpx.AsyncClient(base_url=api.url, headers=headers) as http:

        async def applied(manager: str, spec: dict[str, Any], **query: str) -> httpx.Response:
            body = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "shared"}}
            query |= {"fieldManager": manager}
            return await http.patch(path, params=query, json={**body, "spec": spec})

        ours = {"type": "ClusterIP", "sessionAffinity": "None"}
        assert (await applied("we", ours, dryRun="All")).status_code == 200
        assert api.objects("services") == []
        made = (await applied("we", ours)).json()
        again = (await applied("we", ours)).json()
        assert again["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
        refused = await applied("they", {"type": "NodePort"})
        assert (refused.status_code, refused.json()["reason"]) == (409, "Conflict")
        assert 'conflict with "we": .spec.type' in refused.json()["message"]
        assert (await applied("they", {"type": "NodePort"}, force="true")).status_code == 200
        ours = {"internalTrafficPolicy": "Local"}
        changed = (await applied("we", ours)).json()
        assert changed["spec"] == {"type": "NodePort", "internalTrafficPolicy": "Local"}
        assert changed["metadata"]["generation"] == 3
    api.delete("services", "shared")


async def test_an_object_stays_until_its_finalizers_are_gone_and_needs_a_namespace(
    api: EmulatedCluster,
) -> None:
    body = {"apiVersion": "v1", "kind": "ConfigMap"}
    metadata = {"name": "kept", "finalizers": ["example.com/held"]}
    api.create("configmaps", {**body, "metadata": metadata})
    api.delete("configmaps", "kept")
    (kept,) = api.objects("configmaps")
    assert "deletionTimestamp" in kept["metadata"]
    with api.edited("configmaps", "kept") as edited:
        edited["metadata"]["finalizers"] = []
    api.delete("configmaps", "kept")
    assert api.objects("configmaps") == []
    async with httpx.AsyncClient(base_url=api.url) as http:
        path = "/api/v1/namespaces/none/configmaps"
        refused = await http.post(path, json={**body, "metadata": {"name": "lost"}})
    assert (refused.status_code, refused.json()["reason"]) == (404, "NotFound")
