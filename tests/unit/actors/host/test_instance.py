"""The life of an instance, as decisions."""

from __future__ import annotations

from typing import Any

import pytest

from aenv_ray.actors.host.instance import EndReason, InstanceLife
from aenv_ray.engines.base import EndCause
from aenv_ray.errors import InstanceExpired, InstanceReleased, SandboxLost
from aenv_ray.ids import InstanceId
from aenv_ray.models import InstanceStatus, Lifetime
from tests.contract.hub.store_contract import record

T0 = 1000.0


def life(**fields: Any) -> InstanceLife:
    base = record(deadline=T0 + 100.0, created_at=T0, **fields)
    return InstanceLife(base, last_active=T0)


def test_it_is_due_at_its_deadline_and_not_before() -> None:
    """Invariant 3."""
    one = life()
    one.call_started()
    assert one.due(T0 + 99.9) is None
    assert one.due(T0 + 100.0) is EndReason.TTL


def test_it_is_due_when_nobody_called_for_its_idle_timeout() -> None:
    one = life()  # its idle timeout is 5 s
    assert one.due(T0 + 4.9) is None
    assert one.due(T0 + 5.0) is EndReason.IDLE


def test_a_call_under_way_is_activity_however_long_it_takes() -> None:
    one = life()
    one.call_started()
    one.call_started()
    one.call_finished(T0 + 20.0)
    assert one.due(T0 + 60.0) is None
    one.call_finished(T0 + 60.0)
    assert one.due(T0 + 64.9) is None
    assert one.due(T0 + 65.0) is EndReason.IDLE
    assert one.calls == 2


def test_looking_at_it_renews_nothing() -> None:
    """Status reads are no activity."""
    one = life()
    one.info()
    assert one.status is InstanceStatus.RUNNING
    assert one.due(T0 + 5.0) is EndReason.IDLE


def test_without_an_idle_timeout_only_the_deadline_counts() -> None:
    spec = record().spec.model_copy(update={"idle_timeout_s": None})
    assert life(spec=spec).due(T0 + 99.0) is None


@pytest.mark.parametrize(
    ("reason", "error", "status", "words"),
    [
        (EndReason.RELEASED, InstanceReleased, InstanceStatus.TERMINATED, "released"),
        (EndReason.TTL, InstanceExpired, InstanceStatus.TERMINATED, "TTL"),
        (EndReason.IDLE, InstanceExpired, InstanceStatus.TERMINATED, "idle for 5 s"),
        (EndReason.OWNER, InstanceExpired, InstanceStatus.TERMINATED, "Ray job"),
        (EndReason.LOST, SandboxLost, InstanceStatus.FAILED, "out of memory"),
    ],
)
def test_after_its_end_calls_are_told_why(
    reason: EndReason, error: type, status: InstanceStatus, words: str
) -> None:
    """Invariant 2: each end is its own error, and none is a result."""
    one = life()
    assert one.end(reason, EndCause("out of memory"), T0 + 1.0)
    assert one.status is status
    with pytest.raises(error, match=words) as raised:
        one.call_started()
    assert raised.value.instance_id == one.record.id
    assert one.calls_under_way == 0
    with pytest.raises(error):
        one.renewed(60.0, T0 + 1.0)
    assert one.due(T0 + 1e6) is None


@pytest.mark.parametrize(
    ("reason", "way_out"),
    [(EndReason.TTL, "renew"), (EndReason.IDLE, "idle_timeout"), (EndReason.OWNER, "detached")],
)
def test_each_end_names_its_own_way_out(reason: EndReason, way_out: str) -> None:
    one = life()
    one.end(reason, EndCause(""), T0 + 1.0)
    assert way_out in str(one.end_error().hint)


def test_the_first_reason_stays() -> None:
    """Invariant 4: release works from every state, any number of times."""
    one = life()
    assert one.end(EndReason.RELEASED, EndCause("released"), T0)
    assert not one.end(EndReason.LOST, EndCause("its process died"), T0)
    assert not one.end(EndReason.RELEASED, EndCause("again"), T0)
    assert isinstance(one.end_error(), InstanceReleased)


def test_a_sandbox_found_dead_after_its_deadline_died_of_that() -> None:
    one = life()
    assert one.end(EndReason.LOST, EndCause("killed"), T0 + 100.0)
    assert isinstance(one.end_error(), InstanceExpired)


def test_renewing_never_shortens() -> None:
    one = life()
    assert one.renewed(10.0, T0).deadline == T0 + 100.0
    assert one.renewed(500.0, T0 + 1.0).deadline == T0 + 501.0
    assert one.record.deadline == T0 + 100.0  # a decision, not an act


def test_info_says_what_the_record_says() -> None:
    info = life().info()
    assert info.id == InstanceId("env-abc")
    assert info.lifetime is Lifetime.JOB
    assert info.generation == 3
    detached = record().spec.model_copy(update={"job_id": None})
    assert life(spec=detached).info().lifetime is Lifetime.DETACHED
