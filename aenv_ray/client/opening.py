"""How an `Environment` comes to its instance: a server's address, a live instance, or a new one.

``DUMMY_INSTANCE_IP`` names one server; else an address, given or in ``AENV_SYSTEM_URL``, names a
gateway; else there is Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aenv_ray.actors.fabric.create_options import CreateOptions
from aenv_ray.client.over_ray import RayInstance
from aenv_ray.client.waiting import HEALTHY, Wait, said
from aenv_ray.config import read_settings
from aenv_ray.errors import AenvError, ConfigError, SandboxStartFailed

if TYPE_CHECKING:
    from aenv_ray.client.over_gateway import GatewayInstance
    from aenv_ray.client.over_http import HttpInstance

Made = TypeVar("Made")

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0


async def open_instance(
    env_name: str,
    options: CreateOptions,
    *,
    url: str | None,
    api_key: str | None,
    actor: str | None,
    attach_to: str | None,
    wait: Wait,
    health_timeout_s: float | None,
    max_retries: int,
) -> RayInstance | HttpInstance:
    """Return an instance that is healthy; when it does not become so, nothing is left.

    Args:
        env_name: ``name@version``, ``name``, or, over Ray, a project's path.
        options: Of a new instance.
        url: Gateway to use; None: the one that the settings name, if any.
        api_key: Token for a gateway; None: that of the settings.
        actor: As `GatewayInstance.create` takes it.
        attach_to: Id of a live instance to use instead of a new one.
        wait: For the instance: how long a server may take to become healthy.
        health_timeout_s: How long a new instance's health check may take; None: do not wait.
        max_retries: Creations beyond the first, when the fabric has no room or is away.

    Raises:
        AenvError: As `aenv_ray.create`.
        SandboxStartFailed: It says that it is not healthy.
    """
    settings = read_settings()
    if settings.dummy_instance is not None:
        # Imported here: httpx costs what a driver on Ray need not pay.
        from aenv_ray.client.over_http import HttpInstance

        http = HttpInstance(settings.dummy_instance)
        if health_timeout_s is not None:
            await _or_leave(http, http.wait_healthy(wait=wait))
        return http
    gateway = url or settings.system_url
    if gateway is not None:
        from aenv_ray.client.over_gateway import GatewayInstance

        token = api_key or settings.api_key
        if attach_to is not None:
            return await GatewayInstance.attach(gateway, token, attach_to)

        def create_there() -> Awaitable[GatewayInstance]:
            return GatewayInstance.create(gateway, token, env_name, options, actor=actor)

        made: RayInstance | GatewayInstance = await _create(create_there, max_retries, wait)
    elif attach_to is not None:
        return await RayInstance.attach(attach_to)
    else:
        made = await _create(lambda: RayInstance.create(env_name, options), max_retries, wait)
    if health_timeout_s is not None:
        await _or_leave(made, _expect_healthy(made, health_timeout_s))
    return made


async def _create(create: Callable[[], Awaitable[Made]], max_retries: int, wait: Wait) -> Made:
    pause_s = _FIRST_PAUSE_S
    for attempt in range(max_retries + 1):
        try:
            return await create()
        except AenvError as exc:
            if not exc.retryable or attempt == max_retries:
                raise
            wait.goes_on(said(exc))
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    raise AssertionError


async def _expect_healthy(instance: RayInstance | GatewayInstance, timeout_s: float) -> None:
    body = await instance.check_health({}, timeout_s)
    data = body["data"]
    if data.get("status") not in HEALTHY:
        raise SandboxStartFailed(
            f"{instance.instance_id} is {data.get('status')}: {data.get('message', '')}",
            instance_id=instance.instance_id,
        )


async def _or_leave(instance: Any, wait: Coroutine[Any, Any, Any]) -> None:
    """Await `wait`; when it does not end well, leave no instance behind."""
    try:
        await wait
    except BaseException:
        await asyncio.shield(instance.release())
        await instance.close()
        raise


def check_numbers(timeout_s: Any, startup_timeout_s: Any, max_retries: Any) -> None:
    """Refuse what is no time to wait, or no number of retries.

    Raises:
        ConfigError: One of them is not.
    """
    for what, seconds in (("timeout", timeout_s), ("startup_timeout", startup_timeout_s)):
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise ConfigError(f"{what} {seconds!r} is not a number of seconds above zero")
    if isinstance(max_retries, bool) or not isinstance(max_retries, int) or max_retries < 0:
        raise ConfigError(f"max_retries {max_retries!r} is no whole number from 0 on")
