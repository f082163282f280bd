"""The decorators with which an environment's code registers its tools, rewards and functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from aenv_ray.runtime.api.registry import get_registry

F = TypeVar("F", bound=Callable[..., Any])


@overload
def register_tool(function: F) -> F: ...
@overload
def register_tool(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = None,
    idempotent: bool = False,
) -> Callable[[F], F]: ...
def register_tool(
    function: Any = None,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = None,
    idempotent: bool = False,
) -> Any:
    """Make a function a tool that agents call; it stays an ordinary function.

    Args:
        function: Sync (runs in a thread) or async.
        name: What agents call it. None: the function's name.
        description: For the model. None: the docstring before its sections.
        timeout: Seconds after which a call is stopped. None: the caller's own limit.
        idempotent: Calling it twice with the same arguments changes nothing more.

    Raises:
        ValueError: The name is taken, or `timeout` is not above zero.
    """

    def register(target: F) -> F:
        get_registry().add_tool(
            target, name=name, description=description, timeout_s=timeout, idempotent=idempotent
        )
        return target

    return register(function) if function is not None else register


@overload
def register_reward(function: F) -> F: ...
@overload
def register_reward(
    *, name: str | None = None, timeout: float | None = None, default: bool = False
) -> Callable[[F], F]: ...
def register_reward(
    function: Any = None,
    *,
    name: str | None = None,
    timeout: float | None = None,
    default: bool = False,
) -> Any:
    """Make a function a reward.

    Calls that name none get the one marked `default`, or else the first.

    Args:
        function: Returns any JSON value; a number or ``{"score": …}`` by custom.
        name: None: the function's name.
        timeout: Seconds after which it is stopped. None: the caller's own limit.
        default: Answer calls that name no reward.

    Raises:
        ValueError: The name is taken, or a second reward is marked `default`.
    """

    def register(target: F) -> F:
        get_registry().add_reward(target, name=name, timeout_s=timeout, default=default)
        return target

    return register(function) if function is not None else register


@overload
def register_function(function: F) -> F: ...
@overload
def register_function(
    *, endpoint: str | None = None, method: str = "POST", timeout: float | None = None
) -> Callable[[F], F]: ...
def register_function(
    function: Any = None,
    *,
    endpoint: str | None = None,
    method: str = "POST",
    timeout: float | None = None,
) -> Any:
    """Make a function callable by the trainer, not by the agent; served over HTTP as well.

    Args:
        function: Returns any JSON value.
        endpoint: Path at the public door. None: ``/functions/<name>``.
        method: GET, POST, PUT, PATCH or DELETE.
        timeout: Seconds after which it is stopped. None: the caller's own limit.

    Raises:
        ValueError: The name or the route is taken, or the method is unknown.
    """

    def register(target: F) -> F:
        get_registry().add_function(target, endpoint=endpoint, method=method, timeout_s=timeout)
        return target

    return register(function) if function is not None else register


@overload
def register_health(function: F) -> F: ...
@overload
def register_health() -> Callable[[F], F]: ...
def register_health(function: Any = None) -> Any:
    """Make a function the environment's health check.

    It returns ``{"status": "healthy" | "success", …}``; any other status, or an exception, means
    unhealthy.

    Raises:
        ValueError: Another health check is registered.
    """

    def register(target: F) -> F:
        get_registry().set_health(target)
        return target

    return register(function) if function is not None else register
