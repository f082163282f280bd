"""The life of one instance, as decisions: no Ray, no engine, no clock of its own."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from aenv_ray.errors import (
    AenvError,
    InstanceExpired,
    InstanceReleased,
    SandboxLost,
)
from aenv_ray.models import (
    InstanceInfo,
    InstanceRecord,
    InstanceStatus,
    Lifetime,
)


class EndReason(StrEnum):
    """Why an instance ended, as far as its host knows."""

    RELEASED = "released"
    TTL = "ttl"
    IDLE = "idle"
    OWNER = "owner"
    LOST = "lost"


@dataclass
class InstanceLife:
    """What happened to one instance so far, and what follows from it.

    Status reads change nothing: only calls count as activity.
    """

    record: InstanceRecord
    last_active: float
    """Seconds since the epoch."""
    calls: int = 0
    calls_under_way: int = 0
    ended: EndReason | None = None
    end_cause: str = ""

    def call_started(self) -> None:
        """Note a call; raises when the instance cannot take one.

        Raises:
            InstanceExpired: Its TTL, idle timeout or owner ended it.
            InstanceReleased: It was released.
            SandboxLost: Its sandbox died.
        """
        if self.ended is not None:
            raise self.end_error()
        self.calls_under_way += 1

    def call_finished(self, now: float) -> None:
        """Note that a call has its outcome."""
        self.calls_under_way -= 1
        self.calls += 1
        self.last_active = now

    def due(self, now: float) -> EndReason | None:
        """Return why the instance must end now; None when it may live on."""
        if self.ended is not None:
            return None
        if now >= self.record.deadline:
            return EndReason.TTL
        idle = self.record.spec.idle_timeout_s
        if idle is not None and not self.calls_under_way and now - self.last_active >= idle:
            return EndReason.IDLE
        return None

    def end(self, reason: EndReason, cause: str, now: float) -> bool:
        """Note the end; False when it had ended before: the first reason stays.

        A sandbox that is found dead after its deadline died of that.
        """
        if self.ended is not None:
            return False
        if reason is EndReason.LOST and now >= self.record.deadline:
            reason, cause = EndReason.TTL, "its TTL passed"
        self.ended = reason
        self.end_cause = cause
        return True

    def renewed(self, ttl_s: float, now: float) -> InstanceRecord:
        """Return the record with the deadline moved to `ttl_s` from now; never earlier than it is.

        Raises:
            AenvError: The instance has ended.
        """
        if self.ended is not None:
            raise self.end_error()
        deadline = max(self.record.deadline, now + ttl_s)
        return self.record.model_copy(update={"deadline": deadline})

    def end_error(self) -> AenvError:
        """Return what a call gets after the end."""
        instance_id = self.record.id
        if self.ended is EndReason.RELEASED:
            return InstanceReleased(f"{instance_id} was released", instance_id=instance_id)
        if self.ended is EndReason.LOST:
            return SandboxLost(
                f"the sandbox of {instance_id} is gone: {self.end_cause}",
                instance_id=instance_id,
                hint="create a new instance; this episode counts as neither success nor failure",
            )
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
        """The status as others see it."""
        if self.ended is None:
            return InstanceStatus.RUNNING
        return InstanceStatus.FAILED if self.ended is EndReason.LOST else InstanceStatus.TERMINATED

    def info(self) -> InstanceInfo:
        """Return what is known now."""
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
        )
