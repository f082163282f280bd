"""The life of one instance: pure decisions, without Ray, engine or clock."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

from aenv_ray.engines.base import EndCause, lost
from aenv_ray.errors import AenvError, InstanceExpired, InstanceReleased
from aenv_ray.models import InstanceInfo, InstanceRecord, InstanceStatus, Lifetime


class EndReason(StrEnum):
    """Why an instance ended."""

    RELEASED = "released"
    TTL = "ttl"
    IDLE = "idle"
    OWNER = "owner"
    LOST = "lost"


@dataclass
class InstanceLife:
    """The state of one instance. Only calls count as activity; reading the status does not."""

    record: InstanceRecord
    last_active: float
    """Seconds since the epoch."""
    calls: int = 0
    calls_under_way: int = 0
    ended: EndReason | None = None
    end_cause: EndCause | None = None
    renewing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by a renewal until its deadline is recorded, so that the next one cannot precede it."""

    def call_started(self) -> None:
        """Note the start of a call.

        Raises:
            InstanceExpired: Its TTL, idle timeout or owner ended it.
            InstanceReleased: It was released.
            SandboxLost: Its sandbox died; `SandboxDiedInside` if something in it ended it.
        """
        if self.ended is not None:
            raise self.end_error()
        self.calls_under_way += 1

    def call_finished(self, now: float) -> None:
        """Note the end of a call."""
        self.calls_under_way -= 1
        self.calls += 1
        self.last_active = now

    def direct_calls(self, calls: int, change: int, last_active: float) -> None:
        """Record the activity of a caller that is connected directly to the sandbox.

        Args:
            calls: Calls that have ended.
            change: 1 when the caller begins to make calls, -1 when it pauses, else 0.
            last_active: When its last call ran, in seconds since the epoch.
        """
        self.calls += calls
        self.calls_under_way += change
        self.last_active = max(self.last_active, last_active)

    def due(self, now: float) -> EndReason | None:
        """Return why the instance must end now, or None."""
        if self.ended is not None:
            return None
        if now >= self.record.deadline:
            return EndReason.TTL
        idle = self.record.spec.idle_timeout_s
        if idle is not None and not self.calls_under_way and now - self.last_active >= idle:
            return EndReason.IDLE
        return None

    def end(self, reason: EndReason, cause: EndCause, now: float) -> bool:
        """Note the end; return False if the instance had ended before: the first reason counts.

        A sandbox that is found dead after its deadline counts as expired.
        """
        if self.ended is not None:
            return False
        if reason is EndReason.LOST and now >= self.record.deadline:
            reason, cause = EndReason.TTL, EndCause("its TTL passed")
        self.ended = reason
        self.end_cause = cause
        return True

    def renewed(self, ttl_s: float, now: float) -> InstanceRecord:
        """Return the record with the deadline `ttl_s` from now, unless it is later already.

        Raises:
            AenvError: The instance has ended.
        """
        if self.ended is not None:
            raise self.end_error()
        deadline = max(self.record.deadline, now + ttl_s)
        return self.record.model_copy(update={"deadline": deadline})

    def end_error(self) -> AenvError:
        """Return the error that calls raise after the end."""
        instance_id = self.record.id
        if self.ended is EndReason.RELEASED:
            return InstanceReleased(
                f"{instance_id} was released",
                instance_id=instance_id,
                hint="create another instance",
            )
        if self.ended is EndReason.LOST:
            return lost(instance_id, self.end_cause or EndCause("its end was not observed"))
        why = {
            EndReason.TTL: f"the TTL of {instance_id} passed",
            EndReason.IDLE: f"{instance_id} was idle for {self.record.spec.idle_timeout_s:g} s"
            if self.record.spec.idle_timeout_s
            else f"{instance_id} was idle",
            EndReason.OWNER: f"the Ray job that owned {instance_id} ended",
        }[self.ended or EndReason.TTL]
        way_out = {
            EndReason.IDLE: "give it a longer idle_timeout, or none",
            EndReason.OWNER: 'create it with lifetime="detached"',
        }.get(self.ended or EndReason.TTL, "give it a longer ttl, or call renew()")
        return InstanceExpired(why, instance_id=instance_id, hint=way_out)

    @property
    def status(self) -> InstanceStatus:
        """The status for listings."""
        if self.ended is None:
            return InstanceStatus.RUNNING
        return InstanceStatus.FAILED if self.ended is EndReason.LOST else InstanceStatus.TERMINATED

    def info(self) -> InstanceInfo:
        """Return the present info."""
        record, spec = self.record, self.record.spec
        return InstanceInfo(
            id=spec.instance_id,
            requested_id=record.requested_id,
            reference=spec.reference,
            status=self.status,
            engine=spec.engine,
            node_id=record.node_id,
            host=record.host_id,
            density=record.density,
            created_at=record.created_at,
            deadline=record.deadline,
            idle_timeout_s=spec.idle_timeout_s,
            lifetime=Lifetime.DETACHED if spec.job_id is None else Lifetime.JOB,
            owner=spec.owner,
            labels=spec.labels,
            isolation=record.isolation,
            start_mode=record.start_mode,
            calls=self.calls,
            generation=record.generation,
            places=spec.places,
        )
