"""The runners of the nodes: one that does not open costs its node, and neither others nor a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.actors.fabric.shutdown_gate import ShutdownGate
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.errors import AenvError, ConfigError, FabricUnavailable, SandboxStartFailed
from aenv_ray.sampling.runners import runner_actor
from aenv_ray.sampling.runners.runner_actor import NodeRunners, RemoteRunner
from aenv_ray.sampling.runners.runner_pool import RunnerLost

FULL = SandboxStartFailed("the directory cannot be written now")
AWAY = FabricUnavailable("the controller is away")


class _Nodes:
    """Nodes on which a runner opens, or raises an error."""

    def __init__(self) -> None:
        self.errors: dict[str, Exception | None] = {}
        self.may_open = asyncio.Event()
        self.may_open.set()
        self.tried: list[str] = []
        self.killed: list[Any] = []

    async def open(self, runner: RemoteRunner) -> None:
        self.tried.append(runner.node)
        await asyncio.sleep(0)
        await self.may_open.wait()
        if error := self.errors[runner.node]:
            raise error


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> _Nodes:
    found = _Nodes()

    async def open_one(runner: RemoteRunner) -> None:
        await found.open(runner)

    actor = SimpleNamespace(remote=lambda *given: given[0])
    monkeypatch.setattr(RemoteRunner, "open", open_one)
    monkeypatch.setattr(
        runner_actor, "_runner_actor", lambda: SimpleNamespace(options=lambda **_: actor)
    )
    monkeypatch.setattr(runner_actor, "usable", lambda alive: alive)
    replaced: dict[str, Callable[..., Any]] = {
        "put": lambda archive: archive,
        "alive_nodes": lambda: dict.fromkeys(found.errors, SimpleNamespace(is_draining=False)),
        "is_connected": lambda: True,
        "kill": found.killed.append,
        "pinned": lambda node: node,
    }
    for name, function in replaced.items():
        monkeypatch.setattr(ray_api, name, function)
    return found


def _runners(near: Any = None) -> NodeRunners:
    fabric: Any = SimpleNamespace(gate=ShutdownGate())
    project: Any = SimpleNamespace(archive=lambda: b"")
    setup: Any = SimpleNamespace(options=CreateOptions(near=near))
    return NodeRunners(fabric, project, setup)


async def _opened(runners: NodeRunners) -> set[str]:
    """Return the nodes of new runners, once all that can be opened are."""
    opened = set()
    while found := await runners.new(0.05):
        opened |= {one.node for one in found if isinstance(one, RemoteRunner)}
    return opened


@pytest.mark.parametrize("error", [FULL, AWAY], ids=["full disk", "controller away"])
async def test_a_runner_that_does_not_open_does_not_delay_others(
    nodes: _Nodes, error: AenvError
) -> None:
    """At the start, and when it joins a run."""
    nodes.errors = {"a": error, "b": None, "c": None}
    runners = _runners()
    assert await _opened(runners) == {"b", "c"}
    nodes.errors["d"] = error
    assert await _opened(runners) == set()
    await runners.close()


async def test_a_node_whose_runner_did_not_open_is_retried(
    nodes: _Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while, if the reason is the node: each try starts a process there."""
    nodes.errors = {"away": AWAY, "full": FULL, "good": None}
    runners = _runners()
    assert await _opened(runners) == {"good"}
    nodes.errors = dict.fromkeys(nodes.errors)
    assert await _opened(runners) == {"away"}
    assert nodes.tried.count("full") == 1
    monkeypatch.setattr(runners, "_again_at", dict.fromkeys(nodes.errors, 0.0))
    assert await _opened(runners) == {"full"}
    await runners.close()


async def test_the_error_of_the_only_node_ends_the_run(nodes: _Nodes) -> None:
    """Nothing could be played, and the user learns why at once."""
    nodes.errors = {"a": FULL}
    with pytest.raises(SandboxStartFailed, match="cannot be written"):
        await _opened(_runners())


