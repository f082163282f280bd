"""What pods add to the engine contract: refusals in words, causes of death, what the API does."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from aenv_ray.engines.base import EndCause, Sandbox
from aenv_ray.engines.kubernetes import client, manifest, names, pod_status
from aenv_ray.engines.kubernetes import engine as kubernetes_engine
from aenv_ray.engines.kubernetes import pods as kubernetes_pods
from aenv_ray.engines.kubernetes.engine import KubernetesEngine
from aenv_ray.engines.kubernetes.permissions import Access
from aenv_ray.engines.kubernetes.pod_instance import open_authenticated
from aenv_ray.engines.kubernetes.pods import PodJanitor
from aenv_ray.errors import (
    CapacityExceeded,
    ConfigError,
    FabricUnavailable,
    InsideCause,
    PolicyRefused,
    SandboxDiedInside,
    SandboxLost,
    SandboxStartFailed,
)
from aenv_ray.ids import HostId
from aenv_ray.policy import STRICT, Policy
from aenv_ray.project.storage import StorageMount
from aenv_ray.testing.contract_bench import Bench, call, evaluate, eventually, execute, value_of
from tests.contract.engines import end_of, engine_on
from tests.contract.kubernetes.kubernetes_node import RAY_POD, KubernetesNode
from tests.contract.processes import naming
from tests.emulators.kubernetes.node import OPENSSL_CONF, SHELL_IMAGE, VOLUME_IMAGE, Delays

pytestmark = pytest.mark.namespaces

_NO_EGRESS: Final = {
    "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
    "metadata": {"name": "sandboxes"},
    "spec": {"podSelector": {"matchLabels": {names.NETWORK: "none"}},
             "policyTypes": ["Egress"], "egress": []},
}  # fmt: skip

WITHIN_S = 60.0


@pytest.fixture(scope="module")
def node() -> Iterator[KubernetesNode]:
    with KubernetesNode() as node:
        yield node


@pytest.fixture
def own_node() -> Iterator[KubernetesNode]:
    """Yield a cluster of one test, which may break it."""
    with KubernetesNode() as node:
        yield node


@pytest.fixture
async def bench(node: KubernetesNode, tmp_path: Path) -> AsyncIterator[Bench]:
    async with engine_on(node) as engine:
        yield Bench(engine, tmp_path)
    await eventually(lambda: not node.left_over(), "nothing is left", WITHIN_S)


# --- what is in the API ---------------------------------------------------------------------------


async def test_no_secret_is_in_the_api_or_in_the_nodes_log(
    bench: Bench, node: KubernetesNode
) -> None:
    """Invariant 10: the right to list pods reveals no variables and no keys of pods."""
    sandbox = await bench.start(environment_variables={"TOKEN": "hunter2"})
    name = node.pod(sandbox.instance_id)
    assert (await execute(sandbox, "echo $TOKEN")).text() == "hunter2\n"
    (pod,) = [pod for pod in node.sandboxes() if pod["metadata"]["name"] == name]
    engine = bench.engine
    assert isinstance(engine, KubernetesEngine)
    nonce = pod["metadata"]["annotations"][names.NONCE]
    for secret in ("hunter2", engine._key.secret(name, nonce, "boot").hex()):
        assert secret not in json.dumps(pod)
        assert secret not in node.cluster.node.log(name, "instance")


async def test_an_instance_cannot_read_the_key_of_its_own_pod(bench: Bench) -> None:
    """Invariant 8: what runs inside cannot pass for the host, and call rewards."""
    sandbox = await bench.start()
    found = await execute(sandbox, "cat /proc/1/environ /proc/1/mem; ls /proc/1/fd; id -u")
    assert found.stdout.split() == [b"65534"]
    assert found.stderr.count(b"Permission denied") == 3


async def test_requests_without_the_key_are_refused(bench: Bench, node: KubernetesNode) -> None:
    """Invariant 7: a pod's address is others' too."""
    sandbox = await bench.start()
    (pod,) = node.sandboxes()
    address = pod["status"]["podIP"]
    with pytest.raises(OSError, match="closed the connection"):
        await open_authenticated(address, manifest.PORT, bytes(32), {"kind": "door"})
    assert await value_of(sandbox, "echo", text="alive") == "alive"


async def test_a_host_trusts_no_server_that_only_has_the_address_of_its_pod() -> None:
    """A pod that is gone may have left its address to another, which cannot pass for it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address, port = server.getsockname()

        def pretend() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(bytes(16))
                sock.recv(1 << 16)
                sock.sendall(bytes(32))
                sock.recv(1 << 16)

        pretending = asyncio.create_task(asyncio.to_thread(pretend))
        with pytest.raises(ConnectionRefusedError, match="the process at this address does"):
            await open_authenticated(address, port, bytes(32), {"kind": "door"})
        await pretending


