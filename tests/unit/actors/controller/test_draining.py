"""The states of nodes, and what draining ones take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aenv_ray.actors.controller.draining import NodeStatus, node_named, node_states
from aenv_ray.actors.controller.metrics import slots
from aenv_ray.actors.controller.placement import (
    HostLoad,
    may_grow,
    shared_host_names,
    usable,
)
from aenv_ray.actors.ray_shell.nodes import NodeFacts
from aenv_ray.errors import ConfigError

HEAD = NodeFacts(cores=0, is_head=True, machine="head")
WORKER = NodeFacts(cores=8, slots=4, machine="one")
DRAINING = NodeFacts(cores=8, slots=4, machine="two", is_draining=True)
NODES = {"aaaaaaaa1": HEAD, "bbbbbbbb1": WORKER, "bbbbbbbb2": DRAINING}


@pytest.mark.parametrize(
    ("instances", "runners", "status"),
    [
        ({}, {}, NodeStatus.DRAINED),
        ({"bbbbbbbb2": 1}, {}, NodeStatus.DRAINING),
        ({}, {"bbbbbbbb2": 1}, NodeStatus.DRAINING),
        ({"bbbbbbbb1": 1}, {"bbbbbbbb1": 1}, NodeStatus.DRAINED),
    ],
)
def test_a_node_is_drained_once_it_has_neither_instances_nor_samplings(
    instances: dict[str, int], runners: dict[str, int], status: NodeStatus
) -> None:
    found = node_states(NODES, usable(NODES), instances, runners, {"bbbbbbbb2": 1}, {})
    assert [one.machine for one in found] == ["head", "one", "two"]
    assert [one.status for one in found] == [NodeStatus.CONTROL, NodeStatus.READY, status]


def test_a_node_that_is_leaving_is_drained_once_its_replicas_have_moved() -> None:
    nodes = NODES | {"bbbbbbbb2": replace(DRAINING, is_leaving=True)}
    for replicas, status in ({"bbbbbbbb2": 1}, NodeStatus.DRAINING), ({}, NodeStatus.DRAINED):
        found = node_states(nodes, usable(nodes), {}, {}, replicas, {})
        assert found[-1].status is status
        assert found[-1].replicas == len(replicas)


def test_a_node_whose_hosts_do_not_all_answer_is_not_drained() -> None:
    """They may have instances."""
    found = node_states(NODES, usable(NODES), {}, {}, {}, {"bbbbbbbb2": 1})
    assert (found[-1].status, found[-1].silent) == (NodeStatus.DRAINING, 1)


def test_a_draining_node_gets_no_instances_and_others_may_come_for_it() -> None:
    assert usable(NODES).keys() == {"bbbbbbbb1"}
    assert shared_host_names("bbbbbbbb2", DRAINING) == {}
    assert may_grow([NodeFacts(cores=8, is_draining=True)])
    loads = [HostLoad("x", "bbbbbbbb1", 1, 4), HostLoad("y", "bbbbbbbb2", 3, 3)]
    assert slots(NODES, loads) == {"free": 3, "used": 4}


def test_a_node_is_named_by_its_id_its_beginning_or_its_machine() -> None:
    machines = {node: facts.machine for node, facts in NODES.items()}
    for name in ("aaaaaaaa1", "aaaaaa", "head"):
        assert node_named(name, NODES, machines) == "aaaaaaaa1"
    for name in ("bbbbbbbb", "b", "nobody"):
        with pytest.raises(ConfigError, match=name) as raised:
            node_named(name, NODES, machines)
        assert "aenv cluster nodes" in str(raised.value.hint)
