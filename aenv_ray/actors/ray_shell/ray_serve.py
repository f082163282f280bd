"""Ray Serve's API: applications, calls to their replicas, and the replica of this process.

Importing Serve takes 1.7 s, so each function imports it when it is called.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from ray import exceptions as ray_exceptions

from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.errors import CallCancelled, CallOutcomeUnknown, FabricUnavailable

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

_SESSION_ROUTER: Final[Any] = "aenv_ray.actors.ray_shell.session_router:SessionRouter"


def start() -> None:
    """Start Serve in the connected cluster, without its HTTP proxies; idempotent."""
    from ray import serve
    from ray.serve.config import ProxyLocation

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location=ProxyLocation.Disabled)


def deploy(
    replica: type,
    *arguments: Any,
    app: str,
    version: str | None = None,
    wait: bool = True,
    routes_by_session: bool = False,
    **options: Any,
) -> None:
    """Deploy an application with one deployment, or update it.

    Args:
        replica: Class of the replicas.
        arguments: Constructor arguments of each replica.
        app: Name of the application.
        version: Replicas of the same version are not restarted. None restarts all of them.
        wait: Return once the application runs, instead of immediately.
        routes_by_session: Route calls as `session_router.SessionRouter` does.
        options: Options of ``serve.deployment``.

    Raises:
        RuntimeError: `wait`, and a replica did not start; Serve's own message says why.
    """
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    if routes_by_session:
        options["request_router_config"] = RequestRouterConfig(request_router_class=_SESSION_ROUTER)
    deployment = serve.deployment(**options)(replica)
    if version is not None:
        deployment._version = version  # Serve's public API makes up a version at every deployment
    serve.run_many(
        [serve.RunTarget(deployment.bind(*arguments), name=app, route_prefix=None)],
        wait_for_ingress_deployment_creation=wait,
        wait_for_applications_running=wait,
    )


def applications() -> dict[str, Any]:
    """Return the status of each application (``ray.serve.schema.ApplicationStatusOverview``)."""
    from ray import serve

    return dict(serve.status().applications)


def delete(app: str, *, wait: bool = True) -> None:
    """Delete an application and, if `wait`, return once its replicas have ended."""
    from ray import serve

    serve.delete(app, _blocking=wait)


# --- calls ---------------------------------------------------------------------------------------


def app_handle(app: str) -> DeploymentHandle[Any]:
    """Return the handle of an application.

    Raises:
        FabricUnavailable: Serve does not have the application.
    """
    from ray import serve

    with translated_call(f"finding application {app}"):
        return serve.get_app_handle(app)


def own_handle(app: str) -> DeploymentHandle[Any]:
    """Return a handle of an application that nothing else in this process has; see `end_handle`.

    Serve keeps the handles that ``get_app_handle`` returns, and returns them again.

    Raises:
        FabricUnavailable: Serve does not have the application.
    """
    from ray.serve.handle import DeploymentHandle

    found = app_handle(app)
    return DeploymentHandle(found.deployment_name, found.app_name)


def end_handle(handle: DeploymentHandle[Any]) -> None:
    """End the metrics of a handle, which would keep its router for ever; blocks.

    Calls that run continue.
    """
    handle.shutdown()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def translated_call(what: str) -> Iterator[None]:
    """Turn the exceptions of Ray and Serve about a call to a replica into ours.

    Raises:
        CallOutcomeUnknown: The replica died during the call.
        CallCancelled: The call was cancelled.
        FabricUnavailable: Serve has no replica for the call; nothing ran.
        AenvError: The replica raised it.
    """
    from ray.serve.exceptions import RayServeException

    try:
        with ray_api.translated(what):
            try:
                yield
            except (ray_exceptions.RayActorError, ray_exceptions.NodeDiedError) as exc:
                raise CallOutcomeUnknown(
                    f"{what}: the replica died during the call",
                    hint="the call may have run: check its effect before you send it again",
                ) from exc
    except ray_exceptions.TaskCancelledError:
        raise CallCancelled(f"{what}: the call was cancelled") from None
    except RayServeException as exc:
        raise FabricUnavailable(f"{what}: Serve refused the call: {exc}") from exc


def was_not_sent(exc: Exception) -> bool:
    """Whether the chosen replica ended before the call was sent to it."""
    from ray.serve import exceptions

    # Ray below 2.56 reports a lost replica as one that may have run the call.
    unavailable = getattr(exceptions, "ReplicaUnavailableError", ())
    return isinstance(exc, unavailable)


# --- in a replica --------------------------------------------------------------------------------


def current_replica() -> str:
    """Return the actor name of the replica that this process is."""
    from ray import serve

    return str(serve.get_replica_context().replica_id.to_full_id_str())


def current_session() -> str:
    """Return the session id of the call that is being served; "" if it has none."""
    from ray.serve.context import _get_serve_request_context

    return str(_get_serve_request_context().session_id)


def is_replica_alive(name: str) -> bool:
    """Whether a replica of that actor name is alive, as the GCS knows."""
    from ray.serve._private.constants import SERVE_NAMESPACE

    return ray_api.find_actor(name, SERVE_NAMESPACE) is not None
