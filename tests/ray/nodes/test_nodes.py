"""Several nodes: groups are spread, nodes come and go, and each has its own launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aenv_ray.engines.process.launcher import ADOPTION_GRACE_S
from tests.ray.faults import (
    GONE_S,
    PROBE,
    eventually,
    eventually_empty,
    kill,
    launcher_pids,
    stop,
)
from tests.ray.nodes.nodes import Console, Node, Nodes, RemoteError, by_node, own_root, raised
from tests.ray.nodes.pod_nodes import drain_hook

CALLS = "[r.data for r in ray.get([h.call_tool.remote('count') for h in {}], timeout=60)]"
RELEASE = "aenv_ray.release_many({})"
SPARES = (
    "len({name for name in ray_api.actor_names() if name.startswith('probe-')}"
    " - {info.id for info in aenv_ray.list_instances()})"
)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A head and one more node."""
    with own_root("aenv-n") as root:
        cluster = Nodes(root, root / "r")
        try:
            yield cluster
        finally:
            cluster.close()


@pytest.fixture(scope="module")
def second(nodes: Nodes) -> Node:
    """The node that stays."""
    return nodes.add()


@pytest.fixture(scope="module")
def console(nodes: Nodes, second: Node) -> Iterator[Console]:
    """A driver on the cluster; `PROBE` is its name of the probe project."""
    del second
    driver = Console(
        {
            "RAY_ADDRESS": nodes.address,
            "RAY_TMPDIR": str(nodes.root),
            "AENV_RUNTIME_DIR": str(nodes.root / "r"),
            "AENV_DATA_DIR": str(nodes.root / "d"),
            "RAY_AUTH_MODE": "disabled",
        }
    )
    driver.do(f"PROBE = {str(PROBE)!r}\naenv_ray.init()")
    yield driver
    driver.close()


@pytest.fixture(autouse=True)
def nothing_left(nodes: Nodes, second: Node, console: Console) -> Iterator[None]:
    """Invariant 3: no test leaves a sandbox on the nodes that stay."""
    yield
    for node in (nodes.head, second):
        eventually_empty(node.sandboxes)
    assert console.value("len(aenv_ray.list_instances())") == 0


@pytest.fixture
def passing(nodes: Nodes) -> Iterator[Callable[..., Node]]:
    """Add nodes that are gone after the test."""
    added: list[Node] = []

    def add(**variables: str) -> Node:
        added.append(nodes.add(**variables))
        return added[-1]

    yield add
    for node in added:
        with contextlib.suppress(ProcessLookupError):
            node.kill()
        eventually_empty(node.leftovers)


def is_used(console: Console, node: Node) -> bool:
    """Whether a group that is made now is spread to a node."""
    console.do("group = aenv_ray.create_many(PROBE, 6)")
    found = by_node(console, "group")
    console.do(RELEASE.format("group"))
    return node.node_id in found


@pytest.mark.parametrize("density", ["shared", "dedicated"])
def test_a_group_is_spread_over_the_nodes(
    nodes: Nodes, second: Node, console: Console, density: str
) -> None:
    """Each node has its own hosts and launcher, and all instances answer."""
    count = 8 if density == "shared" else 2
    console.do(f"group = aenv_ray.create_many(PROBE, {count}, actor={density!r})")
    found = by_node(console, "group")
    assert {node: len(ids) for node, ids in found.items()} == {
        nodes.head.node_id: count // 2,
        second.node_id: count // 2,
    }
    for node in (nodes.head, second):
        assert len(node.sandboxes()) == count // 2
        assert len(launcher_pids(node.directory)) == 1
    assert console.value(CALLS.format("group")) == [1] * count
    assert console.value("aenv_ray.init().count_processes()") == count
    console.do(RELEASE.format("group"))
    assert nodes.head.sandboxes() == []
    assert second.sandboxes() == []


