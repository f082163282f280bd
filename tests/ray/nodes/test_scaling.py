"""A full cluster: creates wait their turn, nodes come for them, and go when nothing is left."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray.faults import PROBE, eventually
from tests.ray.nodes.nodes import Console, by_node, raised
from tests.ray.nodes.scaling import MOST_NODES, SLOTS, ScalingCluster

COMES_S = 120.0
"""A node takes its time to start on a busy machine."""

THREADS = """
import threading
made, failed = {}, {}
def create(name, count, environment=PROBE, **options):
    def run():
        try:
            made[name] = aenv_ray.create_many(environment, count, **{"engine": "fake", **options})
        except aenv_ray.AenvError as exc:
            failed[name] = exc
    threading.Thread(target=run, daemon=True).start()
"""
NESTING = """
from aenv_ray.runtime import current_call, register_tool


@register_tool
def run(key: str) -> str:
    inner = current_call().env("mini-terminal", key)
    return str(inner.call_tool("execute_command", {"command": "echo mine"}))
"""
NODES = "sorted(n for n, facts in ray_api.alive_nodes().items() if not facts.is_head)"
ENGINES = "sorted(facts.engine or '' for facts in ray_api.alive_nodes().values())[1:]"
"""Without that of the head."""
DEMAND = (
    "[r['bundles'] for r in ray.util.placement_group_table().values() if r['state'] != 'REMOVED']"
)
pytestmark = pytest.mark.timeout(900)  # several Rays start one after another


@pytest.fixture(scope="module")
def console() -> Iterator[Console]:
    """A driver on a cluster that is a head and nothing else, so far."""
    root = Path(tempfile.mkdtemp(prefix="aenv-s", dir="/tmp"))
    cluster = ScalingCluster(root)
    driver: Console | None = None
    try:
        driver = Console(dict(cluster.variables))
        driver.do(f"PROBE = {str(PROBE)!r}\naenv_ray.init()\n{THREADS}")
        yield driver
    finally:
        if driver is not None:
            driver.close()
        cluster.close()
        shutil.rmtree(root, ignore_errors=True)


def _made(console: Console, name: str) -> bool:
    failed = console.value(f"repr(failed.get({name!r}))")
    assert failed == "None", failed
    return bool(console.value(f"{name!r} in made"))


def test_nodes_are_added_for_waiting_creates_and_removed_when_idle(console: Console) -> None:
    """A backlog is Ray resource demand; a node without instances is idle to Ray."""
    assert console.value(NODES) == []
    console.do(f"create('first', {SLOTS})")
    eventually(lambda: _made(console, "first"), COMES_S)
    assert len(console.value(NODES)) == 1, "as many nodes as are needed"
    assert console.value(ENGINES) == ["fake"], "of the engine that was asked for"
    assert {n: len(i) for n, i in by_node(console, "made['first']").items()} == dict.fromkeys(
        console.value(NODES), SLOTS
    )
    # Full: one more, of its own actor, needs another node; a group takes what is left there.
    console.do("create('alone', 1, actor='dedicated')")
    eventually(lambda: _made(console, "alone"), COMES_S)
    assert len(console.value(NODES)) == MOST_NODES
    console.do(f"create('rest', {SLOTS - 1})")
    eventually(lambda: _made(console, "rest"), COMES_S)
    everybody = "made['first'] + made['alone'] + made['rest']"
    assert {len(ids) for ids in by_node(console, everybody).values()} == {SLOTS}

    # Full for good: who does not wait is told at once, who waits is told at the deadline.
    for wait in ("0", "'1s'"):
        classes = raised(
            lambda w=wait: console.do(  # type: ignore[misc]
                f"aenv_ray.create(PROBE, actor='shared', engine='fake', queue_timeout={w})"
            )
        )
        assert classes[0] == "CapacityExceeded"
    # What is released goes to whoever waits.
    console.do("create('next', 1)")
    eventually(lambda: console.value(DEMAND) != [], COMES_S)
    console.do("aenv_ray.release_many(made['alone'])")
    eventually(lambda: _made(console, "next"), COMES_S)
    eventually(lambda: console.value(DEMAND) == [], COMES_S)
    assert console.value("len(aenv_ray.list_instances())") == 2 * SLOTS

    # Idle hosts leave, and with them the nodes; a later create starts from nothing again.
    console.do("for handles in made.values():\n    aenv_ray.release_many(handles)")
    eventually(lambda: console.value(NODES) == [], COMES_S, lambda: console.value(NODES))
    console.do("create('again', 1)")
    eventually(lambda: _made(console, "again"), COMES_S)
    assert console.value("aenv_ray.init().count_processes()") == 0
    console.do("aenv_ray.release_many(made['again'])")


def test_a_create_brings_a_node_of_its_engine(console: Console) -> None:
    """Ray's autoscaler follows the label of the demand, even if other nodes have room."""
    eventually(lambda: console.value(NODES) == [], COMES_S, lambda: console.value(NODES))
    console.do("create('plain', 1, engine='process')")
    eventually(lambda: _made(console, "plain"), COMES_S)
    assert console.value(ENGINES) == ["process"]
    console.do("create('other', 1)")
    eventually(lambda: _made(console, "other"), COMES_S)
    assert console.value(ENGINES) == ["fake", "process"], "room on another engine is no room"
    console.do("aenv_ray.release_many(made['plain'] + made['other'])")


def test_an_agent_that_opens_inner_instances_needs_no_room_for_them(
    console: Console, tmp_path: Path
) -> None:
    """Invariant 14: it neither fills the cluster nor voids its episode in a full one."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "tools.py").write_text(NESTING)
    deploy = {"network": "none", "environments": ["mini-terminal"], "innerInstances": SLOTS - 1}
    (tmp_path / "config.json").write_text(json.dumps({"name": "nesting", "deployConfig": deploy}))
    eventually(lambda: console.value(NODES) == [], COMES_S, lambda: console.value(NODES))
    for name in ("shared", "dedicated"):
        console.do(
            f"create({name!r}, 1, {str(tmp_path)!r}, engine='process', actor={name!r},"
            " queue_timeout='5m')"
        )
        eventually(lambda name=name: _made(console, name), COMES_S)  # type: ignore[misc]
    assert len(console.value(NODES)) == MOST_NODES, "each takes the slots of a node"
    found = by_node(console, "made['shared'] + made['dedicated']")
    assert sorted(map(len, found.values())) == [1, 1]
    for actor in ("shared", "dedicated"):
        classes = raised(
            lambda actor=actor: console.do(  # type: ignore[misc]
                f"aenv_ray.create(PROBE, actor={actor!r}, engine='process', queue_timeout='1s')"
            )
        )
        assert classes[0] == "CapacityExceeded"
    for name in ("shared", "dedicated"):
        asked = f"made[{name!r}][0].call_tool.remote('run', {{'key': str(n)}})"
        for n in range(SLOTS - 1):
            console.do(f"n = {n}; assert 'mine' in str(ray.get({asked}).data)")
        classes = raised(lambda asked=asked: console.do(f"n = 99; ray.get({asked})"))  # type: ignore[misc]
        assert "FunctionFailed" in classes
    infos = "[(i.node_id, i.places) for i in aenv_ray.list_instances()]"
    assert len(console.value(infos)) == MOST_NODES * SLOTS
    assert sorted(p for _, p in console.value(infos)) == [0] * 2 * (SLOTS - 1) + [SLOTS] * 2
    console.do("aenv_ray.release_many(made['shared'] + made['dedicated'])")