async def test_a_hidden_project_is_removed_once_its_code_is_loaded(bench: Bench) -> None:
    """It contains solutions and graders."""
    dual = {"hideSource": True, "podTemplate": "DualContainer"}
    for deploy in ({"hideSource": True}, dual):
        sandbox = await bench.start(bench.contract_project(deploy), datasource=SHELL_IMAGE)
        assert await value_of(sandbox, "echo", text="loaded") == "loaded"
        assert (await execute(sandbox, "find /project -mindepth 1")).text() == ""
    shown = await bench.start()
    assert "contract_tools.py" in (await execute(shown, "find /project")).text()


async def test_project_and_runtime_are_read_only_for_root(bench: Bench) -> None:
    """Invariant 14: it owns them, and has no capability to mount them otherwise."""
    sandbox = await bench.start(bench.contract_project({"container": {"user": "root"}}))
    assert (await execute(sandbox, "id -u")).text() == "0\n"
    for place in ("/project", "/.aenv", "/.aenv/runtime"):
        command = f"mount -o remount,rw,bind {place}; chmod 777 {place}; touch {place}/x"
        told = (await execute(sandbox, command)).stderr
        assert b"touch: cannot touch" in told
        assert told.count(b"Read-only") == 2, told
    assert any("the image's Python" in words for words in sandbox.isolation.missing)


async def test_the_unpacker_of_a_pod_has_ended(bench: Bench, node: KubernetesNode) -> None:
    """Invariant 14: it may write what the others load, and is gone before an agent acts."""
    sandbox = await bench.start()

    def state() -> dict[str, Any]:
        (pod,) = node.sandboxes()
        rows = {row["name"]: row["state"] for row in pod["status"]["containerStatuses"]}
        assert "running" in rows[names.MAIN_CONTAINER]
        state: dict[str, Any] = rows[names.UNPACKER_CONTAINER]
        return state

    await eventually(lambda: "terminated" in state(), "it has ended", WITHIN_S)
    assert state()["terminated"]["exitCode"] == 0
    assert await value_of(sandbox, "echo", text="alive") == "alive"


async def test_pods_go_with_the_pod_of_their_host(own_node: KubernetesNode, tmp_path: Path) -> None:
    """Invariant 3: also when the host can do nothing any more."""
    engine = own_node.engine(HostId("host"))
    sandbox = await Bench(engine, tmp_path).start()
    own_node.cluster.delete("pods", RAY_POD)
    assert await end_of(sandbox)
    await eventually(lambda: not own_node.left_over(), "nothing is left", WITHIN_S)
    await engine.close()


async def test_a_released_pod_has_succeeded(node: KubernetesNode, tmp_path: Path) -> None:
    """Monitoring reports pods that failed and their warnings, and a release is no failure."""
    async with engine_on(node) as engine:
        bench = Bench(engine, tmp_path)
        plain = await bench.start()
        dual = bench.contract_project({"podTemplate": "DualContainer"})
        for sandbox in (plain, await bench.start(dual, datasource=SHELL_IMAGE)):
            name = node.pod(sandbox.instance_id)
            await engine.stop([sandbox.instance_id])
            await eventually(lambda: engine.ending() == 0, "its node has ended it", WITHIN_S)
            assert node.cluster.phases[name] == "Succeeded"
            assert node.cluster.warnings(name) == []


async def test_a_pull_secret_that_does_not_exist_is_what_a_node_warns_of(
    node: KubernetesNode, tmp_path: Path
) -> None:
    """So `aenv cluster apply` creates the one that it names."""
    async with engine_on(node, pull_secrets=("absent",)) as engine:
        sandbox = await Bench(engine, tmp_path).start()
        name = node.pod(sandbox.instance_id)
        assert node.cluster.warnings(name) == ["FailedToRetrieveImagePullSecret"]


