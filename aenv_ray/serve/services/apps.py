"""Services as Ray Serve applications, one for each: deployed, looked at, removed."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from aenv_ray import errors
from aenv_ray.config import settings as process_settings
from aenv_ray.errors import DeadlineExceeded
from aenv_ray.hub.services import ServiceRecord, is_alone

APP_PREFIX: Final = "aenv-service-"
DEPLOYMENT: Final = "replica"
CALLS_AT_ONCE: Final = 256
"""Of one replica; Serve's own 5 would let long calls block short ones."""
_CALLS_PER_REPLICA: Final = 4.0
"""What autoscaling aims at."""
_MORE_AFTER_S: Final = 5.0
"""So long the mean of calls must ask for more replicas before Serve adds them: they are there in
seconds. Its own 30 s are for models, which load for minutes."""
_ROUTER: Final[Any] = "aenv_ray.serve.services.router:SessionRouter"
_STARTS: Final = 3
"""Replicas of a new version that may fail to start before the roll is given up."""
_HEALTH_PERIOD_S: Final = 2.0
_HEALTH_TIMEOUT_S: Final = 30.0
_GRACE_LOOK_S: Final = 0.5
_GRACE_S: Final = 120.0
"""Calls under way may go on for so long in a replica that is to end."""
_GONE_S: Final = _GRACE_S + 60.0
_LOOK_S: Final = 0.2
_REASON_CHARS: Final = 2000


class ServiceStatus(StrEnum):
    """How a service is, in AEnvironment's words."""

    PENDING = "Pending"
    """Parked: it has 0 replicas by intention."""
    CREATING = "Creating"
    """No replica is healthy yet."""
    UPDATING = "Updating"
    """It answers; replicas are being added, replaced or ended."""
    RUNNING = "Running"
    FAILED = "Failed"
    """Replicas do not start or are not healthy; `available_replicas` answer all the same."""
    TERMINATED = "Terminated"
    """Nothing of it runs, though the hub knows it."""


class ServiceState(BaseModel):
    """What Serve knows of a service."""

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
        """Make or change the application of a service.

        Replicas of the same revision stay, whatever their number becomes. Those of another one are
        replaced: new ones are healthy before old ones go, unless they have a storage with one
        writer. Without replicas there is none.

        Args:
            record: What it should be.
            wait: Return once all replicas are healthy, instead of at once.

        Raises:
            RuntimeError: `wait`, and they do not become so.
        """

    @abstractmethod
    def delete(self, service_id: str, *, wait: bool) -> None:
        """Remove the application of a service; does nothing where there is none.

        Args:
            service_id: Whose.
            wait: Return once its replicas are gone, instead of at once.

        Raises:
            DeadlineExceeded: `wait`, and they do not go.
        """

    @abstractmethod
    def states(self, records: Sequence[ServiceRecord]) -> list[ServiceState]:
        """Return how services are."""


class ServeApps(Apps):
    """Those of the Ray cluster that this process is connected to."""

    def deploy(self, record: ServiceRecord, *, wait: bool) -> None:  # noqa: D102
        if record.replicas == 0:
            self.delete(record.id, wait=wait)  # Serve keeps no application without replicas
            return
        from ray import serve
        from ray.serve.config import ProxyLocation, RequestRouterConfig

        from aenv_ray.serve.services.service_replica import ServiceReplica

        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # its progress is not ours to tell
        serve.start(proxy_location=ProxyLocation.Disabled)
        deployment = serve.deployment(
            name=DEPLOYMENT,
            max_ongoing_requests=CALLS_AT_ONCE,
            max_constructor_retry_count=_STARTS,
            health_check_period_s=_HEALTH_PERIOD_S,
            health_check_timeout_s=_HEALTH_TIMEOUT_S,
            graceful_shutdown_timeout_s=_GRACE_S,
            graceful_shutdown_wait_loop_s=_GRACE_LOOK_S,
            # Of a storage with one writer the old replica lets go before a new one has it.
            max_surge_percent=0 if is_alone(record) else 100,
            rolling_update_percentage=1.0,
            request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
            ray_actor_options={"num_cpus": 0},
            **_size(record),
        )(ServiceReplica)
        # Without a version of ours Serve makes one up each time, and replaces every replica.
        deployment._version = record.revision
        application = deployment.bind(
            record.model_dump(mode="json", exclude={"previous", "taken_back"}),
            process_settings().artifacts_url,
        )
        serve.run_many(
            [serve.RunTarget(application, name=app_name(record.id), route_prefix=None)],
            wait_for_ingress_deployment_creation=wait,
            wait_for_applications_running=wait,
        )

    def delete(self, service_id: str, *, wait: bool) -> None:  # noqa: D102
        from ray import serve

        name = app_name(service_id)
        if name not in serve.status().applications:
            return
        serve.delete(name, _blocking=False)
        until = time.monotonic() + _GONE_S
        while wait and name in serve.status().applications:
            if time.monotonic() > until:
                raise DeadlineExceeded(f"service {service_id} did not end within {_GONE_S:g} s")
            time.sleep(_LOOK_S)

    def states(self, records: Sequence[ServiceRecord]) -> list[ServiceState]:  # noqa: D102
        from ray import serve

        known = serve.status().applications if records else {}
        return [_state(record, known.get(app_name(record.id))) for record in records]


def _size(record: ServiceRecord) -> dict[str, Any]:
    from ray.serve.config import AutoscalingConfig

    if record.autoscale is None:
        return {"num_replicas": record.replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=record.autoscale.min_replicas,
            max_replicas=record.autoscale.max_replicas,
            target_ongoing_requests=_CALLS_PER_REPLICA,
            upscale_delay_s=_MORE_AFTER_S,
        )
    }


def _state(record: ServiceRecord, application: Any) -> ServiceState:
    """Return how a service is; `application` is Serve's word of it, None: it has none."""
    if application is None and record.replicas == 0:
        return ServiceState(status=ServiceStatus.PENDING)
    if application is None:
        return ServiceState(status=ServiceStatus.TERMINATED, reason="Serve does not have it")
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
    """Return the error of ours that a traceback in Serve's words ends with, else all of them."""
    _, found, cause = text.rpartition(f"{errors.__name__}.")
    return cause if found else text


def status_of(application: str, target: int, available: int) -> ServiceStatus:
    """Return a service's status.

    Args:
        application: Serve's word for it, such as ``RUNNING``.
        target: Replicas that there should be.
        available: Replicas that answer.
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
