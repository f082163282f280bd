"""Several machines: made by the script, they join, are lost, cut off and come back."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from aenv_ray.cli.local.free_ports import free_port
from tests.conftest import require
from tests.ray.faults import PROBE, eventually, eventually_empty
from tests.ray.nodes.cables import Cable, a_cable
from tests.ray.nodes.loads import LOADS, LONG_S, work_on
from tests.ray.nodes.machines import Machines
from tests.ray.nodes.nodes import Console, RemoteError, by_node, raised
from tests.ray.services.services import ACCEPT

CALLS = "[r.data for r in ray.get([h.call_tool.remote('count') for h in {}], timeout=60)]"
HUB = (
    "from aenv_ray.hub.hub_actor import ensure_hub\n"
    "from aenv_ray.hub.client import blocking\n"
    "def remembered(value): return blocking(ensure_hub().remember('mark', value, 3600.0))\n"
)
GATEWAY = """
from aenv_ray.hub.records import Role
from aenv_ray.serve.gateway import deployment
from aenv_ray.serve.gateway.settings import GatewaySettings
def serve_gateway(host, port, on_head=True):
    deployment.deploy(GatewaySettings(host=host, port=port, mcp_port=port, on_head=on_head))
    return blocking(ensure_hub().create_token(Role.PUBLISHER, "ann"))[0]
"""
LOST = """
import asyncio
from aenv_ray.client.async_handle import AsyncEnvHandle
def call(handle):
    return asyncio.run(AsyncEnvHandle(handle).call_tool("count", {}, 30.0)).data
"""
TTL_S: Final = 25.0
CALLER = """
import asyncio, threading
from aenv_ray.hub.hub_actor import ensure_hub
from aenv_ray.hub.client import blocking
from aenv_ray.client.async_handle import AsyncEnvHandle
from aenv_ray.hub.records import Quota
hub = ensure_hub()
blocking(hub.set_quota(Quota(subject="owner:ann", max_instances=9)))
def used():
    blocking(hub.compare())
    return blocking(hub.quotas())["owner:ann"][0]
def ask(handle, tool, **arguments):
    return asyncio.run(AsyncEnvHandle(handle).call_tool(tool, arguments, 600.0)).data
ended = []
def call_and_tell():
    try:
        asyncio.run(AsyncEnvHandle(far[0]).call_tools(
            [("note", {"line": "begun"}), ("hold", {"key": "never"})], False, 600.0))
        ended.append("a result")
    except Exception as exc:
        ended.append(type(exc).__name__)
"""
BY_HTTP = """
import json
def made_by_http():
    answer = http.post("/instances", json={"envName": "mini-terminal", "ttl": "10m"})
    return answer.raise_for_status().json()["data"][0]["id"]
mine = made_by_http()
def run_by_http(command):
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call",
               "params": {"name": "execute_command", "arguments": {"command": command}}}
    answer = http.post(f"/instances/{mine}/mcp", json=message).raise_for_status().json()
    assert answer["result"]["isError"] is False, answer
    return answer["result"]["content"][0]["text"]
def call_by_http():
    run_by_http("echo x >> count")
def count_by_http():
    return int(json.loads(run_by_http("echo x >> count; wc -l < count"))["output"][0])
def create_by_http():
    http.delete(f"/instances/{made_by_http()}").raise_for_status()
"""
pytestmark = pytest.mark.timeout(900)  # several Rays start one after another


@pytest.fixture(scope="module")
def laid() -> Iterator[tuple[Cable | None, str]]:
    with a_cable() as laid:
        yield laid


@pytest.fixture
def cable(laid: tuple[Cable | None, str]) -> Cable:
    cable, refusal = laid
    require("netns", cable is not None, refusal)
    assert cable is not None
    return cable


@pytest.fixture(scope="module")
def machines(laid: tuple[Cable | None, str]) -> Iterator[Machines]:
    """A head that leads and a worker with four slots, at the cable's end if there is one."""
    root = Path(tempfile.mkdtemp(prefix="aenv-k", dir="/tmp"))
    cable, _ = laid
    machines = Machines(root) if cable is None else Machines(root, ip=cable.here)
    try:
        yield machines
    finally:
        machines.close()
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def words(machines: Machines) -> dict[str, str]:
    """What the script said when it made the cluster."""
    refused = machines.run("one", "worker", machines.address)
    return {
        "without a token": refused.stderr,
        "head": machines.head(),
        "worker": machines.worker("one", 4),
    }


