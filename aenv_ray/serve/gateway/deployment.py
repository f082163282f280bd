"""The gateway as a Ray Serve application: `deploy`, `undeploy`, and the replica.

Serve starts, checks, replaces and scales the replicas. Requests do not pass through its proxies:
each replica listens on both ports (see `listener`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any, Final

import httpx

from aenv_ray import logs
from aenv_ray.actors.fabric import driver_api
from aenv_ray.actors.ray_shell import operator_policy, ray_api, ray_serve
from aenv_ray.addresses import local_host
from aenv_ray.config import settings as process_settings
from aenv_ray.errors import AenvError, FabricUnavailable
from aenv_ray.hub.api import Hub
from aenv_ray.hub.client import blocking
from aenv_ray.hub.hub_actor import ensure_hub, find_hub
from aenv_ray.hub.records import AuditRecord
from aenv_ray.serve.gateway.listener import GatewayListener, listen
from aenv_ray.serve.gateway.settings import GatewaySettings

logger = logging.getLogger(__name__)

APP_NAME: Final = ray_api.GATEWAY_APP
_START_S: Final = 120.0
"""A cold Ray worker needs seconds to import the gateway on a busy machine."""
_POLL_S: Final = 0.1
_CONSTRUCTOR_TRIES: Final = 3
_HEALTH_PERIOD_S: Final = 2.0
_HEALTH_TIMEOUT_S: Final = 30.0
_GRACE_S: Final = 20.0


def deploy(settings: GatewaySettings | None = None) -> None:
    """Start the gateway in the cluster that this process is connected to, or change it.

    Joins or starts Ray first if needed. Returns once the gateway answers on this node.

    Raises:
        ConfigError: A port is in use, or the address is not of this node.
        FabricUnavailable: Ray, the hub or the gateway does not start.
    """
    settings = settings or GatewaySettings()
    driver_api.init()
    hub = ensure_hub()
    if not is_deployed():
        for port in (settings.port, settings.mcp_port):
            listen(settings.host, port, shared=False).close()
    place = ray_api.on_head() if settings.on_head else ray_api.on_this_node()
    apply_policy(hub)
    ray_serve.start()
    try:
        ray_serve.deploy(
            GatewayReplica,
            settings.model_dump(mode="json"),
            # A replica has the environment variables of its node, not those of this process.
            process_settings().artifacts_url,
            app=APP_NAME,
            name="gateway",
            num_replicas=settings.replicas,
            max_ongoing_requests=settings.max_ongoing_requests,
            max_constructor_retry_count=_CONSTRUCTOR_TRIES,
            health_check_period_s=_HEALTH_PERIOD_S,
            health_check_timeout_s=_HEALTH_TIMEOUT_S,
            graceful_shutdown_timeout_s=_GRACE_S,
            ray_actor_options={"num_cpus": 0} | place,
        )
    except RuntimeError as exc:
        raise FabricUnavailable(
            f"the gateway did not start: {exc}", hint="see the log of its replica"
        ) from exc
    _await_answer(settings)


def apply_policy(hub: Hub) -> None:
    """Make the policy of this process's settings that of the cluster, and record a change."""
    before, now = operator_policy.announce()
    if before != now:
        changed = {
            name: str(value)
            for name, value in now.model_dump(mode="json").items()
            if before is None or value != before.model_dump(mode="json")[name]
        }
        blocking(hub.record(_policy_record(changed)))


def _policy_record(detail: Mapping[str, str]) -> AuditRecord:
    return AuditRecord(actor=f"uid {os.getuid()}", action="policy", detail=dict(detail))


def undeploy() -> None:
    """End the gateway, if there is one; instances live on.

    The cluster then has no policy any more, which is recorded.
    """
    if not is_deployed():
        return
    ray_serve.delete(APP_NAME)
    operator_policy.withdraw()
    hub = find_hub()
    if hub is not None:
        try:
            blocking(hub.record(_policy_record({"policy": "withdrawn"})))
        except AenvError as exc:  # the gateway has ended nevertheless
            logger.warning("the end of the gateway's policy is not in the audit log: %s", exc)


def is_deployed() -> bool:
    """Whether the cluster that this process is connected to has a gateway."""
    if not ray_api.is_connected():
        return False
    return APP_NAME in ray_serve.applications()


def _await_answer(settings: GatewaySettings) -> None:
    """Return once the gateway answers on this node.

    Raises:
        FabricUnavailable: It does not answer within two minutes.
    """
    url = f"http://{local_host(settings.host)}:{settings.port}/health"
    until = time.monotonic() + _START_S
    while True:
        try:
            # Not through a proxy of the environment: this is loopback or an address of this node.
            httpx.get(url, timeout=5.0, trust_env=False).raise_for_status()
            return
        except httpx.HTTPError as exc:
            if time.monotonic() > until:
                raise FabricUnavailable(
                    f"the gateway did not answer at {url} within {_START_S:g} s: {exc}",
                    hint="see the log of its replica",
                ) from exc
        time.sleep(_POLL_S)


class GatewayReplica:
    """One replica: listens on both ports until Serve ends it.

    Args:
        settings: `GatewaySettings` as JSON data.
        artifacts_url: The URL of the artifact store; None: as the settings of its node say.
    """

    def __init__(self, settings: dict[str, Any], artifacts_url: str | None = None) -> None:
        from aenv_ray.serve.gateway.app import gateway_app
        from aenv_ray.serve.gateway.middleware import write_to_stderr

        logs.configure("gateway")
        write_to_stderr()
        parsed = GatewaySettings.model_validate(settings)
        fabric, hub = driver_api.init(), ensure_hub()
        sockets = [listen(parsed.host, port) for port in {parsed.port, parsed.mcp_port}]
        self._listener = GatewayListener(
            lambda: gateway_app(parsed, fabric, hub, artifacts_url), sockets
        )
        try:
            self._listener.start(_START_S)
        except AenvError:
            self._listener.stop()
            raise

    def check_health(self) -> None:
        """Raise if the replica no longer serves, so that Serve replaces it."""
        self._listener.check()

    def __call__(self) -> str:
        """Answer a call through a Serve handle."""
        return "the gateway is used over HTTP"

    def __del__(self) -> None:
        """Finish the requests in progress; Serve calls it before it ends the replica."""
        listener = getattr(self, "_listener", None)
        if listener is not None:
            listener.stop()
