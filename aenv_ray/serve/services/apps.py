"""Services as Ray Serve applications, one per service: deploy, inspect, delete."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from aenv_ray import errors
from aenv_ray.actors.ray_shell import ray_serve
from aenv_ray.config import settings as process_settings
from aenv_ray.errors import DeadlineExceeded
from aenv_ray.hub.services import ServiceRecord, is_alone

APP_PREFIX: Final = "aenv-service-"
DEPLOYMENT: Final = "replica"
MAX_ONGOING_CALLS: Final = 256
"""Per replica. With Serve's default of 5, long calls would block short ones."""
_CALLS_PER_REPLICA: Final = 4.0
"""Target of autoscaling."""
_UPSCALE_DELAY_S: Final = 5.0
"""How long the load must call for more replicas. Serve's default of 30 s suits models, which take
minutes to load; a sandbox takes seconds."""
_MAX_START_FAILURES: Final = 3
"""Failed starts of replicas of a new version after which a rolling update stops."""
_HEALTH_PERIOD_S: Final = 2.0
_HEALTH_TIMEOUT_S: Final = 30.0
_DRAIN_POLL_S: Final = 0.5
_DRAIN_S: Final = 120.0
"""How long a replica that is stopping may finish its calls."""
_DELETE_S: Final = _DRAIN_S + 60.0
_DELETE_POLL_S: Final = 0.2
_REASON_CHARS: Final = 2000


class ServiceStatus(StrEnum):
    """State of a service, in AEnvironment's words."""

    PENDING = "Pending"
    """Parked: it has 0 replicas on purpose."""
    CREATING = "Creating"
    """No replica is healthy yet."""
    UPDATING = "Updating"
    """It answers calls; replicas are being added, replaced or removed."""
    RUNNING = "Running"
    FAILED = "Failed"
    """Replicas do not start or are unhealthy. `available_replicas` still answer calls."""
    TERMINATED = "Terminated"
    """The hub has its record, but nothing runs."""


class ServiceState(BaseModel):
    """State of a service as Serve reports it."""

    model_config = ConfigDict(frozen=True)

    status: ServiceStatus
    available_replicas: int = 0
    target_replicas: int = 0
    reason: str = ""


def app_name(service_id: str) -> str:
    """Return the name of a service's Serve application."""
    return f"{APP_PREFIX}{service_id}"


class Apps(ABC):
    """The applications of services. Methods block."""

    @abstractmethod
    def deploy(self, record: ServiceRecord, *, wait: bool) -> None:
        """Create or update the application of a service.

        Replicas of the same revision are not restarted when their number changes. Replicas of
        another revision are replaced: new ones are healthy before old ones stop, unless the service
        has a storage volume with a single writer. A service with 0 replicas has no application.

        Args:
            record: The service.
            wait: Return once all replicas are healthy, instead of immediately.

        Raises:
            RuntimeError: `wait`, and they do not become healthy.
        """

    @abstractmethod
    def delete(self, service_id: str, *, wait: bool) -> None:
        """Delete the application of a service; does nothing if there is none.

        Args:
            service_id: The service.
            wait: Return once its replicas have ended, instead of immediately.

        Raises:
            DeadlineExceeded: `wait`, and they do not end.
        """

    @abstractmethod
    def states(self, records: Sequence[ServiceRecord]) -> list[ServiceState]:
        """Return the state of each service."""