async def test_a_pod_at_its_deadline_has_succeeded(node: KubernetesNode, tmp_path: Path) -> None:
    """Its end was asked for, as that of a released one."""
    async with engine_on(node) as engine:
        sandbox = await Bench(engine, tmp_path).start()
        name = node.pod(sandbox.instance_id)
        await engine.set_deadline(sandbox.instance_id, 0.0)
        assert "TTL" in await end_of(sandbox)
        await eventually(lambda: name in node.cluster.phases, "its phase is known", WITHIN_S)
        await eventually(lambda: not node.left_over(), "it is gone", WITHIN_S)
        assert node.cluster.phases[name] == "Succeeded"


async def test_a_sandbox_cannot_end_its_pod_like_a_release(bench: Bench) -> None:
    """Invariant 14: process 1 obeys SIGTERM, but only from outside."""
    sandbox = await bench.start()
    for signal in ("TERM", "INT", "KILL", "STOP"):
        await execute(sandbox, f"kill -{signal} 1")
    assert await evaluate(sandbox, _SIGTERM_FROM_NOBODY) == 0, "it was sent"
    assert await value_of(sandbox, "echo", text="alive") == "alive"


_SIGTERM_FROM_NOBODY = """
import ctypes, platform, struct, time
rt_sigqueueinfo = {"x86_64": 129, "aarch64": 138}[platform.machine()]
info = struct.pack("5i", 15, 0, -1, 0, 0).ljust(128, b"\\0")  # SI_QUEUE, of process 0
result = ctypes.CDLL(None).syscall(rt_sigqueueinfo, 1, 15, info)
time.sleep(0.5)
"""


async def test_an_invalid_report_of_a_project_fails_its_start(bench: Bench) -> None:
    """Its pod ends, and the host still hears of the others."""
    source = (
        "import os, socket\n"
        "open('/dev/termination-log', 'w').write('[' * 4096)\n"
        "for fd in map(int, os.listdir('/proc/self/fd')):\n"
        "    try: socket.socket(fileno=os.dup(fd)).send(b'[' * 5000 + b'\\n')\n"
        "    except OSError: pass\n"
    )
    with pytest.raises(SandboxStartFailed, match="a malformed report of its start"):
        await bench.start(bench.project({"tools.py": source}))
    assert await value_of(await bench.start(), "echo", text="next") == "next"


async def test_a_release_does_not_wait_for_the_node(
    own_node: KubernetesNode, tmp_path: Path
) -> None:
    """It is answered once the API has accepted it, and the place is used until the pod is gone."""
    async with engine_on(own_node) as engine:
        sandbox = await Bench(engine, tmp_path).start()
        own_node.cluster.slow_down(Delays(end_s=1.0))
        await engine.stop([sandbox.instance_id])
        assert engine.ending() == 1
        assert own_node.sandboxes()[0]["metadata"]["deletionTimestamp"]
        assert await engine.running() == []
        await engine.stop([sandbox.instance_id])  # again, and this time nothing is known of it
        await eventually(lambda: engine.ending() == 0, "the place is free", WITHIN_S)
        assert own_node.left_over() == []


async def test_a_pod_that_cannot_be_ended_does_not_keep_others_alive(
    own_node: KubernetesNode, tmp_path: Path
) -> None:
    """Invariant 3: the failure is the API's, and the other pods of the release end."""
    async with engine_on(own_node) as engine:
        bench = Bench(engine, tmp_path)
        ids = [(await bench.start()).instance_id for _ in range(4)]
        own_node.cluster.fail(403)
        with pytest.raises(FabricUnavailable):
            await engine.stop(ids)
        assert engine.ending() == 3, "each takes its place until its node has ended it"
        await eventually(lambda: engine.ending() == 0, "the others have ended", WITHIN_S)
        assert len(own_node.sandboxes()) == 1
        await engine.stop(ids)
        await eventually(lambda: own_node.left_over() == [], "nothing is left", WITHIN_S)


