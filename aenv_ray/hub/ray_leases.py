"""Leases of instances that Ray code makes, which the hub looks after by comparing.

Ray code releases its instances without the hub: what it has leases for and what runs may differ.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from typing import Final

from aenv_ray.hub.records import Lease
from aenv_ray.ids import InstanceId
from aenv_ray.models import InstanceInfo, InstanceSpec, InstanceStatus

MADE_BY_RAY: Final = ("aenv.made-by", "ray")
"""Label of these leases."""


def lease_of(
    spec: InstanceSpec,
    instance_id: InstanceId,
    now: float,
    starting_s: float,
    status: InstanceStatus,
) -> Lease:
    """Return the lease of an instance, in a state of its making.

    Args:
        spec: What was asked for.
        instance_id: The instance's, or until it has one the create's.
        now: Seconds since the epoch.
        starting_s: How long a place is kept while it is made.
        status: PENDING or RUNNING.
    """
    is_running = status is InstanceStatus.RUNNING
    key, value = MADE_BY_RAY
    return Lease(
        id=instance_id,
        reference=spec.reference,
        digest=spec.digest,
        owner=spec.owner or "",
        labels={**spec.labels, key: value},
        engine=spec.engine,
        status=status,
        created_at=now,
        deadline=now + starting_s + (spec.ttl_s if is_running else 0.0),
        capability=f"ray-{secrets.token_hex(20)}",  # given to nobody
    )


def changes(
    leases: Sequence[Lease], running: Sequence[InstanceInfo], doubtful: Collection[str]
) -> tuple[list[str], dict[str, float]]:
    """Compare leases of Ray code, listed first, with what runs.

    Args:
        leases: Those in the hub.
        running: The instances that hosts tell of.
        doubtful: Ids of instances whose host does not answer: for all that is known they run.

    Returns:
        The ids of leases whose instance is gone, and the deadlines of those that were moved.
    """
    deadlines = {str(info.id): info.deadline for info in running}
    settled = [lease for lease in leases if lease.status is InstanceStatus.RUNNING]
    known = {*deadlines, *doubtful}
    gone = [lease.id for lease in settled if lease.id not in known]
    moved = {
        lease.id: deadlines[lease.id]
        for lease in settled
        if lease.id in deadlines and deadlines[lease.id] != lease.deadline
    }
    return gone, moved
