"""Leases of instances that Ray code creates.

Ray code releases its instances without the hub, so the hub compares these leases with the running
instances.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from typing import Final

from aenv_ray.hub.records import Lease
from aenv_ray.ids import InstanceId
from aenv_ray.models import InstanceInfo, InstanceSpec, InstanceStatus

MADE_BY_RAY: Final = ("aenv.made-by", "ray")
"""Label that marks these leases."""


def lease_of(
    spec: InstanceSpec,
    instance_id: InstanceId,
    now: float,
    starting_s: float,
    status: InstanceStatus,
) -> Lease:
    """Return the lease of an instance that starts within `starting_s`, or runs since `now`."""
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
        places=spec.places,
    )


def changes(
    leases: Sequence[Lease], running: Sequence[InstanceInfo], doubtful: Collection[str]
) -> tuple[list[str], dict[str, float]]:
    """Compare leases with the running instances.

    Args:
        leases: The leases of Ray code, read before the instances.
        running: The instances that hosts report.
        doubtful: Ids of instances whose host does not answer; they may be running.

    Returns:
        The ids of leases whose instance is gone, and changed deadlines by id.
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
