"""Workers are replaced one after the other under load, as an upgrade and `kubectl drain` do it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from aenv_ray.cli.local.free_ports import free_port
from tests.ray.faults import PROBE, eventually, eventually_empty, kill
from tests.ray.nodes.loads import LOADS, LONG_S, work_on
from tests.ray.nodes.nodes import Console, Node, Nodes, own_root, raised
from tests.ray.nodes.pod_nodes import drain_hook
from tests.ray.services.services import ACCEPT

pytestmark = [pytest.mark.redis, pytest.mark.namespaces, pytest.mark.timeout(900)]

SLOTS = 8
GATEWAY = """
from aenv_ray.hub import hub_actor
from aenv_ray.hub.client import blocking
from aenv_ray.hub.records import Role
from aenv_ray.serve.gateway import deployment
from aenv_ray.serve.gateway.settings import GatewaySettings
deployment.deploy(GatewaySettings(port={0}, mcp_port={0}, on_head=True))
token = blocking(hub_actor.ensure_hub().create_token(Role.PUBLISHER, "ann"))[0]
http = httpx.Client(base_url="http://127.0.0.1:{0}", timeout=60,
                    headers={1!r} | {{"Authorization": f"Bearer {{token}}"}})
CALL = {{"jsonrpc": "2.0", "id": 1, "method": "tools/call",
         "params": {{"name": "execute_command", "arguments": {{"command": "true"}}}}}}
def call_by_http():
    answer = http.post("/services/duo/mcp", json=CALL).raise_for_status()
    assert answer.json()["result"]["isError"] is False, answer.text
"""
SERVICES = """
desk = serve.deploy("mini-terminal", name="desk", owner="ann")
duo = serve.deploy("mini-terminal", name="duo", owner="ann", replicas=2)
notes = serve.deploy("mini-terminal", name="notes", owner="ann", engine="process",
                     enable_storage=True, storage_size="1Mi", mount_path="/kept")
def in_notes(command, timeout_s=100):
    answer = notes.call_tool.remote("execute_command", {"command": command})
    return answer.result(timeout_s=timeout_s).text()