@pytest.mark.parametrize("density", ["shared", "dedicated"])
def test_instances_are_placed_near_a_node_or_an_actor(
    nodes: Nodes, second: Node, console: Console, density: str
) -> None:
    """A trainer has its instances on its own node, so that observations need not travel."""
    console.do(
        "@ray.remote(num_cpus=0)\n"
        "class Trainer:\n"
        "    def ping(self): pass\n"
        f"near = ray_api.pinned({second.node_id!r})\n"
        "trainer = Trainer.options(scheduling_strategy=near).remote()\n"
        "ray.get(trainer.ping.remote())"
    )
    for near, node in (("trainer", second), ("'me'", nodes.head), (repr(second.node_id), second)):
        console.do(f"group = aenv_ray.create_many(PROBE, 2, actor={density!r}, near={near})")
        assert set(by_node(console, "group")) == {node.node_id}
        console.do(RELEASE.format("group"))
    console.do("ray.kill(trainer)")


def test_a_group_is_spread_over_the_nodes_though_one_has_a_spare(
    nodes: Nodes, second: Node, console: Console
) -> None:
    """Creates of a group that wait for a claim count for the placement of the others."""
    for node in (nodes.head, second):
        console.do(f"first = aenv_ray.create(PROBE, near={node.node_id!r})\n")
        eventually(lambda: console.value(SPARES) >= 1, 60.0)
        console.do("ray.get(first.release.remote())")
        console.do("group = aenv_ray.create_many(PROBE, 2, actor='dedicated')")
        assert by_node(console, "group").keys() == {nodes.head.node_id, second.node_id}
        console.do(RELEASE.format("group"))


def test_a_spare_host_that_is_lost_with_its_node_is_not_handed_out(
    passing: Callable[..., Node], console: Console
) -> None:
    """The create runs on a node that lives."""
    node = passing()
    console.do(f"first = aenv_ray.create(PROBE, near={node.node_id!r})")
    eventually(lambda: console.value(SPARES) >= 1, 60.0)
    node.kill()
    console.do(f"group = [aenv_ray.create(PROBE, near={node.node_id!r})]")
    assert console.value(CALLS.format("group")) == [1]
    assert node.node_id not in by_node(console, "group")
    console.do(RELEASE.format("group"))


def test_a_pool_is_divided_among_the_nodes(second: Node, nodes: Nodes, console: Console) -> None:
    """`warm` counts for the whole cluster, and a group finds its share on each node."""
    assert console.value("aenv_ray.warm(PROBE, 4, wait=True)") == 4
    for node in (nodes.head, second):
        assert len(node.sandboxes()) == 2
    console.do("group = aenv_ray.create_many(PROBE, 4)")
    modes = console.value("[ray.get(h.info.remote()).start_mode for h in group]")
    assert [mode.startswith("warm, ") for mode in modes] == [True] * 4
    assert console.value(CALLS.format("group")) == [1] * 4
    console.do(RELEASE.format("group"))
    assert console.value("aenv_ray.warm(PROBE, 0)") == 0


def test_a_node_whose_host_cannot_start_is_left_out(
    passing: Callable[..., Node], nodes: Nodes, second: Node, console: Console
) -> None:
    """A node that cannot serve does not keep creates from the others, at either density."""
    broken = passing(AENV_RUNTIME_DIR="/proc/nothing")
    console.do("aenv_ray.shutdown()\naenv_ray.init()")  # a driver that looks at all nodes first
    for density, count in (("shared", 4), ("dedicated", 2)):
        console.do(f"group = aenv_ray.create_many(PROBE, {count}, actor={density!r})")
        assert by_node(console, "group").keys() == {nodes.head.node_id, second.node_id}
        console.do(RELEASE.format("group"))
    # It is not counted as empty: nobody knows what it runs.
    assert "FabricUnavailable" in raised(lambda: console.value("aenv_ray.init().count_processes()"))
    assert broken.sandboxes() == []


ANOTHER_VERSION = """
import importlib.util, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name != "aenv_ray":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            module.__version__ = "0.9.9"
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder())
"""
"""Python imports this when it starts."""


