"""How an `Environment` comes to its instance: a server's address, a live instance, or a new one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final

from aenv_ray.actors.create_options import CreateOptions
from aenv_ray.client.over_ray import RayInstance
from aenv_ray.config import read_settings
from aenv_ray.errors import AenvError, ConfigError, SandboxStartFailed

if TYPE_CHECKING:
    from aenv_ray.client.over_http import HttpInstance

_HEALTHY: Final = frozenset({"healthy", "success", "ok"})
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0


async def open_instance(
    env_name: str,
    options: CreateOptions,
    *,
    url: str | None,
    attach_to: str | None,
    startup_timeout_s: float,
    health_timeout_s: float | None,
    max_retries: int,
) -> RayInstance | HttpInstance:
    """Return an instance that is healthy; when it does not become so, nothing is left.

    Args:
        env_name: ``name@version``, ``name``, or a project's path.
        options: Of a new instance.
        url: Server to use where ``DUMMY_INSTANCE_IP`` names none.
        attach_to: Id of a live instance to use instead of a new one.
        startup_timeout_s: How long a server may take to become healthy.
        health_timeout_s: How long a new instance's health check may take; None: do not wait.
        max_retries: Creations beyond the first, when the fabric has no room or is away.

    Raises:
        AenvError: As `aenv_ray.create`.
        SandboxStartFailed: It says that it is not healthy.
    """
    settings = read_settings()
    server = settings.dummy_instance or url
    if server is not None:
        # Imported here: httpx costs what a driver on Ray need not pay.
        from aenv_ray.client.over_http import HttpInstance

        http = HttpInstance(server)
        if health_timeout_s is not None:
            await _or_leave(http, http.wait_healthy(startup_timeout_s))
        return http
    if settings.system_url is not None:
        raise ConfigError(
            "AENV_SYSTEM_URL names a gateway, which this version cannot speak to",
            hint="unset it to use Ray, or set DUMMY_INSTANCE_IP to an `aenv run` server",
        )
    if attach_to is not None:
        return await RayInstance.attach(attach_to)
    instance = await _create(env_name, options, max_retries)
    if health_timeout_s is not None:
        await _or_leave(instance, _expect_healthy(instance, health_timeout_s))
    return instance


async def _create(env_name: str, options: CreateOptions, max_retries: int) -> RayInstance:
    pause_s = _FIRST_PAUSE_S
    for attempt in range(max_retries + 1):
        try:
            return await RayInstance.create(env_name, options)
        except AenvError as exc:
            if not exc.retryable or attempt == max_retries:
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    raise AssertionError


async def _expect_healthy(instance: RayInstance, timeout_s: float) -> None:
    body = await instance.check_health({}, timeout_s)
    data = body["data"]
    if data.get("status") not in _HEALTHY:
        raise SandboxStartFailed(
            f"{instance.handle.instance_id} is {data.get('status')}: {data.get('message', '')}",
            instance_id=instance.handle.instance_id,
        )


async def _or_leave(instance: Any, wait: Coroutine[Any, Any, Any]) -> None:
    """Await `wait`; when it does not end well, leave no instance behind."""
    try:
        await wait
    except BaseException:
        await asyncio.shield(instance.release())
        await instance.close()
        raise