class ServeApps(Apps):
    """Applications of the Ray cluster that this process is connected to."""

    def deploy(self, record: ServiceRecord, *, wait: bool) -> None:  # noqa: D102
        if record.replicas == 0:
            self.delete(record.id, wait=wait)  # Serve has no applications without replicas
            return
        from aenv_ray.serve.services.service_replica import ServiceReplica

        ray_serve.start()
        ray_serve.deploy(
            ServiceReplica,
            record.model_dump(mode="json", exclude={"previous", "taken_back"}),
            process_settings().artifacts_url,
            app=app_name(record.id),
            version=record.revision,
            wait=wait,
            routes_by_session=True,
            name=DEPLOYMENT,
            max_ongoing_requests=MAX_ONGOING_CALLS,
            max_constructor_retry_count=_MAX_START_FAILURES,
            health_check_period_s=_HEALTH_PERIOD_S,
            health_check_timeout_s=_HEALTH_TIMEOUT_S,
            graceful_shutdown_timeout_s=_DRAIN_S,
            graceful_shutdown_wait_loop_s=_DRAIN_POLL_S,
            # With a single writer, the old replica must release the storage before the new one.
            max_surge_percent=0 if is_alone(record) else 100,
            rolling_update_percentage=1.0,
            ray_actor_options={"num_cpus": 0},
            **_size(record),
        )

    def delete(self, service_id: str, *, wait: bool) -> None:  # noqa: D102
        name = app_name(service_id)
        if name not in ray_serve.applications():
            return
        ray_serve.delete(name, wait=False)
        until = time.monotonic() + _DELETE_S
        while wait and name in ray_serve.applications():
            if time.monotonic() > until:
                raise DeadlineExceeded(
                    f"service {service_id} did not end within {_DELETE_S:g} s",
                    hint=f"its calls may still run; aenv service get {service_id} shows its state",
                )
            time.sleep(_DELETE_POLL_S)

    def states(self, records: Sequence[ServiceRecord]) -> list[ServiceState]:  # noqa: D102
        known = ray_serve.applications() if records else {}
        return [_state(record, known.get(app_name(record.id))) for record in records]


def _size(record: ServiceRecord) -> dict[str, Any]:
    if record.autoscale is None:
        return {"num_replicas": record.replicas}
    return {
        "autoscaling_config": {
            "min_replicas": record.autoscale.min_replicas,
            "max_replicas": record.autoscale.max_replicas,
            "target_ongoing_requests": _CALLS_PER_REPLICA,
            "upscale_delay_s": _UPSCALE_DELAY_S,
        }
    }


def _state(record: ServiceRecord, application: Any) -> ServiceState:
    """Return the state of a service, given Serve's status of its application if it has one."""
    if application is None and record.replicas == 0:
        return ServiceState(status=ServiceStatus.PENDING)
    if application is None:
        return ServiceState(status=ServiceStatus.TERMINATED, reason="Serve has no such application")
    deployment = application.deployments.get(DEPLOYMENT)
    states = {} if deployment is None else deployment.replica_states
    target, available = record.replicas, states.get("RUNNING", 0)
    if record.autoscale is not None:
        target = max(record.autoscale.min_replicas, available)
    status = status_of(application.status.value, target, available)
    reason = (deployment.message if deployment else "") or application.message
    return ServiceState(
        status=status,
        available_replicas=available,
        target_replicas=target,
        reason=cause_in(reason)[-_REASON_CHARS:] if status is ServiceStatus.FAILED else "",
    )


def cause_in(text: str) -> str:
    """Return our own error at the end of a traceback in Serve's message, or else the message."""
    _, found, cause = text.rpartition(f"{errors.__name__}.")
    return cause if found else text


def status_of(application: str, target: int, available: int) -> ServiceStatus:
    """Return a service's status.

    Args:
        application: Serve's status, such as ``RUNNING``.
        target: Number of replicas it should have.
        available: Number of replicas that answer.
    """
    if application in {"DEPLOY_FAILED", "UNHEALTHY"}:
        return ServiceStatus.FAILED
    if application == "DELETING" and target:
        return ServiceStatus.TERMINATED
    if application == "RUNNING" and target:
        return ServiceStatus.RUNNING
    if not target:
        return ServiceStatus.UPDATING if available else ServiceStatus.PENDING
    return ServiceStatus.UPDATING if available else ServiceStatus.CREATING