def test_versions_that_do_not_understand_each_other_are_named(
    passing: Callable[..., Node],
    nodes: Nodes,
    second: Node,
    console: Console,
    tmp_path: Path,
) -> None:
    """A worker of another version gets no instances; a driver is refused when it connects."""
    (tmp_path / "sitecustomize.py").write_text(ANOTHER_VERSION)
    other = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    passing(**other)
    console.do("group = aenv_ray.create_many(PROBE, 6)")
    assert by_node(console, "group").keys() == {nodes.head.node_id, second.node_id}
    console.do(RELEASE.format("group"))
    others = [nodes.head.node_id, second.node_id]
    console.do(f"for node in {others!r}:\n    aenv_ray.init().drain(node)")
    with pytest.raises(RemoteError, match=r"0\.9\.9, and this process runs") as refused:
        console.do("aenv_ray.create_many(PROBE, 1)")
    assert "FabricUnavailable" in refused.value.classes
    console.do(f"for node in {others!r}:\n    aenv_ray.init().undrain(node)")
    driver = Console({"RAY_ADDRESS": nodes.address, **other})
    try:
        with pytest.raises(
            RemoteError, match=r"this process runs 0\.9\.9, which is incompat"
        ) as no:
            driver.do("aenv_ray.init()")
        assert no.value.classes[0] == "ConfigError"
    finally:
        driver.close()


