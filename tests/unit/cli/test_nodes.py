"""What `aenv cluster drain` says of a node whose drain it does not see to its end."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from aenv_ray.actors.controller.draining import NodeState, NodeStatus
from aenv_ray.cli import nodes
from aenv_ray.cli.main import main
from aenv_ray.errors import FabricUnavailable

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


def test_a_drain_names_hosts_that_do_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_Fabric, "drain", lambda *_, **__: dataclasses.replace(STATE, silent=1))
    assert main(["cluster", "drain", "worker-3", "--timeout", "0"]) == 1
    said = capsys.readouterr().err
    assert "0 replicas of services, and 1 host without an answer after 0 s" in said


def test_a_drain_waits_for_a_head_that_is_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hook that failed would end the worker with all its instances."""
    away = dict.fromkeys(("connect", "drain", "nodes"), 2)
    drained = dataclasses.replace(STATE, status=NodeStatus.DRAINED, instances=0)

    def miss(step: str) -> None:
        if away[step]:
            away[step] -= 1
            raise FabricUnavailable(f"no head to {step}")

    class Fabric(_Fabric):
        def __init__(self) -> None:
            miss("connect")

        def drain(self, name: str, *, is_leaving: bool) -> NodeState:
            miss("drain")
            return super().drain(name, is_leaving=is_leaving)

        def nodes(self) -> list[NodeState]:
            miss("nodes")
            return [drained]

    monkeypatch.setattr(nodes, "_fabric", Fabric)
    monkeypatch.setattr(nodes, "_POLL_S", 0.0)
    assert main(["cluster", "drain", "worker-3"]) == 0
    assert not any(away.values())
    said = capsys.readouterr().err
    for step in away:
        assert said.count(f"waiting until the cluster answers: no head to {step}\n") == 1


def test_a_drain_without_a_head_fails_after_its_timeout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def connect() -> _Fabric:
        raise FabricUnavailable("no Ray listened at head:6379")

    monkeypatch.setattr(nodes, "_fabric", connect)
    assert main(["cluster", "drain", "worker-3", "--timeout", "0"]) == 1
    assert "no Ray listened at head:6379" in capsys.readouterr().err