async def test_a_policy_that_cannot_be_loaded_ends_the_run(nodes: _Nodes) -> None:
    """On whichever node."""
    nodes.errors = {"a": None, "b": ConfigError("no module named x")}
    with pytest.raises(ConfigError, match="no module named x"):
        await _opened(_runners())


HERE, OTHER = "a" * 56, "b" * 56


@pytest.mark.parametrize("near", ["me", HERE])
async def test_a_run_that_is_to_be_near_a_node_is_played_there(
    near: str, nodes: _Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`me` is the node of the driver, not that of each runner."""
    monkeypatch.setattr(ray_api, "node_id", lambda: HERE)
    nodes.errors = {HERE: None, OTHER: None}
    runners = _runners(near)
    assert await _opened(runners) == {HERE}
    assert nodes.tried == [HERE]
    await runners.close()


async def test_a_run_is_played_elsewhere_if_its_node_takes_no_instances(nodes: _Nodes) -> None:
    """As when it leaves, or is the node of a driver without room for any."""
    nodes.errors = {OTHER: None, "c" * 56: None}
    runners = _runners(HERE)
    assert await _opened(runners) == set(nodes.errors)
    nodes.errors[HERE] = None
    assert await _opened(runners) == {HERE}
    await runners.close()


@pytest.mark.parametrize("error", [FULL, AWAY, RunnerLost("no answer within 120 s")])
async def test_a_run_is_played_elsewhere_while_its_node_cannot_open_a_runner(
    nodes: _Nodes, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Once it can, the other runners leave."""
    nodes.errors = {HERE: error, OTHER: None}
    runners = _runners(HERE)
    assert await _opened(runners) == set()
    assert await _opened(runners) == {OTHER}
    assert not runners.leaving()
    nodes.errors[HERE] = None
    monkeypatch.setattr(runners, "_again_at", {HERE: 0.0})
    assert await _opened(runners) == {HERE}
    assert _leaving(runners) == {OTHER}
    await runners.close()


async def test_the_error_of_all_nodes_ends_a_run_that_is_to_be_near_one(nodes: _Nodes) -> None:
    nodes.errors = {HERE: FULL, OTHER: FULL}
    runners = _runners(HERE)
    assert await _opened(runners) == set()
    with pytest.raises(SandboxStartFailed, match="cannot be written"):
        await _opened(runners)


def _leaving(runners: NodeRunners) -> set[str]:
    return {node for node, one in runners._runners.items() if one.name in runners.leaving()}


class _Trainer:
    """An actor without a node at first."""

    _actor_id = "trainer"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node = ""
        monkeypatch.setattr(ray_api, "node_of", lambda actor: actor.node)


async def test_a_run_follows_the_actor_that_it_is_near(
    nodes: _Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer is placed only after `sample` has begun, and may restart on another node."""
    trainer = _Trainer(monkeypatch)
    nodes.errors = {HERE: None, OTHER: None, "c" * 56: None}
    runners = _runners(trainer)
    assert await _opened(runners) == set(), "it may soon have a node"
    trainer.node = HERE
    assert await _opened(runners) == {HERE}
    trainer.node = ""
    assert await _opened(runners) == set()
    trainer.node = OTHER
    nodes.may_open.clear()
    assert await runners.new(0.05) == await runners.new(0.05) == []
    assert not runners.leaving(), "nobody else plays yet"
    nodes.may_open.set()
    assert await _opened(runners) == {OTHER}
    assert _leaving(runners) == {HERE}
    await runners.close()


async def test_a_run_does_not_wait_for_ever_for_the_node_of_an_actor(
    nodes: _Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_actor, "_PLACING_S", 0.0)
    trainer = _Trainer(monkeypatch)
    nodes.errors = {HERE: None, OTHER: None}
    runners = _runners(trainer)
    assert await _opened(runners) == {HERE, OTHER}
    trainer.node = OTHER
    assert await _opened(runners) == set()
    assert _leaving(runners) == {HERE}
    await runners.close()