async def test_an_overloaded_api_fails_a_batch_at_one_deadline(
    own_node: KubernetesNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 9: the requests that waited for their turn do not each wait a minute more."""
    monkeypatch.setattr(client, "_TRY_S", 1.5)
    async with engine_on(own_node) as engine:
        bench = Bench(engine, tmp_path)
        own_node.cluster.fill_nodes(True)
        await engine.running()
        own_node.cluster.limit_rate(0)
        found = await engine.start_many([bench.spec() for _ in range(64)])
        assert {type(each) for each in found} == {FabricUnavailable}
        assert "429" in str(found[0])
        assert own_node.cluster.refused <= 3 * 64, "they ask no more often than they are told"
        own_node.cluster.limit_rate(None)
        now = asyncio.get_running_loop().time
        await eventually(lambda: engine._client._resumes_at < now(), "the delay has passed")


async def test_a_pod_ends_when_its_host_stays_away(
    node: KubernetesNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 3; the janitor of another host of that pod removes what is left in the API."""
    engine = node.engine(HostId("host-that-dies"), grace_s=2.0)
    sandbox = await Bench(engine, tmp_path).start()
    await engine.close()
    await eventually(lambda: not node.cluster.running(), "its processes ended", WITHIN_S)
    (pod,) = node.sandboxes()
    message = pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"]
    assert json.loads(message)["cause"] == "its host is gone"
    assert pod_status.end_cause(pod).text == "its host is gone"
    async with engine_on(node) as other:
        await other.start_many([])
        pods = other._pods_or_none
        assert pods is not None
        janitor = PodJanitor(pods, names.owner_selector(node.owner_uid), lambda _: False)
        janitor.stop()
        await janitor.sweep()
        assert node.sandboxes(), "its own host may want to see it"
        monkeypatch.setattr(kubernetes_pods, "LEFT_TO_HOST_S", -1.0)
        await janitor.sweep()
        assert node.sandboxes() == []
        with pytest.raises(SandboxLost):
            await other.attach(sandbox.instance_id)


async def test_a_host_that_returns_learns_of_a_pod_that_ended(
    node: KubernetesNode, tmp_path: Path
) -> None:
    engine = node.engine(HostId("host-that-comes-back"))
    sandbox = await Bench(engine, tmp_path).start()
    await engine.close()
    node.cluster.kill(node.pod(sandbox.instance_id))
    await eventually(lambda: not node.cluster.running(), "it ended", WITHIN_S)
    again = node.engine(HostId("host-that-comes-back"))
    with pytest.raises(SandboxLost, match="SIGKILL"):
        await again.attach(sandbox.instance_id)
    assert node.sandboxes() == []
    await again.close()


async def test_a_host_that_returns_learns_that_a_pod_was_ended_from_inside(
    node: KubernetesNode, tmp_path: Path
) -> None:
    """Invariant 14: process 1 has written it, and does not end as if it had been killed itself."""
    engine = node.engine(HostId("host-that-comes-back"))
    sandbox = await Bench(engine, tmp_path).start()
    await execute(sandbox, "p=$PPID; (sleep 2; kill -9 $p) >/dev/null 2>&1 </dev/null &")
    await engine.close()
    await eventually(lambda: not node.cluster.running(), "it ended", WITHIN_S)
    again = node.engine(HostId("host-that-comes-back"))
    with pytest.raises(SandboxDiedInside) as raised:
        await again.attach(sandbox.instance_id)
    assert raised.value.died_of is InsideCause.SIGNAL
    await again.close()


async def test_a_deadline_beyond_the_pods_own_is_refused_with_the_way_out(
    node: KubernetesNode, tmp_path: Path
) -> None:
    async with engine_on(node, longest_life_s=1200.0) as engine:
        bench = Bench(engine, tmp_path)
        sandbox = await bench.start()
        await engine.set_deadline(sandbox.instance_id, bench.now() + 1000.0)
        with pytest.raises(ConfigError, match="1200 s") as raised:
            await engine.set_deadline(sandbox.instance_id, bench.now() + 2000.0)
        assert "AENV_KUBERNETES_LIFE" in str(raised.value.hint)
        (listed,) = await engine.running()
        assert listed.deadline < bench.now() + 1000.0


# --- why it died ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"reason": "Evicted", "message": "The node was low on memory"}, "low on memory"),
        ({"reason": "NodeShutdown", "message": "shut down"}, "its node was lost: shut down"),
    ],
)
async def test_the_error_says_that_a_node_ended_the_pod(
    bench: Bench, node: KubernetesNode, status: dict[str, str], words: str
) -> None:
    """Invariant 2."""
    sandbox = await bench.start()
    node.cluster.end_with(node.pod(sandbox.instance_id), status)
    assert words in await end_of(sandbox)


