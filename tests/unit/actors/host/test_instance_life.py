"""The life of one instance: deadlines, idleness, and what ends it for good."""

from __future__ import annotations

import pytest

from aenv_ray.actors.host.instance import EndReason, InstanceLife
from aenv_ray.engines.base import EndCause
from aenv_ray.errors import AenvError, InstanceExpired, InstanceReleased, SandboxLost
from aenv_ray.ids import HostId, InstanceId
from aenv_ray.models import (
    ActorDensity,
    InstanceRecord,
    InstanceSpec,
    InstanceStatus,
    Isolation,
    Lifetime,
)

START = 1_000_000.0


def life(
    *, ttl_s: float = 100.0, idle_timeout_s: float | None = None, job_id: str | None = "job-1"
) -> InstanceLife:
    spec = InstanceSpec(
        instance_id=InstanceId("env-abc"),
        reference="env@1.0.0",
        digest="d",
        ttl_s=ttl_s,
        idle_timeout_s=idle_timeout_s,
        job_id=job_id,
        environment_variables={"TOKEN": "hush-hush"},
    )
    record = InstanceRecord(
        spec=spec,
        host_id=HostId("host-n-0"),
        node_id="n",
        density=ActorDensity.SHARED,
        created_at=START,
        deadline=START + ttl_s,
        isolation=Isolation(kind="none"),
        start_mode="template",
        generation=2,
    )
    return InstanceLife(record, last_active=START)


def test_an_instance_lives_until_its_deadline_and_not_longer() -> None:
    """Invariant 3: it is due at its deadline, whatever it does then."""
    instance = life(ttl_s=100.0)
    assert instance.due(START + 99.9) is None
    assert instance.due(START + 100.0) is EndReason.TTL
    instance.call_started()
    assert instance.due(START + 100.0) is EndReason.TTL


def test_an_idle_instance_is_due_after_its_idle_timeout() -> None:
    instance = life(idle_timeout_s=10.0)
    assert instance.due(START + 9.9) is None
    assert instance.due(START + 10.0) is EndReason.IDLE


def test_without_an_idle_timeout_idleness_ends_nothing() -> None:
    assert life(ttl_s=1e6).due(START + 999_999.0) is None


def test_a_call_under_way_is_activity_however_long_it_takes() -> None:
    instance = life(ttl_s=1000.0, idle_timeout_s=10.0)
    instance.call_started()
    assert instance.due(START + 500.0) is None
    instance.call_finished(START + 500.0)
    assert instance.due(START + 509.9) is None
    assert instance.due(START + 510.0) is EndReason.IDLE


def test_only_the_last_of_parallel_calls_lets_it_become_idle() -> None:
    instance = life(ttl_s=1000.0, idle_timeout_s=10.0)
    instance.call_started()
    instance.call_started()
    instance.call_finished(START + 1.0)
    assert instance.due(START + 100.0) is None
    instance.call_finished(START + 100.0)
    assert instance.due(START + 110.0) is EndReason.IDLE
    assert instance.info().calls == 2


def test_status_reads_renew_nothing() -> None:
    """Neither the status nor the info counts as activity."""
    instance = life(idle_timeout_s=10.0)
    before = instance.info()
    assert instance.status is InstanceStatus.RUNNING
    assert instance.info() == before
    assert instance.due(START + 10.0) is EndReason.IDLE


def test_the_ttl_is_named_before_idleness_when_both_are_due() -> None:
    assert life(ttl_s=5.0, idle_timeout_s=5.0).due(START + 5.0) is EndReason.TTL


@pytest.mark.parametrize(
    ("reason", "error", "words", "status"),
    [
        (EndReason.RELEASED, InstanceReleased, "released", InstanceStatus.TERMINATED),
        (EndReason.TTL, InstanceExpired, "TTL of env-abc passed", InstanceStatus.TERMINATED),
        (EndReason.IDLE, InstanceExpired, "idle for 7 s", InstanceStatus.TERMINATED),
        (EndReason.OWNER, InstanceExpired, "Ray job", InstanceStatus.TERMINATED),
        (EndReason.LOST, SandboxLost, "killed by signal 9", InstanceStatus.FAILED),
    ],
)
def test_a_call_after_the_end_says_what_ended_it(
    reason: EndReason, error: type[AenvError], words: str, status: InstanceStatus
) -> None:
    """Invariant 2: each end is a typed error, and only a lost sandbox voids as lost."""
    instance = life(idle_timeout_s=7.0)
    assert instance.end(reason, EndCause("killed by signal 9"), START + 1.0)
    with pytest.raises(error, match=words) as caught:
        instance.call_started()
    assert vars(caught.value)["instance_id"] == "env-abc"
    assert instance.status is status
    assert instance.due(START + 1e9) is None
    assert instance.calls_under_way == 0


def test_every_reason_has_an_error_also_without_an_idle_timeout() -> None:
    for reason in EndReason:
        instance = life()
        instance.end(reason, EndCause("cause"), START)
        assert "env-abc" in instance.end_error().message


def test_the_first_end_stays() -> None:
    """Invariant 4: a second end, of whatever kind, changes nothing."""
    instance = life()
    assert instance.end(EndReason.RELEASED, EndCause("asked"), START)
    assert not instance.end(EndReason.LOST, EndCause("gone"), START + 1.0)
    assert not instance.end(EndReason.RELEASED, EndCause("asked again"), START + 2.0)
    assert instance.ended is EndReason.RELEASED
    assert instance.end_cause == EndCause("asked")


def test_a_sandbox_found_dead_after_its_deadline_expired() -> None:
    """Invariant 2: an expiry is not reported as a loss."""
    late, early = life(ttl_s=100.0), life(ttl_s=100.0)
    late.end(EndReason.LOST, EndCause("connection closed"), START + 100.0)
    early.end(EndReason.LOST, EndCause("connection closed"), START + 99.0)
    assert late.ended is EndReason.TTL
    assert early.ended is EndReason.LOST


def test_renew_counts_from_now_and_never_shortens() -> None:
    instance = life(ttl_s=100.0)
    assert instance.renewed(200.0, START + 50.0).deadline == START + 250.0
    assert instance.renewed(1.0, START + 50.0).deadline == START + 100.0
    assert instance.record.deadline == START + 100.0, "the caller stores the record, then uses it"


def test_what_has_ended_cannot_be_renewed() -> None:
    instance = life()
    instance.end(EndReason.RELEASED, EndCause("asked"), START)
    with pytest.raises(InstanceReleased):
        instance.renewed(100.0, START)


def test_a_call_that_finishes_after_the_end_is_still_counted() -> None:
    instance = life()
    instance.call_started()
    instance.end(EndReason.RELEASED, EndCause("asked"), START)
    instance.call_finished(START + 1.0)
    assert (instance.calls, instance.calls_under_way) == (1, 0)


def test_info_tells_whose_it_is_and_keeps_its_secrets() -> None:
    """Invariant 10: the variables of an instance are in no listing and no repr."""
    owned, detached = life(job_id="job-1"), life(job_id=None)
    assert owned.info().lifetime is Lifetime.JOB
    assert detached.info().lifetime is Lifetime.DETACHED
    assert owned.info().generation == 2
    for text in (owned.info().model_dump_json(), repr(owned.info()), repr(owned)):
        assert "hush-hush" not in text
