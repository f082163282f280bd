"""Which spare hosts there should be."""

from __future__ import annotations

import pytest

from aenv_ray.actors.controller.spare_hosts import SPARE_S, SpareHostKind, SpareHostPlan

A, B, C = (SpareHostKind("node", name) for name in "abc")
ELSEWHERE = SpareHostKind("another", "a")


@pytest.fixture
def plan() -> SpareHostPlan:
    return SpareHostPlan(per_node=2)


def test_a_node_without_dedicated_creates_has_no_spares(plan: SpareHostPlan) -> None:
    assert plan.missing(0.0) is None
    assert plan.take(A) is None


def test_a_spare_is_missing_until_it_is_ready_and_again_once_it_is_taken(
    plan: SpareHostPlan,
) -> None:
    plan.created(A, "process", 0.0)
    assert plan.missing(1.0) == A
    plan.ready("a-1", A)
    assert plan.missing(1.0) is None
    assert plan.take(A) == "a-1"
    assert plan.take(A) is None
    assert plan.missing(1.0) == A


def test_a_spare_is_only_for_its_node_and_environment(plan: SpareHostPlan) -> None:
    plan.created(A, "process", 0.0)
    plan.ready("a-1", A)
    assert plan.take(B) is None
    assert plan.take(ELSEWHERE) is None
    assert plan.names == {"a-1"}


def test_a_node_keeps_spares_for_the_environments_created_last(plan: SpareHostPlan) -> None:
    for kind in (A, B, A, C, ELSEWHERE):
        plan.created(kind, "process", 0.0)
        plan.ready(f"{kind.environment}-{kind.node_id}", kind)
    assert plan.take_surplus(1.0) == ["b-node"]
    assert plan.missing(1.0) is None
    assert plan.take_surplus(1.0) == []


def test_spares_end_when_nobody_creates_any_more(plan: SpareHostPlan) -> None:
    plan.created(A, "process", 0.0)
    plan.ready("a-1", A)
    assert plan.take_surplus(SPARE_S - 1) == []
    assert plan.take_surplus(SPARE_S) == ["a-1"]
    assert plan.missing(SPARE_S) is None


def test_a_dead_spare_is_replaced(plan: SpareHostPlan) -> None:
    plan.created(A, "process", 0.0)
    plan.ready("a-1", A)
    plan.gone({"a-1", "unknown"})
    assert plan.take(A) is None
    assert plan.missing(1.0) == A


def test_a_node_on_which_no_spare_starts_is_left_alone_until_the_next_create(
    plan: SpareHostPlan,
) -> None:
    plan.created(A, "process", 0.0)
    plan.failed(A)
    assert plan.missing(1.0) is None
    plan.created(A, "docker", 2.0)
    assert plan.missing(3.0) == A
    assert plan.engine(A) == "docker"


def test_a_limit_of_none_keeps_none() -> None:
    plan = SpareHostPlan(per_node=0)
    plan.created(A, "process", 0.0)
    assert plan.missing(0.0) is None


def test_a_draining_node_keeps_no_spares(plan: SpareHostPlan) -> None:
    for kind in (A, ELSEWHERE):
        plan.created(kind, "process", 0.0)
    plan.ready("a-1", A)
    plan.drain({A.node_id})
    assert plan.take_surplus(1.0) == ["a-1"]
    assert plan.missing(1.0) == ELSEWHERE
    assert plan.take(A) is None