_DISRUPTED: dict[str, Any] = {
    "reason": "Terminated",
    "message": "Pod was terminated in response to imminent node shutdown.",
    "conditions": [
        {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"},
    ],
}


@pytest.mark.parametrize(
    "status",
    [
        pytest.param(_DISRUPTED, id="node shutdown"),
        pytest.param({"reason": "Evicted", "message": "The node was low on memory"}, id="eviction"),
        pytest.param({"reason": "Preempting", "message": "for a critical pod"}, id="preemption"),
    ],
)
@pytest.mark.parametrize("template", ["SingleContainer", "DualContainer"])
async def test_a_sigterm_that_the_node_explains_is_no_outcome(
    bench: Bench, node: KubernetesNode, status: dict[str, Any], template: str
) -> None:
    """Invariant 2: the explanation comes only when all containers have ended."""
    project = bench.contract_project({"podTemplate": template})
    image = {"datasource": SHELL_IMAGE} if template == "DualContainer" else {}
    sandbox = await bench.start(project, **image)
    node.cluster.terminate(node.pod(sandbox.instance_id), status)
    assert (await _end_cause_of(sandbox)).inside is None


async def test_a_sigterm_before_the_loss_of_its_node_is_no_outcome(
    bench: Bench, node: KubernetesNode
) -> None:
    """Invariant 2: the pod reports its end, and the API later deletes it with its node."""
    sandbox = await bench.start()
    name = node.pod(sandbox.instance_id)
    node.cluster.terminate(name, {})
    await eventually(lambda: node.cluster.phases[name] == "Succeeded", "it has ended", WITHIN_S)
    assert await bench.running() == set()
    assert sandbox.end_cause is None, "it waits for a reason"
    with node.cluster.edited("pods", name) as pod:
        pod["status"]["conditions"] = [
            {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
        ]
    cause = await _end_cause_of(sandbox)
    assert cause.inside is None
    assert "no longer answers" in cause.text


async def test_a_sigterm_without_a_reason_is_an_outcome(
    bench: Bench, node: KubernetesNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 14: also for who renews it meanwhile, or waits for its TTL."""
    monkeypatch.setattr(kubernetes_engine, "NODE_LOST_S", 1.0)
    sandbox = await bench.start()
    name = node.pod(sandbox.instance_id)
    node.cluster.terminate(name, {})
    await eventually(lambda: node.cluster.phases[name] == "Succeeded", "it has ended", WITHIN_S)
    with pytest.raises(SandboxDiedInside):
        await bench.engine.set_deadline(sandbox.instance_id, bench.now() + 60.0)
    assert (await _end_cause_of(sandbox)).inside is InsideCause.SIGNAL

    monkeypatch.undo()
    monkeypatch.setattr(kubernetes_engine, "_OVERDUE_S", 0.0)
    sandbox = await bench.start()
    await bench.engine.set_deadline(sandbox.instance_id, bench.now() + 2.0)
    node.cluster.terminate(node.pod(sandbox.instance_id), {})
    assert (await _end_cause_of(sandbox)).inside is InsideCause.SIGNAL


async def test_a_sigterm_is_an_outcome_if_the_pod_is_deleted_afterwards(
    bench: Bench, node: KubernetesNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 14: by the janitor of another host of the same Ray pod, or by a cron job."""
    async with engine_on(node) as other:
        await other.start_many([])
        assert other._pods_or_none is not None
        everywhere = names.owner_selector(node.owner_uid)
        janitor = PodJanitor(other._pods_or_none, everywhere, lambda _: False)
        janitor.stop()
        sandbox = await bench.start()
        name = node.pod(sandbox.instance_id)
        node.cluster.terminate(name, {})
        await eventually(lambda: node.cluster.phases[name] == "Succeeded", "it ended", WITHIN_S)
        for _ in range(2):
            await janitor.sweep()
        assert node.sandboxes(), "its own host looks for the reason"
        assert sandbox.end_cause is None
        monkeypatch.setattr(kubernetes_pods, "LEFT_TO_HOST_S", -1.0)
        monkeypatch.setattr(pod_status, "_CLOCK_SKEW", -timedelta(seconds=1))
        await janitor.sweep()
        assert (await _end_cause_of(sandbox)).inside is InsideCause.SIGNAL


async def test_a_sigterm_is_an_outcome_while_the_api_is_silent(
    own_node: KubernetesNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 14: a host that hears nothing from the API hears of it from process 1."""
    monkeypatch.setattr(kubernetes_engine, "NODE_LOST_S", 1.0)
    async with engine_on(own_node) as engine:
        sandbox = await Bench(engine, tmp_path).start()
        own_node.cluster.silence_watches()
        own_node.cluster.terminate(own_node.pod(sandbox.instance_id), {})
        assert (await _end_cause_of(sandbox)).inside is InsideCause.SIGNAL
        own_node.cluster.break_watches()
        await eventually(lambda: not own_node.left_over(), "nothing is left", WITHIN_S)


async def _end_cause_of(sandbox: Sandbox) -> EndCause:
    await end_of(sandbox)
    assert sandbox.end_cause is not None
    return sandbox.end_cause


async def test_the_error_says_that_a_pod_was_deleted_by_hand(
    bench: Bench, node: KubernetesNode
) -> None:
    """Invariant 2."""
    sandbox = await bench.start()
    node.cluster.delete("pods", node.pod(sandbox.instance_id))
    cause = await _end_cause_of(sandbox)
    assert "deleted by someone other than its host" in cause.text
    assert cause.inside is None
    assert await bench.running() == set()


async def test_the_error_for_a_dead_pod_has_the_end_of_its_log(bench: Bench) -> None:
    source = (
        "import os\nfrom aenv_ray.runtime import register_tool\n"
        "@register_tool\ndef speak_and_die() -> None:\n"
        "    print('last words', flush=True)\n    os._exit(9)\n"
    )
    sandbox = await bench.start(bench.project({"tools.py": source}))
    with pytest.raises(SandboxLost, match="exited with code 9") as raised:
        await call(sandbox, "speak_and_die")
    assert raised.value.message.endswith("last words")


# --- what does not start --------------------------------------------------------------------------


async def test_the_error_names_an_image_that_cannot_be_pulled(
    bench: Bench, node: KubernetesNode
) -> None:
    deploy = {"container": {"image": "nowhere.example/none:1"}}
    with pytest.raises(SandboxStartFailed, match=r"example/none:1.*does not exist") as raised:
        await bench.start(bench.contract_project(deploy))
    assert "AENV_KUBERNETES_PULL_SECRETS" in str(raised.value.hint)
    assert node.sandboxes() == []


async def test_an_image_with_volumes_is_refused_where_isolation_is_required(
    own_node: KubernetesNode, tmp_path: Path
) -> None:
    """Invariant 14: an agent could fill the node's disk there, which then evicts other pods."""
    own_node.cluster.create("networkpolicies", _NO_EGRESS, "networking.k8s.io")
    deploy = {"container": {"image": VOLUME_IMAGE, "readOnlyRoot": True}, "network": "none"}
    async with engine_on(own_node, policy=lambda: Policy(isolation="required")) as engine:
        bench = Bench(engine, tmp_path)
        with pytest.raises(SandboxStartFailed, match=r"volumes \(/data\).*ignore_image"):
            await bench.start(bench.contract_project(deploy))
        dual = bench.contract_project({"podTemplate": "DualContainer", "network": "none"})
        with pytest.raises(SandboxStartFailed, match=r"its sidecar: .*volumes \(/data\)"):
            await bench.start(dual, datasource=VOLUME_IMAGE)
        assert own_node.sandboxes() == []
    async with engine_on(own_node) as engine:
        await Bench(engine, tmp_path).start(bench.contract_project(deploy))


async def test_an_image_without_python_has_commands_and_files(bench: Bench) -> None:
    deploy = {"container": {"image": SHELL_IMAGE}}
    sandbox = await bench.start(bench.contract_project(deploy))
    assert "no python3" in sandbox.start_mode
    assert (await execute(sandbox, "echo hello")).text() == "hello\n"


async def test_a_full_cluster_is_capacity_exceeded_in_the_schedulers_words(
    own_node: KubernetesNode, tmp_path: Path
) -> None:
    own_node.cluster.fill_nodes(True)
    async with engine_on(own_node, schedule_s=1.0) as engine:
        with pytest.raises(CapacityExceeded, match="Insufficient cpu"):
            await Bench(engine, tmp_path).start()
        assert own_node.sandboxes() == []


async def test_a_quota_is_capacity_exceeded(own_node: KubernetesNode, tmp_path: Path) -> None:
    quota = {
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"},
        "spec": {"hard": {"pods": "2"}},
    }  # fmt: skip
    own_node.cluster.create("resourcequotas", quota)
    async with engine_on(own_node) as engine:
        bench = Bench(engine, tmp_path)
        first, second = await engine.start_many([bench.spec(), bench.spec()])
        (refused,) = [each for each in (first, second) if not isinstance(each, Sandbox)]
        assert isinstance(refused, CapacityExceeded)
        assert "exceeded quota: few" in refused.message
        assert refused.retry_after_s > 0


async def test_a_missing_runtime_class_is_the_projects_error(bench: Bench) -> None:
    with pytest.raises(ConfigError, match='RuntimeClass "gone" not found'):
        await bench.start(bench.contract_project({"container": {"runtime": "gone"}}))


async def test_the_error_names_what_a_restricted_namespace_forbids(
    own_node: KubernetesNode, tmp_path: Path
) -> None:
    own_node.cluster.label_namespace({"pod-security.kubernetes.io/enforce": "restricted"})
    async with engine_on(own_node) as engine:
        bench = Bench(engine, tmp_path)
        assert await value_of(await bench.start(), "echo", text="fits") == "fits"
        with pytest.raises(ConfigError, match=r"violates PodSecurity.*runAsNonRoot"):
            await bench.start(bench.contract_project({"container": {"user": "root"}}))


@pytest.mark.parametrize("access", [Access.CREATE_POD, Access.WATCH_PODS, Access.LIST_PODS])
async def test_a_missing_permission_is_named(
    own_node: KubernetesNode, tmp_path: Path, access: Access
) -> None:
    own_node.cluster.granted = {
        (each.value.verb, each.value.resource) for each in Access if each is not access
    }
    async with engine_on(own_node) as engine:
        if access is Access.WATCH_PODS:
            with pytest.raises(FabricUnavailable, match="may not watch pods"):
                await engine.start_many([])
            own_node.cluster.granted = None
            return
        with pytest.raises(FabricUnavailable) as raised:
            await Bench(engine, tmp_path).start()
        verb = access.value.verb
        assert f"may not {verb} pods in namespace aenv" in raised.value.message
        assert f"verb {verb} on pods" in str(raised.value.hint)
        own_node.cluster.granted = None


async def test_a_host_outside_of_any_pod_is_refused(node: KubernetesNode) -> None:
    engine = node.engine(HostId("host"), pod_name="laptop")
    with pytest.raises(FabricUnavailable, match="no pod laptop"):
        await engine.start_many([])
    await engine.close()


# --- the API itself -------------------------------------------------------------------------------


async def test_every_request_is_one_of_those_that_are_listed(
    bench: Bench, node: KubernetesNode
) -> None:
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    grows = {"metadata": {"name": "grows", "annotations": default}, "allowVolumeExpansion": True}
    node.cluster.create("storageclasses", grows, "storage.k8s.io", namespace="")
    storage = StorageMount(
        name="aenv-kept", uid="0" * 16, mount_path="/kept", size_bytes=1 << 30, is_shared=True
    )
    sandbox = await bench.start(storage=storage)
    larger = storage.model_copy(update={"size_bytes": 2 << 30})
    other = await bench.start(storage=larger)
    await bench.engine.set_deadline(sandbox.instance_id, bench.now() + 100.0)
    await sandbox.close()
    await bench.engine.attach(sandbox.instance_id)
    await bench.engine.stop([sandbox.instance_id, other.instance_id])
    await bench.engine.delete_storage(larger)
    made = set(node.cluster.calls)
    assert made == {(access.value.verb, access.value.resource) for access in Access}


async def test_a_throttled_api_is_tried_again(bench: Bench, node: KubernetesNode) -> None:
    await bench.engine.start_many([])
    node.cluster.throttle(2)
    sandbox = await bench.start()
    assert await value_of(sandbox, "echo", text="late") == "late"


@pytest.mark.parametrize("forget", [False, True], ids=["broken", "too old"])
async def test_a_watch_that_broke_misses_nothing(
    bench: Bench, node: KubernetesNode, forget: bool
) -> None:
    sandbox = await bench.start()
    node.cluster.break_watches(forget=forget)
    node.cluster.kill(node.pod(sandbox.instance_id))
    assert "SIGKILL" in await end_of(sandbox)
    assert await value_of(await bench.start(), "echo", text="again") == "again"


async def test_a_watch_that_falls_silent_is_opened_again(
    own_node: KubernetesNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the loss of a node or firewall in between: its connection remains open."""
    monkeypatch.setattr(client, "_SILENCE_S", 1.0)
    async with engine_on(own_node) as engine:
        await engine.running()
        own_node.cluster.silence_watches()
        sandbox = await Bench(engine, tmp_path).start()
        assert await value_of(sandbox, "echo", text="heard") == "heard"


async def test_a_pod_that_cannot_be_read_hides_no_other(
    own_node: KubernetesNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its publisher has written what the API says of it."""
    async with engine_on(own_node) as engine:
        bench = Bench(engine, tmp_path)
        first = await bench.start()

        def fail(pod: dict[str, Any], gone: bool) -> None:
            if pod["metadata"]["name"] == own_node.pod(first.instance_id):
                raise RecursionError

        pods = engine._pods_or_none
        assert pods is not None
        hear = pods._on_pod
        monkeypatch.setattr(pods, "_on_pod", lambda *told: (fail(*told), hear(*told)))
        own_node.cluster.kill(own_node.pod(first.instance_id))
        assert await value_of(await bench.start(), "echo", text="next") == "next"


async def test_one_watch_is_enough_for_many(own_node: KubernetesNode, tmp_path: Path) -> None:
    async with engine_on(own_node) as engine:
        bench = Bench(engine, tmp_path)
        started = await engine.start_many([bench.spec() for _ in range(3)])
        assert all(isinstance(each, Sandbox) for each in started)
        calls = own_node.cluster.calls
        assert calls.count(("watch", "pods")) == 1
        assert calls.count(("get", "pods")) == 1  # the host's own


@pytest.mark.parametrize("reference", ["sha256:" + "0a" * 32, "0a0a0a0a0a0a"])
async def test_an_image_id_is_refused_where_images_are_restricted(
    node: KubernetesNode, tmp_path: Path, reference: str
) -> None:
    """Invariant 15: a kubelet may take it for an image of another owner that is on its node."""
    async with engine_on(node, policy=lambda: STRICT) as engine:
        bench = Bench(engine, tmp_path)
        deploy = {"network": "none", "container": {"image": reference}}
        with pytest.raises(PolicyRefused, match="by its id"):
            await bench.start(bench.contract_project(deploy))


# --- networks and the sidecar ---------------------------------------------------------------------


async def test_a_policy_of_the_namespace_makes_a_network_a_fact(
    own_node: KubernetesNode, tmp_path: Path
) -> None:
    """Invariant 7."""
    own_node.cluster.create("networkpolicies", _NO_EGRESS, "networking.k8s.io")
    async with engine_on(own_node) as engine:
        bench = Bench(engine, tmp_path)
        assert (await bench.start()).isolation.network == "none"


async def test_where_isolation_is_required_a_pod_without_a_network_policy_is_refused(
    own_node: KubernetesNode, tmp_path: Path
) -> None:
    """Invariant 7: its code could reach Ray, and the label on it would say otherwise."""
    async with engine_on(own_node, policy=lambda: STRICT) as engine:
        with pytest.raises(PolicyRefused, match="no NetworkPolicy of namespace") as raised:
            await Bench(engine, tmp_path).start()
        assert "AENV_ISOLATION=auto" in str(raised.value.hint)
    assert own_node.sandboxes() == []


async def test_a_sidecar_shares_files_and_is_reached_through_the_host(
    bench: Bench,
) -> None:
    source = (
        "from aenv_ray.runtime import register_tool, sidecar\n"
        "@register_tool\ndef beside(command: str) -> str:\n"
        "    return sidecar.exec(command).text()\n"
        "@register_tool\ndef share(text: str) -> None:\n"
        "    open('/shared/note', 'w').write(text)\n"
    )
    config = {"deployConfig": {"podTemplate": "DualContainer"}}
    sandbox = await bench.start(bench.project({"tools.py": source}, config), datasource=SHELL_IMAGE)
    await value_of(sandbox, "share", text="between us")
    assert await value_of(sandbox, "beside", command="cat /shared/note") == "between us"
    for path in ("runtime/forged.py", "lib/forged.py", "forged.py"):  # invariant 14
        command = f"echo forged > /.aenv/{path} || echo refused"
        assert await value_of(sandbox, "beside", command=command) == "refused\n"
    # The agent may change what a variable of the image names: only commands have it.
    assert await value_of(sandbox, "beside", command="echo $OPENSSL_CONF") == f"{OPENSSL_CONF}\n"
    pods = naming("/.aenv-carried/python/ld.so")
    assert len(pods) >= 2, "process 1, and that of the instance"
    given = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in pods]
    assert not any(f"OPENSSL_CONF={OPENSSL_CONF}".encode() in variables for variables in given)
    with pytest.raises(SandboxLost, match="sidecar"):
        await value_of(sandbox, "beside", command="kill -9 -1")