def drive(machines: Machines) -> Console:
    open_to_probes = {"AENV_POLICY": "open"}  # although it deploys a gateway
    console = Console({**machines.variables, **open_to_probes, "RAY_ADDRESS": machines.address})
    console.do(f"PROBE = {str(PROBE)!r}\naenv_ray.init()\n{HUB}\n{LOST}\n{GATEWAY}")
    return console


def drive_there(machines: Machines, cable: Cable) -> Console:
    """Return a driver on the machine at the cable's other end.

    Ray finds the nodes of its machine by their processes, of which it sees ours as well.
    """
    variables = {
        **machines.variables,
        "RAY_ADDRESS": machines.address,
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600",  # as `aenv_ray.init` sets it
    }
    console = Console(variables, cable.inside)
    console.do(
        f"ray.init({machines.address!r}, namespace='aenv', log_to_driver=False,\n"
        f"    _node_ip_address={cable.there!r})\n"
        f"PROBE = {str(PROBE)!r}\naenv_ray.init()\n{LOADS}"
    )
    return console


@pytest.fixture
def console(machines: Machines, words: dict[str, str]) -> Iterator[Console]:
    del words
    driver = drive(machines)
    yield driver
    driver.close()


def test_the_script_makes_a_cluster_and_says_what_to_do_next(
    machines: Machines, words: dict[str, str]
) -> None:
    """A worker needs the head's token; a second run changes nothing and says the same."""
    assert "copy that file from the head" in words["without a token"]
    token = Path(machines.variables["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert f"worker {machines.address}" in words["head"]
    assert f"RAY_ADDRESS={machines.address}" in words["worker"]
    assert token.read_text() not in "".join(words.values()), "invariant 10"
    before = {name: set(machines.processes(name)) for name in ("head", "one")}
    assert "is already up" in machines.head()
    assert "is already up" in machines.worker("one", 4)
    for name, pids in before.items():
        assert pids & set(machines.processes(name))
        assert machines.run(name, "status").returncode == 0
        commands = machines.processes(name).values()
        assert any("DashboardAgent" in command for command in commands), "it ends with its node"
    assert machines.run("two", "status").returncode == 1


def test_a_cluster_has_its_token_only(machines: Machines, words: dict[str, str]) -> None:
    """Clients without the token are refused."""
    del words
    other = machines.root / "other-token"
    other.write_text("0" * 64)
    done = machines.run(
        "stranger", "worker", machines.address, RAY_AUTH_TOKEN_PATH=str(other), AENV_CPUS="1"
    )
    assert done.returncode == 1
    assert machines.processes("stranger") == {}


def test_the_head_is_lost_and_comes_back(machines: Machines, console: Console) -> None:
    """GCS fault tolerance: instances, hub and controller continue on the remaining workers."""
    console.do("kept = aenv_ray.create_many(PROBE, 2, lifetime='detached')")
    console.do("kept += [aenv_ray.create(PROBE, lifetime='detached')]")
    assert console.value(CALLS.format("kept")) == [1, 1, 1]
    assert console.value("remembered('before')") == "before"
    ids = console.value("[h.instance_id for h in kept]")
    machines.lose("head")
    assert "is up" in machines.head()
    with pytest.raises(RemoteError, match="was lost, and with it the node"):
        console.do("aenv_ray.create_many(PROBE, 1)")  # this driver was on the head
    console.kill()
    again = drive(machines)
    try:
        again.do(f"kept = [aenv_ray.get(i) for i in {ids!r}]")
        assert again.value(CALLS.format("kept")) == [2, 2, 2], "their state is what it was"
        assert again.value("remembered('after')") == "before"
        again.do("more = aenv_ray.create_many(PROBE, 1)")
        assert again.value(CALLS.format("more")) == [1]
        assert again.value("len(aenv_ray.list_instances())") == 4
        again.do("aenv_ray.release_many(kept + more)")
        assert again.value("len(aenv_ray.list_instances())") == 0
    finally:
        again.close()


@pytest.mark.parametrize("lost", ["head", "redis"])
def test_drivers_on_other_machines_wait_until_the_head_is_back(
    cable: Cable, machines: Machines, console: Console, lost: str
) -> None:
    """Calls and services do not pause, creates do, and no episode of a sampling is lost."""
    machines.worker("far", 10, ip=cable.there, inside=cable.inside)
    port = free_port()
    token = console.value(f"serve_gateway('0.0.0.0', {port})")
    driver = drive_there(machines, cable)

    try:
        driver.do("kept = aenv_ray.create_many(PROBE, 1)[0]\nname, desk = serve_elsewhere()")
        driver.do(
            f"http = httpx.Client(base_url='http://{cable.here}:{port}', timeout=60,\n"
            f"    headers={{'Authorization': 'Bearer {token}'}})\n"
            "played, sampler = sample('driver')\nspread, other = sample('nodes')"
        )
        eventually(lambda: driver.value("min(played.finished, spread.finished)") > 2, LONG_S)
        driver.do("calls, creates = Load(call), Load(create)")
        driver.do("uses, asks = Load(use_service), Load(ask_gateway)")
        work_on(driver, 3, "calls", "creates", "uses", "asks")
        if lost == "head":
            machines.lose("head")
        else:
            machines.lose_redis()
        work_on(driver, 20, "calls", "uses")
        if lost == "redis":
            machines.start_redis()
        assert "is up" in machines.head()
        work_on(driver, 3, "calls", "creates", "uses", "asks")
        for load in ("calls", "creates", "uses"):
            assert driver.value(f"{load}.end()") == [False, []], load
        is_over, refused = driver.value("asks.end()")
        assert not is_over
        assert all(re.search("Connect|Read|RemoteProtocol|'503 ", error) for error in refused), (
            refused
        )
        eventually(lambda: not driver.value("sampler.is_alive() or other.is_alive()"), LONG_S)
        assert driver.value("lost(played) + lost(spread)") == []
        assert driver.value("[len(played.episodes), len(spread.episodes)]") == [60, 60]
        said = [line for line in driver.errors() if "Ray's head" in line]
        assert said
        assert len(said) % 2 == 0, said  # the head's port may come, go and come while it starts
        assert all("does not answer" in line for line in said[::2]), said
        assert all("is back after" in line for line in said[1::2]), said
        driver.do("serve.remove(name)")
        driver.do("from aenv_ray.serve.gateway import deployment\ndeployment.undeploy()")
        driver.do("import ray.serve\nray.serve.shutdown()")
        eventually(lambda: driver.value("len(aenv_ray.list_instances())") == 1, LONG_S)
    finally:
        driver.close()
    assert machines.run("far", "stop").returncode == 0


def test_a_gateway_on_another_machine_waits_for_the_head(
    cable: Cable, machines: Machines, console: Console
) -> None:
    """It keeps its ports; its clients wait and get answers, and no call runs twice."""
    del console
    machines.worker("far", 10, ip=cable.there, inside=cable.inside)
    driver = drive_there(machines, cable)
    port = free_port()
    try:
        driver.do(f"{HUB}\n{GATEWAY}")
        token = driver.value(f"serve_gateway('0.0.0.0', {port}, on_head=False)")
        driver.do(
            f"http = httpx.Client(base_url='http://{cable.there}:{port}', timeout=180,\n"
            f"    headers={ACCEPT!r} | {{'Authorization': 'Bearer {token}'}})\n"
            f"{BY_HTTP}"
        )
        driver.do("tools, creates = Load(call_by_http), Load(create_by_http)")
        driver.do("asks = Load(ask_gateway)")
        work_on(driver, 3, "tools", "creates", "asks")
        machines.lose("head")
        eventually(lambda: driver.value("aenv_ray.init().head_watch.is_lost"), LONG_S)
        assert "is up" in machines.head()
        work_on(driver, 5, "tools", "creates", "asks")
        for load in ("tools", "creates", "asks"):
            assert driver.value(f"{load}.end()") == [False, []], load
        assert driver.value("count_by_http() - tools.done") == 1, "invariant 1"
        driver.do("http.delete(f'/instances/{mine}').raise_for_status()")
        driver.do("deployment.undeploy()\nimport ray.serve\nray.serve.shutdown()")
        eventually(lambda: driver.value("len(aenv_ray.list_instances())") == 0, LONG_S)
    finally:
        driver.close()
    assert machines.run("far", "stop").returncode == 0


def test_an_instance_waits_for_a_node_that_joins_late_and_its_loss_is_reported(
    machines: Machines, console: Console
) -> None:
    """A waiting create uses a machine that joins; the loss of that machine is reported."""
    console.do("first = aenv_ray.create_many(PROBE, 4)")
    console.do(
        "import threading\nmade = []\n"
        "def create():\n    made.extend(aenv_ray.create_many(PROBE, 2))\n"
        "threading.Thread(target=create, daemon=True).start()"
    )
    machines.worker("two", 2)
    eventually(lambda: console.value("len(made)") == 2, LONG_S)
    homes = by_node(console, "first + made")
    assert sorted(map(len, homes.values())) == [2, 4]
    assert console.value(CALLS.format("made")) == [1, 1]
    machines.lose("two")
    for index in range(2):
        classes = raised(lambda at=index: console.value(f"call(made[{at}])"))  # type: ignore[misc]
        assert "SandboxLost" in classes
    assert console.value(CALLS.format("first")) == [1] * 4
    eventually(lambda: console.value("len(aenv_ray.list_instances())") == 4)
    console.do("aenv_ray.release_many(first)")


def sandboxes_there(machines: Machines, cable: Cable) -> dict[int, Path]:
    """Return the sandboxes at the cable's other end, by pid, with their working directories."""
    namespace = os.readlink(f"/proc/{cable.holder.pid}/ns/net")
    found = {}
    for pid in machines.sandboxes():
        with contextlib.suppress(OSError):  # it has just ended
            if os.readlink(f"/proc/{pid}/ns/net") == namespace:
                found[pid] = Path(f"/proc/{pid}/cwd")
    return found


def test_a_machine_is_cut_off_and_comes_back(
    cable: Cable, machines: Machines, console: Console
) -> None:
    """Invariants 1 to 3, when neither head nor controller can reach that machine."""
    machines.worker("far", 5, ip=cable.there, inside=cable.inside)
    console.do(CALLER)
    console.do("made = aenv_ray.create_many(PROBE, 8, owner='ann', ttl=3600.0)")
    # The far machine alone has room for one more.
    console.do(f"short = aenv_ray.create(PROBE, owner='ann', ttl={TTL_S})")
    console.do("node = {h.instance_id: ray.get(h.info.remote()).node_id for h in [short, *made]}")
    console.do("far = [h for h in made if node[h.instance_id] == node[short.instance_id]]")
    console.do("near = [h for h in made if h not in far]")
    console.do("threading.Thread(target=call_and_tell, daemon=True).start()")
    started = eventually(lambda: notes_of(sandboxes_there(machines, cable)), LONG_S)
    with started.open() as notes:
        cable.cut()
        assert console.value("ask(near[0], 'count')") == 1
        lost = raised(lambda: console.value("ask(far[1], 'count')"))
        assert "SandboxLost" in lost
        eventually(lambda: console.value("ended") == ["SandboxLost"], LONG_S)
        assert console.value("ask(near[0], 'count')") == 2
        listed = console.value("[i.id for i in aenv_ray.list_instances()]")
        assert sorted(listed) == sorted(console.value("[h.instance_id for h in near]"))
        eventually(lambda: console.value("used()") == 4, LONG_S)
        full = raised(lambda: console.do("aenv_ray.create(PROBE, queue_timeout=0.0)"))
        assert "CapacityExceeded" in full
        console.do("ray.get(near.pop().release.remote(), timeout=60)")
        console.do("near.append(aenv_ray.create(PROBE, owner='ann'))")
        assert console.value("ask(near[-1], 'count')") == 1
        eventually(lambda: len(sandboxes_there(machines, cable)) < 5, TTL_S + LONG_S)
        cable.mend()
        eventually_empty(lambda: sandboxes_there(machines, cable), LONG_S)
        assert notes.read() == "begun\n", "invariant 1"
    machines.worker("far", 5, ip=cable.there, inside=cable.inside)
    console.do("again = aenv_ray.create_many(PROBE, 5, owner='ann')")
    assert console.value("[ask(h, 'count') for h in again]") == [1] * 5
    there = eventually(
        lambda: len(found := sandboxes_there(machines, cable)) == 5 and found, LONG_S
    )
    assert machines.run("far", "stop").returncode == 0
    eventually_empty(lambda: machines.alive(there))
    console.do("aenv_ray.release_many(near)")


def notes_of(sandboxes: dict[int, Path]) -> Path | None:
    """Return the notes that one of these sandboxes has written."""
    written = (place / "notes.txt" for place in sandboxes.values())
    return next((path for path in written if path.exists()), None)


def test_the_cluster_ends(machines: Machines, console: Console) -> None:
    """Invariant 3: launcher and sandboxes go with their node; stopping again does nothing."""
    console.do("aenv_ray.create_many(PROBE, 2, lifetime='detached')")
    made = eventually(lambda: len(found := machines.sandboxes()) >= 2 and found, LONG_S)
    for name in ("one", "head"):
        for _ in range(2):
            assert machines.run(name, "stop").returncode == 0
            eventually_empty(lambda n=name: machines.processes(n))  # type: ignore[misc]
        eventually_empty(lambda: machines.alive(made))  # they were on the first
