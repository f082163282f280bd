"""Several machines: nodes made by the script join, are lost and come back (head included)."""

from __future__ import annotations

import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray.faults import PROBE, eventually, eventually_empty
from tests.ray.machines import Machines
from tests.ray.nodes import Console, by_node, raised

COMES_S = 120.0
CALLS = "[r.data for r in ray.get([h.call_tool.remote('count') for h in {}], timeout=60)]"
HUB = (
    "from aenv_ray.actors.hub_actor import ensure_hub\n"
    "from aenv_ray.actors.remote_hub import blocking\n"
    "def remembered(value): return blocking(ensure_hub().remember('mark', value, 3600.0))\n"
)
LOST = """
import asyncio
from aenv_ray.client.over_ray import RayInstance
def call(handle):
    return asyncio.run(RayInstance(handle).call_tool("count", {}, 30.0)).data
"""
pytestmark = pytest.mark.timeout(900)  # several Rays start one after another


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    """A head that leads and a worker with four places."""
    root = Path(tempfile.mkdtemp(prefix="aenv-k", dir="/tmp"))
    machines = Machines(root)
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
    console = Console({**machines.variables, "RAY_ADDRESS": machines.address})
    console.do(f"PROBE = {str(PROBE)!r}\naenv_ray.init()\n{HUB}\n{LOST}")
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
    assert "is up already" in machines.head()
    assert "is up already" in machines.worker("one", 4)
    for name, pids in before.items():
        assert pids & set(machines.processes(name))
        assert machines.run(name, "status").returncode == 0
    assert machines.run("two", "status").returncode == 1


def test_a_cluster_has_its_token_only(machines: Machines, words: dict[str, str]) -> None:
    """Whoever does not have the token does not get in."""
    del words
    other = machines.root / "other-token"
    other.write_text("0" * 64)
    done = machines.run(
        "stranger", "worker", machines.address, RAY_AUTH_TOKEN_PATH=str(other), AENV_CPUS="1"
    )
    assert done.returncode == 1
    assert machines.processes("stranger") == {}


def test_the_head_is_lost_and_comes_back(machines: Machines, console: Console) -> None:
    """GCS fault tolerance: instances, hub and controller go on with the workers that there are."""
    console.do("kept = aenv_ray.create_many(PROBE, 2, lifetime='detached')")
    console.do("kept += [aenv_ray.create(PROBE, lifetime='detached')]")
    assert console.value(CALLS.format("kept")) == [1, 1, 1]
    assert console.value("remembered('before')") == "before"
    ids = console.value("[h.instance_id for h in kept]")
    machines.lose("head")
    assert "is up" in machines.head()
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


def test_a_node_joins_late_and_is_lost(machines: Machines, console: Console) -> None:
    """Who waits gets a place when a machine joins; its loss is told, and nothing of it is left."""
    console.do("first = aenv_ray.create_many(PROBE, 4)")
    console.do(
        "import threading\nmade = []\n"
        "def create():\n    made.extend(aenv_ray.create_many(PROBE, 2))\n"
        "threading.Thread(target=create, daemon=True).start()"
    )
    machines.worker("two", 2)
    eventually(lambda: console.value("len(made)") == 2, COMES_S)
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


def test_a_node_that_is_stopped_leaves_nothing(machines: Machines, console: Console) -> None:
    """Invariant 3: launcher and sandboxes go with it; stopping again does nothing."""
    machines.worker("three", 1)
    assert machines.run("three", "stop").returncode == 0
    assert machines.processes("three") == {}
    assert machines.run("three", "stop").returncode == 0
    del console


def test_the_cluster_ends(machines: Machines, words: dict[str, str]) -> None:
    del words
    for name in ("one", "head"):
        assert machines.run(name, "stop").returncode == 0
        eventually_empty(lambda n=name: machines.processes(n))  # type: ignore[misc]