def test_a_worker_drains_also_with_a_head_of_another_version(
    passing: Callable[..., Node], nodes: Nodes, console: Console, tmp_path: Path
) -> None:
    """The head may have been replaced first, and a hook that fails ends the worker at once."""
    third = passing()
    eventually(lambda: is_used(console, third), 30.0)
    console.do(f"kept = aenv_ray.create(PROBE, actor='shared', near={third.node_id!r}, ttl=15)")
    (tmp_path / "sitecustomize.py").write_text(ANOTHER_VERSION)
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        drain_hook(third.node_id),
        env={**os.environ, "RAY_ADDRESS": nodes.address, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "waiting for 1 instance," in done.stderr
    assert "drained" in done.stdout


KILLED = """
host = ray_api.find_actor({0!r})
ray.kill(host, no_restart=True)
while True:  # it works on for a moment, longer on a busy machine
    try:
        ray.get(host.ready.remote(), timeout=60)
    except ray.exceptions.RayActorError:
        break
"""


def test_a_group_that_loses_a_host_is_whole_and_no_id_runs_twice(
    passing: Callable[..., Node], nodes: Nodes, second: Node, console: Console
) -> None:
    """The instances of the lost host are created on others; other hosts keep theirs.

    Before that, the driver finds the host of a node that joins late.
    """
    console.do("aenv_ray.create(PROBE, actor='shared').release.remote()")
    third = passing()
    eventually(lambda: is_used(console, third), 30.0)
    console.do(KILLED.format(f"aenv-host-{third.node_id[:12]}-0"))
    console.do("group = aenv_ray.create_many(PROBE, 6)")
    assert console.value("len({h.instance_id for h in group})") == 6
    assert console.value(CALLS.format("group")) == [1] * 6
    # What the host began before it heard of its end waits for one that adopts it.
    eventually(
        lambda: sum(len(node.sandboxes()) for node in (nodes.head, second, third)) == 6,
        ADOPTION_GRACE_S + GONE_S,
        what=lambda: [node.sandboxes() for node in (nodes.head, second, third)],
    )
    console.do(RELEASE.format("group"))


SAMPLING = """
import threading, time
from collections import Counter
played = []
def policy(env, task):
    env.call_tool("count", {})
    time.sleep(0.1)  # an episode that lasts: some are being played when the node drains
    env.call_tool("count", {})
def sample():
    tasks = [{"id": str(n)} for n in range(120)]
    for one in aenv_ray.sample(PROBE, policy, tasks, concurrency=6, runners="nodes"):
        played.append((one.task_id, str(one.status), one.attempts))
sampling = threading.Thread(target=sample, daemon=True)
sampling.start()
"""
STATE = (
    "{{str(n.status): [n.instances, n.runners]"
    " for n in aenv_ray.init().nodes() if n.node_id == {!r}}}"
)


@pytest.mark.timeout(300)  # Ray starts another controller, which takes its time on a busy machine
def test_a_node_drains_and_no_episode_is_lost_or_played_twice(
    passing: Callable[..., Node], nodes: Nodes, second: Node, console: Console
) -> None:
    """It gets no instances at either density, also from another controller, until it is undrained.

    Samplings finish there what they have begun, and move on.
    """
    third = passing()
    eventually(lambda: is_used(console, third), 30.0)
    state = STATE.format(third.node_id)
    console.do(f"kept = aenv_ray.create(PROBE, actor='shared', near={third.node_id!r})")
    assert by_node(console, "[kept]").keys() == {third.node_id}
    console.do(SAMPLING)
    eventually(lambda: console.value(state).get("ready", [0, 0])[1] == 1, 60.0)
    eventually(lambda: console.value("len(played)") >= 10, 60.0)
    console.do(f"aenv_ray.init().drain({third.node_id[:12]!r})")
    for density in ("shared", "dedicated"):
        console.do(f"group = aenv_ray.create_many(PROBE, 2, actor={density!r})")
        assert third.node_id not in by_node(console, "group")
        console.do(RELEASE.format("group"))
    eventually(lambda: console.value(state) == {"draining": [1, 0]}, 60.0)
    console.do("ray.kill(aenv_ray.init().controller, no_restart=False)")
    console.do("group = aenv_ray.create_many(PROBE, 6)")
    assert by_node(console, "group").keys() == {nodes.head.node_id, second.node_id}
    assert console.value(CALLS.format("[kept]")) == [1], "what runs there goes on"
    console.do(RELEASE.format("group + [kept]"))
    eventually(lambda: console.value(state) == {"drained": [0, 0]}, 60.0)
    console.do("sampling.join(120)")
    rows = console.value("played")
    assert sorted(int(task) for task, *_ in rows) == list(range(120))
    assert {(status, attempts) for _, status, attempts in rows} == {("completed", 1)}
    console.do(f"aenv_ray.init().undrain({third.node_id!r})")
    eventually(lambda: is_used(console, third), 30.0)


UNDER_LOAD = """
import asyncio, os, threading
played = []
async def policy(env, task):
    for _ in range(3):
        await env.call_tool("count")
        await asyncio.sleep(0.05)
    return os.getpid()
def sample():
    reward = {"name": "counted", "arguments": {"expected": 3}}
    tasks = [{"id": str(n), "reward": reward} for n in range(360)]
    for one in aenv_ray.sample(PROBE, policy, tasks, concurrency=9):
        row = [one.task_id, str(one.status), one.reward, one.attempts, one.output]
        played.append([*row, one.node_id])
sampling = threading.Thread(target=sample, daemon=True)
sampling.start()
"""


@pytest.mark.timeout(300)
def test_nodes_are_lost_in_mid_run_and_no_episode_is_lost_or_scored_by_it(
    passing: Callable[..., Node], nodes: Nodes, second: Node, console: Console
) -> None:
    """Their runners die with the episodes that they play and have ahead; others play these."""
    lost = [passing(), passing()]
    eventually(lambda: all(is_used(console, node) for node in lost), 30.0)
    console.do(UNDER_LOAD)
    for node in lost:

        def plays(node: Node = node) -> bool:
            rows = console.value("played")
            return sum(row[-1] == node.node_id for row in rows) >= 20 and bool(node.sandboxes())

        eventually(plays, 60.0, lambda: console.value("len(played)"))
        node.kill()
    assert console.value("len(played)") < 360
    console.do("sampling.join(120)")
    rows = console.value("played")
    assert sorted(int(row[0]) for row in rows) == list(range(360))
    assert {(status, reward) for _, status, reward, *_ in rows} == {("completed", 1.0)}
    assert max(row[3] for row in rows) > 1
    assert console.value("os.getpid()") not in {row[4] for row in rows}
    assert {nodes.head.node_id, second.node_id} <= {row[5] for row in rows}


ADAPTING = """
import asyncio
async def policy(env, task):
    await env.call_tool("count")
    await asyncio.sleep(0.3)
tasks = [{"id": str(n)} for n in range(120)]
sampling = aenv_ray.sample(PROBE, policy, tasks, concurrency=(2, 64), runners="nodes")
limits = [sampling.concurrency for one in sampling]
"""


def test_no_more_episodes_are_begun_than_may_wait_for_room(
    passing: Callable[..., Node], console: Console
) -> None:
    """As many as the cluster plays, and at most as many that show an autoscaler the demand."""
    slots = 4
    third = passing(slots=slots)  # the nodes that declare none take no instances from now on

    def takes_all() -> bool:
        console.do(f"group = aenv_ray.create_many(PROBE, {slots})")
        found = by_node(console, "group")
        console.do(RELEASE.format("group"))
        return found.keys() == {third.node_id}

    eventually(takes_all, 30.0)
    console.do(ADAPTING)
    limits = console.value("limits")
    assert len(limits) == 120
    assert slots <= max(limits) <= 2 * slots
    assert console.value("sampling.summary().reward_mean") == 0.5


STARTED = """
import threading
made = []
def make():
    made.append(aenv_ray.create(PROBE, actor="shared", near={0!r}))
starting = threading.Thread(target=make, daemon=True)
starting.start()
"""


def test_a_node_is_not_drained_while_an_instance_starts_there(
    passing: Callable[..., Node], console: Console
) -> None:
    """Stopping a node that counts as drained would end it."""
    third = passing()
    eventually(lambda: is_used(console, third), 30.0)
    state = STATE.format(third.node_id)
    (launcher,) = launcher_pids(third.directory)
    stop(launcher)
    console.do(STARTED.format(third.node_id))
    eventually(lambda: console.value(state) == {"ready": [1, 0]}, 30.0)
    console.do(f"aenv_ray.init().drain({third.node_id!r})")
    assert console.value(state) == {"draining": [1, 0]}
    kill(launcher, signal.SIGCONT)
    console.do("starting.join(60)")
    assert console.value(CALLS.format("made")) == [1]
    console.do(RELEASE.format("made"))
    eventually(lambda: console.value(state) == {"drained": [0, 0]}, 60.0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("density", ["shared", "dedicated"])
def test_a_node_is_not_drained_while_a_host_there_does_not_answer(
    passing: Callable[..., Node], console: Console, density: str
) -> None:
    """Its instances run on, and it answers again."""
    third = passing()
    eventually(lambda: is_used(console, third), 30.0)
    state = STATE.format(third.node_id)
    console.do(f"kept = aenv_ray.create(PROBE, actor={density!r}, near={third.node_id!r})")
    console.do(f"aenv_ray.init().drain({third.node_id!r})")
    host = "ray_api.find_actor(ray.get(kept.info.remote()).host)"
    console.do("import os")
    pid = console.value(f"ray.get({host}.__ray_call__.remote(lambda _: os.getpid()))")
    stop(pid)
    try:
        for _ in range(2):  # the controller forgets such a host, and finds it again
            assert console.value(state).keys() == {"draining"}
    finally:
        kill(pid, signal.SIGCONT)
    eventually(lambda: console.value(state) == {"draining": [1, 0]}, 60.0)
    assert console.value(CALLS.format("[kept]")) == [1]
    console.do(RELEASE.format("[kept]"))
    eventually(lambda: console.value(state) == {"drained": [0, 0]}, 60.0)


@pytest.mark.timeout(300)
def test_a_host_that_does_not_answer_delays_no_release_elsewhere(
    passing: Callable[..., Node], nodes: Nodes, console: Console
) -> None:
    """A handle names its host: to ask those of all nodes would cost more with each node."""
    third = passing()
    eventually(lambda: is_used(console, third), 30.0)
    console.do(f"far = aenv_ray.create(PROBE, actor='shared', near={third.node_id!r})")
    console.do(f"near = aenv_ray.create(PROBE, actor='shared', near={nodes.head.node_id!r})")
    host = "ray_api.find_actor(ray.get(far.info.remote()).host)"
    console.do("import os")
    pid = console.value(f"ray.get({host}.__ray_call__.remote(lambda _: os.getpid()))")
    stop(pid)
    try:
        console.do("ray.get(near.release.remote(), timeout=15)")  # a host may take 30 s to answer
    finally:
        kill(pid, signal.SIGCONT)
    console.do(RELEASE.format("[far]"))


LOST = """
import asyncio
from aenv_ray.client.async_handle import AsyncEnvHandle
def call(handle):
    return asyncio.run(AsyncEnvHandle(handle).call_tool("count", {}, 5.0)).data
"""


@pytest.mark.timeout(300)  # on a busy machine Ray takes its time to see that a node is gone
@pytest.mark.parametrize("victim", ["a node", "the controller's node"])
def test_the_loss_of_a_node(
    passing: Callable[..., Node], nodes: Nodes, second: Node, console: Console, victim: str
) -> None:
    """Calls of its instances raise typed errors; other instances and the fabric continue."""
    node = passing()
    if victim != "a node":
        console.do(
            "from aenv_ray.actors.controller import controller\n"
            "from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as Near\n"
            "aenv_ray.shutdown()\n"
            "old = ray_api.find_actor(ray_api.CONTROLLER_NAME)\n"
            "if old is not None:\n"
            "    ray.kill(old, no_restart=True)\n"
            f"near = Near(node_id={node.node_id!r}, soft=True)\n"
            "controller.controller_actor().options(name=ray_api.CONTROLLER_NAME,"
            " namespace=ray_api.NAMESPACE, lifetime='detached', get_if_exists=True,"
            " scheduling_strategy=near).remote()\n"
        )
    eventually(lambda: is_used(console, node), 30.0)
    # On each node three: how a group is spread depends on what the hosts report of their load.
    console.do("group = []")
    for near in (nodes.head.node_id, second.node_id, node.node_id):
        console.do(
            f"group += aenv_ray.create_many(PROBE, 2, near={near!r})\n"
            f"group += aenv_ray.create_many(PROBE, 1, actor='dedicated', near={near!r})"
        )
    found = by_node(console, "group")
    assert {n: len(ids) for n, ids in found.items()} == dict.fromkeys(
        (nodes.head.node_id, second.node_id, node.node_id), 3
    )
    gone = found[node.node_id]
    console.do(f"gone = [h for h in group if h.instance_id in {gone!r}]")
    console.do("kept = [h for h in group if h not in gone]")
    node.kill()
    eventually_empty(node.leftovers)  # its own processes know, and nobody else yet
    console.do("more = aenv_ray.create_many(PROBE, 4)")
    assert console.value(CALLS.format("kept + more")) == [1] * 10
    console.do(LOST)
    for index in range(3):
        classes = raised(lambda at=index: console.value(f"call(gone[{at}])"))  # type: ignore[misc]
        assert "SandboxLost" in classes
    for instance_id in gone:
        assert "InstanceError" in raised(
            lambda name=instance_id: console.do(f"aenv_ray.get({name!r})")  # type: ignore[misc]
        )
    listed = console.value("[i.id for i in aenv_ray.list_instances()]")
    assert len(listed) == 10
    assert not set(listed) & set(gone)
    assert console.value("aenv_ray.init().count_processes()") == 10
    eventually_empty(node.leftovers)
    console.do("twins = aenv_ray.create_many(PROBE, 2, actor='dedicated')")
    assert console.value(CALLS.format("kept + twins")) == [2] * 6 + [1] * 2
    console.do(RELEASE.format("group + more + twins"))