in_notes("echo kept > /kept/file")
def read_notes():
    assert "kept" in in_notes("cat /kept/file")
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A head, which takes no instances because others declare slots."""
    with own_root("aenv-u") as root:
        cluster = Nodes(root, root / "r")
        try:
            yield cluster
        finally:
            cluster.close()


@pytest.fixture(scope="module")
def first(nodes: Nodes) -> Node:
    return nodes.add(slots=SLOTS)


@pytest.fixture
def driver(nodes: Nodes, first: Node) -> Iterator[Console]:
    del first
    open_to_probes = {"AENV_POLICY": "open"}  # although it deploys a gateway
    console = Console({"RAY_ADDRESS": nodes.address, **open_to_probes})
    console.do(f"PROBE = {str(PROBE)!r}\naenv_ray.init()\n{LOADS}")
    yield console
    console.close()


def drain(nodes: Nodes, node: Node) -> subprocess.CompletedProcess[str]:
    """Run what a worker's pod runs before it ends."""
    return subprocess.run(
        drain_hook(node.node_id),
        env={**os.environ, "RAY_ADDRESS": nodes.address},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip


def test_services_and_samplings_go_on_while_every_worker_is_replaced(
    nodes: Nodes, first: Node, driver: Console
) -> None:
    """No call of a service fails, no episode is lost; what runs on a worker ends by its deadline.

    A service whose storage has one writer pauses, and keeps its files.
    """
    workers = [first, nodes.add(slots=SLOTS)]
    driver.do(GATEWAY.format(free_port(), ACCEPT))
    driver.do(SERVICES)
    driver.do("run, sampler = sample('nodes', 80)")
    driver.do(
        "uses, duos, reads = Load(use_service), Load(lambda: use_service(duo)), Load(read_notes)"
    )
    driver.do("asks, creates = Load(call_by_http), Load(create)")
    loads = ("uses", "duos", "reads", "asks", "creates")
    work_on(driver, 3, *loads)
    vacated = []
    for worker in workers:
        driver.do(f"kept = aenv_ray.create(PROBE, actor='shared', near={worker.node_id!r}, ttl=20)")
        done = drain(nodes, worker)
        assert done.returncode == 0, done.stderr
        assert "drained" in done.stdout
        assert worker.sandboxes() == []
        if driver.value(f"{worker.node_id!r} in ray_api.drained_by_ray()"):
            undrain = f"aenv_ray.init().undrain({worker.node_id!r})"
            assert "ConfigError" in raised(lambda source=undrain: driver.do(source))  # type: ignore[misc]
            vacated.append(worker)
        worker.kill()
        eventually_empty(worker.leftovers)
        replacement = nodes.add(slots=SLOTS)
        work_on(driver, 3, *loads)
    assert vacated, "replicas were on a worker"
    for load in loads:
        assert driver.value(f"{load}.end()") == [False, []], load
    eventually(lambda: not driver.value("sampler.is_alive()"), LONG_S)
    assert (
        driver.value("[(e.status.value, e.attempts) for e in run.episodes]")
        == [["completed", 1]] * 80
    )
    refused = raised(
        lambda: driver.do(f"aenv_ray.init().drain({nodes.head.node_id!r}, is_leaving=True)")
    )
    assert "ConfigError" in refused
    driver.do("for name in ('desk', 'duo', 'notes'):\n    serve.remove(name, delete_storage=True)")
    driver.do(f"state = aenv_ray.init().drain({replacement.node_id!r}, is_leaving=True)")
    assert driver.value("str(aenv_ray.init().undrain(state.node_id).status)") == "ready", (
        "no service has moved from there"
    )


def test_a_replica_whose_storage_is_used_on_another_node_leaves_its_own(
    nodes: Nodes, driver: Console
) -> None:
    """Serve starts its successor first, which waits until the sandbox gives the storage up."""
    worker = nodes.add(slots=SLOTS)
    driver.do(
        f"node = {worker.node_id!r}\n"
        "aenv_ray.init().drain(node)  # sandboxes start elsewhere, replicas anywhere\n"
        "for number in range(20):\n"
        "    name = f'held{number}'\n"
        "    held = serve.deploy('mini-terminal', name=name, owner='ann', engine='process',\n"
        "                        enable_storage=True, storage_size='1Mi', mount_path='/kept')\n"
        "    (actor,) = [row for row in ray.util.list_named_actors(all_namespaces=True)\n"
        "                if f'{name}#' in row['name']]\n"
        "    if ray_api.node_of(ray.get_actor(**actor)) == node:\n"
        "        break\n"
        "    serve.remove(name, delete_storage=True)\n"
        "def run(command):\n"
        "    answer = held.call_tool.remote('execute_command', {'command': command})\n"
        "    return answer.result(timeout_s=100).text()\n"
        "run('echo kept > /kept/file')\n"
        "(sandbox,) = [info for info in aenv_ray.list_instances()\n"
        "              if info.labels.get('aenv.service') == name]"
    )
    assert driver.value("ray_api.node_of(ray.get_actor(**actor)) == node != sandbox.node_id")
    done = drain(nodes, worker)
    assert done.returncode == 0, done.stderr
    assert driver.value("'kept' in run('cat /kept/file')")
    worker.kill()
    eventually_empty(worker.leftovers)
    driver.do("serve.remove(name, delete_storage=True)")


def test_a_host_that_dies_after_the_services_have_left_its_node_is_a_typed_loss(
    nodes: Nodes, driver: Console
) -> None:
    """Ray restarts no actor on a node that it drains: calls do not hang, and nothing is left."""
    worker = nodes.add(slots=SLOTS)
    driver.do(
        "import asyncio, os\nfrom aenv_ray.client.async_handle import AsyncEnvHandle\n"
        "def count(handle):\n"
        "    return asyncio.run(AsyncEnvHandle(handle).call_tool('count', {}, 100.0)).data\n"
        f"near = {worker.node_id!r}\n"
        "fabric = aenv_ray.init()\n"
        "others = [state.node_id for state in fabric.nodes() if state.node_id != near]\n"
        "for node in others:\n    fabric.drain(node)\n"
        "made = [aenv_ray.create(PROBE, actor=actor) for actor in ('shared', 'dedicated')]\n"
        "for node in others:\n    fabric.undrain(node)"
    )
    driver.do("aenv_ray.init().drain(near, is_leaving=True)\nray_api.drain_by_ray(near, 60.0)")
    assert driver.value("[count(handle) for handle in made]") == [1, 1]
    assert driver.value("{ray.get(h.info.remote()).node_id for h in made} == {near}")
    for number in range(2):
        host = f"ray_api.find_actor(ray.get(made[{number}].info.remote()).host)"
        kill(driver.value(f"ray.get({host}.__ray_call__.remote(lambda _: os.getpid()))"))
        lost = raised(lambda n=number: driver.value(f"count(made[{n}])"))  # type: ignore[misc]
        assert "SandboxLost" in lost
    eventually(lambda: driver.value("len(aenv_ray.list_instances())") == 0, LONG_S)
    eventually_empty(worker.sandboxes, LONG_S)
    done = drain(nodes, worker)
    assert done.returncode == 0, done.stderr
