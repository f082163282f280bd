"""What `aenv cluster drain` says of a node whose drain it does not see to its end."""

from __future__ import annotations

from typing import Any

import pytest

from aenv_ray.actors.controller.draining import NodeState, NodeStatus
from aenv_ray.cli import nodes
from aenv_ray.cli.main import main

STATE = NodeState("ab" * 16, "worker-3", NodeStatus.DRAINING, instances=2, runners=0)


class _Fabric:
    def drain(self, name: str, *, is_leaving: bool) -> NodeState:
        assert (name, is_leaving) == ("worker-3", False)
        return STATE

    def nodes(self) -> list[NodeState]:
        return [STATE]


@pytest.fixture(autouse=True)
def _fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_fabric", _Fabric)


def test_who_stops_waiting_learns_that_the_node_stays_draining(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(nodes.time, "sleep", interrupt)
    assert main(["cluster", "drain", "worker-3"]) == 130
    said = capsys.readouterr().err
    assert "node abababababab stays draining; see aenv cluster undrain" in said
    assert said.endswith("interrupted\n")


def test_a_drain_that_takes_too_long_says_what_is_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["cluster", "drain", "worker-3", "--timeout", "0"]) == 1
    said = capsys.readouterr().err
    assert "still has 2 instances, 0 samplings and 0 replicas of services after 0 s" in said
    assert "it stays draining" in said
