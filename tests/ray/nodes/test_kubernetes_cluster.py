"""The whole on Kubernetes: rollouts in pods that a Ray worker's pod owns, and pods that die."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from aenv_ray.cli.local.free_ports import free_port
from aenv_ray.cluster import manifests
from tests.contract.kubernetes.kubernetes_node import KubernetesNode
from tests.emulators.kubernetes.node import PYTHON_IMAGE
from tests.ray.faults import eventually, eventually_empty
from tests.ray.nodes.nodes import Console, by_node, own_root, raised
from tests.ray.nodes.pod_nodes import SLOTS, PodNodes, Worker
from tests.ray.services.services import ACCEPT, WIDE_S

pytestmark = [pytest.mark.namespaces, pytest.mark.timeout(600)]

WITHIN_S = 120.0
ENVIRONMENT = "mini-terminal"
STATE = (
    "next(([str(n.status), n.instances, n.runners] for n in aenv_ray.init().nodes()"
    " if n.node_id == {!r}), None)"
)


@pytest.fixture(scope="module")
def pods() -> Iterator[PodNodes]:
    with KubernetesNode() as kubernetes, own_root("aenv-k") as root:
        for policy in manifests.load("dev"):  # a gateway requires isolation
            if policy["kind"] == "NetworkPolicy":
                kubernetes.cluster.create("networkpolicies", policy, "networking.k8s.io")
        cluster = PodNodes(root, kubernetes)
        try:
            yield cluster
        finally:
            cluster.nodes.close()


@pytest.fixture(scope="module")
def worker(pods: PodNodes) -> Worker:
    """The worker that stays."""
    return pods.add_worker("ray-worker-a")


@pytest.fixture(scope="module")
def variables(pods: PodNodes, worker: Worker) -> dict[str, str | None]:
    """What a driver on the head has."""
    del worker
    return {"RAY_ADDRESS": pods.nodes.address, "AENV_ENGINE": "kubernetes"}


@pytest.fixture
def console(variables: dict[str, str | None]) -> Iterator[Console]:
    driver = Console(variables)
    driver.do("aenv_ray.init()")
    yield driver
    driver.close()


def test_quickstart_leaves_no_pod(
    pods: PodNodes, variables: dict[str, str | None], tmp_path: Path
) -> None:
    """Every rollout is solved; when it is done, the API has no pod of them, ready ones included."""
    done = subprocess.run(
        [
            sys.executable, "-m", "aenv_ray.cli.main", "quickstart", "--engine", "kubernetes",
            "--rollouts", "8", "--concurrency", "4", "--json", "--out", str(tmp_path / "out"),
        ],
        env={**os.environ, **{n: v for n, v in variables.items() if v is not None}},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    counts = {name: summary[name] for name in ("rollouts", "infra_failed", "instances_left")}
    assert counts == {"rollouts": 8, "infra_failed": 0, "instances_left": 0}
    assert summary["reward_mean"] == 1.0
    eventually_empty(pods.kubernetes.left_over)  # a pod that is deleted takes a moment to go


def test_what_a_worker_runs_is_counted_by_the_api(console: Console) -> None:
    console.do(f"one = aenv_ray.create({ENVIRONMENT!r}, engine='kubernetes')")
    assert console.value("aenv_ray.init().count_processes()") == 1
    console.do("aenv_ray.release_many([one])")
    eventually(lambda: console.value("aenv_ray.init().count_processes()") == 0, WITHIN_S)


def test_sampling_goes_on_when_pods_die(pods: PodNodes, worker: Worker, console: Console) -> None:
    """Invariant 2: a sandbox's pod, then a worker's with all it owns; no episode is void or zero.

    Calls that were under way there fail, and say that it is the sandbox that was lost.
    """
    other = pods.add_worker("ray-worker-b")
    console.do(
        "import threading\n"
        "import traceback\n"
        "from aenv_ray import sampling\n"
        "from aenv_ray.project import project\n"
        f"home = project.resolve({ENVIRONMENT!r}).path\n"
        "tasks = sampling.load_tasks(home / 'tasks.jsonl')\n"
        "async def act(env, task):\n"
        "    await env.call_tool('execute_command', {'command': 'sleep 0.5'})\n"
        "    for step in task.reference:\n"
        "        await env.call_tool(step.tool, step.arguments)\n"
        f"run = sampling.sample({ENVIRONMENT!r}, act, [tasks[n % len(tasks)] for n in range(12)],\n"
        "    concurrency=6, infra_retries=20, engine='kubernetes')\n"
        f"held = aenv_ray.create_many({ENVIRONMENT!r}, {SLOTS + 1}, engine='kubernetes')\n"
    )
    held = by_node(console, "held")
    assert sorted(held) == sorted((worker.node.node_id, other.node.node_id))
    kept = [ids[0] for ids in held.values()]  # one on each, so that both stay
    doomed = held[other.node.node_id][0]
    console.do(
        f"aenv_ray.release_many([h for h in held if h.instance_id not in {kept!r}])\n"
        f"held = [h for h in held if h.instance_id in {kept!r}]\n"
        f"doomed = next(h for h in held if h.instance_id == {doomed!r})\n"
        "call = doomed.call_tool.remote('execute_command', {'command': 'sleep 300'})\n"
        "ended = []\n"
        "def play():\n"
        "    try:\n"
        "        run.run()\n"
        "    except BaseException:\n"
        "        ended.append(traceback.format_exc())\n"
        "sampler = threading.Thread(target=play)\n"
        "sampler.start()\n"
    )

    def finished(count: int) -> None:
        eventually(lambda: console.value("len(run.episodes)") >= count, WITHIN_S)

    finished(2)
    name = eventually(lambda: pods.sandboxes_of(worker), WITHIN_S)[-1]
    pods.kubernetes.cluster.delete("pods", name)
    finished(6)
    eventually(lambda: len(pods.sandboxes_of(other)) > 1, WITHIN_S)
    pods.delete(other)
    errors = raised(lambda: console.value("ray.get(call, timeout=100)"))
    assert "InstanceError" in errors or "FabricUnavailable" in errors, errors
    eventually_empty(lambda: pods.sandboxes_of(other), 60.0)
    eventually(lambda: not console.value("sampler.is_alive()"), WITHIN_S)
    assert console.value("ended") == []
    statuses = console.value("[[e.status.value, e.reward, e.error] for e in run.episodes]")
    assert statuses == [["completed", 1.0, None]] * 12
    console.do("aenv_ray.release_many(held)")
    console.do(f"aenv_ray.warm({ENVIRONMENT!r}, 0, engine='kubernetes')")
    eventually_empty(lambda: pods.sandboxes_of(worker), WITHIN_S)


def test_a_deleted_worker_drains_within_its_grace_period(
    pods: PodNodes, worker: Worker, console: Console
) -> None:
    """It gets no new instances; its own end by themselves; a sampling moves away and continues."""
    other = pods.add_worker("ray-worker-c")
    ended = ThreadPoolExecutor(1)
    console.do(
        "import threading\n"
        "from aenv_ray import sampling\n"
        "from aenv_ray.project import project\n"
        f"home = project.resolve({ENVIRONMENT!r}).path\n"
        "tasks = sampling.load_tasks(home / 'tasks.jsonl')\n"
        "async def act(env, task):\n"
        "    await env.call_tool('execute_command', {'command': 'sleep 1'})\n"
        f"run = sampling.sample({ENVIRONMENT!r}, act, [tasks[n % len(tasks)] for n in range(40)],\n"
        "    concurrency=4, runners='nodes', engine='kubernetes')\n"
        f"held = aenv_ray.create_many({ENVIRONMENT!r}, {SLOTS + 1}, engine='kubernetes')\n"
    )
    held = by_node(console, "held")
    kept = held[other.node.node_id][0]
    console.do(
        f"kept = next(h for h in held if h.instance_id == {kept!r})\n"
        f"aenv_ray.release_many([h for h in held if h is not kept])\n"
        "sampler = threading.Thread(target=run.run)\n"
        "sampler.start()\n"
    )
    eventually(lambda: len(pods.sandboxes_of(other)) > 1, WITHIN_S)
    ending = ended.submit(pods.end, other, 300.0)
    state = STATE.format(other.node.node_id)
    eventually(lambda: console.value(state) == ["draining", 1, 0], WITHIN_S)
    console.do(f"more = aenv_ray.create_many({ENVIRONMENT!r}, 2, engine='kubernetes')")
    assert by_node(console, "more").keys() == {worker.node.node_id}
    assert not ending.done()
    output = "ray.get(kept.call_tool.remote('execute_command', {'command': 'echo on'})).text()"
    assert "on" in console.value(output)
    console.do("aenv_ray.release_many([kept, *more])")
    assert ending.result(WITHIN_S), "the hook succeeds before the grace period ends"
    eventually(lambda: not console.value("sampler.is_alive()"), WITHIN_S)
    played = console.value("[[e.status.value, e.attempts] for e in run.episodes]")
    assert played == [["completed", 1]] * 40
    eventually_empty(lambda: pods.sandboxes_of(other), 60.0)
    ended.shutdown()


def test_a_deleted_worker_ends_after_its_grace_period(
    pods: PodNodes, worker: Worker, console: Console
) -> None:
    """An instance that still runs then is lost, and its caller gets that error."""
    other = pods.add_worker("ray-worker-d")
    console.do(f"held = aenv_ray.create_many({ENVIRONMENT!r}, {SLOTS + 1}, engine='kubernetes')")
    doomed = by_node(console, "held")[other.node.node_id]
    assert not pods.end(other, 15.0)
    console.do(f"lost = [h for h in held if h.instance_id in {doomed!r}]")
    errors = raised(
        lambda: console.value(
            "ray.get(lost[0].call_tool.remote('execute_command', {'command': 'true'}), timeout=100)"
        )
    )
    assert "SandboxLost" in errors, errors
    eventually_empty(lambda: pods.sandboxes_of(other), 60.0)
    console.do("aenv_ray.release_many(held)")
    eventually_empty(lambda: pods.sandboxes_of(worker), WITHIN_S)


def test_the_nodes_of_a_mixed_cluster_decide_the_engine(
    pods: PodNodes, worker: Worker, variables: dict[str, str | None]
) -> None:
    """A create without an engine uses either; an image needs a pod; other creates are refused."""
    plain = pods.nodes.add(slots=2, labels={"aenv-ray.io/engine": "process"})
    driver = Console({**variables, "AENV_ENGINE": None})
    try:
        driver.do(
            "aenv_ray.init()\n"
            f"other = aenv_ray.create({ENVIRONMENT!r}, actor='dedicated', engine='process')\n"
            "named = ray.get(other.info.remote())\n"
            f"held = aenv_ray.create_many({ENVIRONMENT!r}, {SLOTS + 1})\n"
            "infos = ray.get([h.info.remote() for h in held])\n"
        )
        nodes = {"kubernetes": worker.node.node_id, "process": plain.node_id}
        found = driver.value("[[i.engine, i.node_id] for i in infos]")
        assert {engine for engine, _ in found} == nodes.keys()
        assert all(nodes[engine] == node for engine, node in found)
        assert driver.value("[named.engine, named.node_id]") == ["process", plain.node_id]
        errors = raised(
            lambda: driver.do(f"aenv_ray.create({ENVIRONMENT!r}, actor='shared', engine='docker')")
        )
        assert "FabricUnavailable" in errors, errors
        driver.do(
            f"aenv_ray.release_many([*held, other])\n"
            "from aenv_ray.actors.fabric.create_options import CreateOptions\n"
            "from aenv_ray.project.config import DeployChanges\n"
            "from aenv_ray.project import project\n"
            f"changes = DeployChanges(image={PYTHON_IMAGE!r})\n"
            "options = CreateOptions(actor='shared', changes=changes)\n"
            "source = project.resolve('mini-terminal')\n"
            "held = aenv_ray.init().create(source, 3, options)\n"
        )
        assert driver.value("{ray.get(h.info.remote()).engine for h in held} == {'kubernetes'}")
        driver.do("aenv_ray.release_many(held)")
    finally:
        driver.close()
        plain.kill()


def test_workers_of_an_engine_that_the_policy_forbids_get_no_instances(
    pods: PodNodes, worker: Worker, variables: dict[str, str | None]
) -> None:
    """However empty they are: the instances would be refused there."""
    allowed = {"AENV_ALLOW_ENGINES": "kubernetes"}
    plain = pods.nodes.add(slots=2 * SLOTS, labels={"aenv-ray.io/engine": "process"}, **allowed)
    driver = Console({**variables, **allowed, "AENV_ENGINE": None})
    try:
        driver.do("aenv_ray.init()")
        for actor in ("shared", "dedicated"):
            driver.do(
                f"held = aenv_ray.create_many({ENVIRONMENT!r}, 2, actor={actor!r})\n"
                "infos = ray.get([h.info.remote() for h in held])\n"
                "aenv_ray.release_many(held)\n"
            )
            found = driver.value("[[i.engine, i.node_id] for i in infos]")
            assert found == [["kubernetes", worker.node.node_id]] * 2
    finally:
        driver.close()
        plain.kill()


@pytest.mark.redis
def test_a_service_in_pods(pods: PodNodes, worker: Worker, console: Console) -> None:
    """Its port is reached through the gateway, its storage is a claim, and both go with it."""
    data_port = free_port()
    console.do(
        "from aenv_ray import serve\n"
        "from aenv_ray.hub import hub_actor\n"
        "from aenv_ray.hub.client import blocking\n"
        "from aenv_ray.hub.records import Role\n"
        "from aenv_ray.serve.gateway import deployment\n"
        "from aenv_ray.serve.gateway.settings import GatewaySettings\n"
        f"deployment.deploy(GatewaySettings(port={free_port()}, mcp_port={data_port}))\n"
        "token, _ = blocking(hub_actor.ensure_hub().create_token(Role.PUBLISHER, 'ann'))\n"
        f"serve.deploy({ENVIRONMENT!r}, name='box', owner='ann', engine='kubernetes',\n"
        "    port=8123, enable_storage=True, storage_size='1Gi', mount_path='/data')\n"
    )
    assert len(pods.sandboxes_of(worker)) == 1
    (claim,) = pods.kubernetes.cluster.objects("persistentvolumeclaims")
    assert claim["spec"]["resources"]["requests"]["storage"] == "1Gi"
    command = (
        "echo kept > /data/kept; cd /data; nohup python3 -m http.server 8123 >/dev/null 2>&1 &"
    )
    message = {
        "jsonrpc": "2.0", "id": 1, "method": "tools/call",
        "params": {"name": "execute_command", "arguments": {"command": command}},
    }  # fmt: skip
    headers = ACCEPT | {"Authorization": f"Bearer {console.value('token')}"}
    url = f"http://127.0.0.1:{data_port}/services/box"
    with httpx.Client(headers=headers, timeout=WIDE_S) as http:
        answer = http.post(f"{url}/mcp", json=message)
        assert answer.json()["result"]["isError"] is False, answer.text
        eventually(lambda: http.get(f"{url}/ports/8123/kept").text == "kept\n", WITHIN_S)
        assert http.get(f"{url}/ports/8124/").status_code == 404
    console.do("serve.remove('box', delete_storage=True)")
    eventually_empty(lambda: pods.sandboxes_of(worker), WITHIN_S)
    assert pods.kubernetes.cluster.objects("persistentvolumeclaims") == []
    console.do("deployment.undeploy()\nimport ray.serve\nray.serve.shutdown()\nhub_actor.end_hub()")


@pytest.mark.redis
def test_a_worker_has_a_published_version_of_the_head(
    pods: PodNodes, worker: Worker, console: Console, tmp_path: Path
) -> None:
    """The directory of archives is the head's alone."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "tools.py").write_text("# none\n")
    (tmp_path / "config.json").write_text('{"name": "published", "version": "1.0.0"}')
    console.do(
        "from pathlib import Path\n"
        "from aenv_ray.project import project\n"
        "from aenv_ray.actors.fabric import references\n"
        "from aenv_ray.hub import hub_actor\n"
        "from aenv_ray.actors.ray_shell.remote_tasks import on_a_worker\n"
        "from aenv_ray.hub.client import blocking\n"
        "from aenv_ray.config import settings\n"
        "from aenv_ray.hub.artifacts import open_artifact_store\n"
        "from aenv_ray.hub.records import EnvironmentVersion\n"
        "async def publish(source):\n"
        "    store, archive = open_artifact_store(settings()), source.archive()\n"
        "    digest = await store.put(archive)\n"
        "    await hub_actor.ensure_hub().push(EnvironmentVersion(name='published',\n"
        "        version='1.0.0', digest=source.digest, archive=digest,\n"
        "        archive_bytes=len(archive), config={}))\n"
        f"source = project.load(Path({str(tmp_path)!r}))\n"
        "blocking(publish(source))\n"
        "def look():\n"
        "    try:\n"
        "        return str(references.resolve_environment('published', aenv_ray.init).path)\n"
        "    except aenv_ray.AenvError as exc:\n"
        "        return type(exc).__name__\n"
    )

    def looked() -> Any:
        return console.value("on_a_worker(look, ('aenv-ray.io/engine', 'kubernetes'), 60)")

    found = pods.nodes.root / worker.pod / "projects" / console.value("source.digest")
    assert looked() == str(found)
    for lost in (found, pods.nodes.root / "d" / "artifacts"):
        shutil.rmtree(lost)
    assert looked() == "ArtifactNotFound"
    console.do("hub_actor.end_hub()")
