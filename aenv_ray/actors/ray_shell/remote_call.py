"""Calls to what the user runs on Ray: methods of actors, remote functions, Serve deployments."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any

from ray import exceptions as ray_exceptions
from ray.actor import ActorHandle, ActorMethod
from ray.remote_function import RemoteFunction

from aenv_ray.errors import ConfigError, EndpointUnavailable

RemoteCall = Callable[..., Awaitable[Any]]


def is_remote(target: Any) -> bool:
    """Whether `target` is called on Ray: with ``.remote(…)``."""
    return isinstance(target, ActorHandle | ActorMethod | RemoteFunction) or _is_of_serve(target)


def remote_call(target: Any) -> RemoteCall:
    """Return a function that calls `target` with its arguments and awaits the result.

    It raises `EndpointUnavailable` if the actor, its node or the deployment is not available, and
    what the called code raises.

    Raises:
        ConfigError: `target` is an actor whose class has no method ``__call__``.
    """
    if isinstance(target, ActorHandle):
        method = getattr(target, "__call__", None)  # noqa: B004  # the remote method
        if not isinstance(method, ActorMethod):
            raise ConfigError(
                f"the policy {target!r} is an actor without a method __call__",
                hint="give one of its methods, such as actor.chat",
            )
        target = method

    async def called(*arguments: Any) -> Any:
        try:
            return await target.remote(*arguments)
        except ray_exceptions.RayTaskError:
            raise  # the called code raised it
        except Exception as exc:
            if not _is_unavailable(exc):
                raise
            first = next(iter(str(exc).splitlines()), "")
            raise EndpointUnavailable(
                f"the policy's model on Ray is not available: {type(exc).__name__}: {first}",
                hint="look at its log; ray list actors shows why it ended",
            ) from exc

    return called


def _is_unavailable(exc: Exception) -> bool:
    if isinstance(exc, ray_exceptions.RayError):
        return True
    serve = sys.modules.get("ray.serve.exceptions")
    return serve is not None and isinstance(exc, serve.RayServeException)


def _is_of_serve(target: Any) -> bool:
    serve = sys.modules.get("ray.serve.handle")
    return serve is not None and isinstance(target, serve.DeploymentHandle)
