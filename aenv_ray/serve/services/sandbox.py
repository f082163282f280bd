"""The sandbox that a replica of a service owns: made healthy, kept alive, replaced when it dies.

It lives by a short lease that its replica renews: of a replica that was killed nothing is left
`LEASE_S` later, whoever else died with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from aenv_ray.background_tasks import end_task
from aenv_ray.clock import Clock
from aenv_ray.errors import (
    AenvError,
    FunctionFailed,
    InstanceExpired,
    InstanceNotFound,
    InstanceReleased,
    SandboxLost,
    SandboxStartFailed,
)
from aenv_ray.models import InstanceInfo
from aenv_ray.runtime.door.dispatch import HEALTHY

logger = logging.getLogger(__name__)

LEASE_S: Final = 60.0
RENEW_S: Final = 10.0
HEALTH_TIMEOUT_S: Final = 10.0
_LOOK_S: Final = 0.25
GONE: Final = (InstanceNotFound, InstanceExpired, InstanceReleased, SandboxLost)


class Owned(Protocol):
    """An instance, as far as its owner must know it."""

    @property
    def instance_id(self) -> str:
        """Its id."""
        ...

    async def check_health(
        self, arguments: dict[str, object], timeout_s: float
    ) -> dict[str, object]:
        """Return what the environment's health function says, under ``data``."""
        ...

    async def renew(self, ttl: str | float) -> InstanceInfo:
        """Move its deadline."""
        ...

    async def release(self) -> None:
        """End it."""
        ...


Make = Callable[[], Awaitable[Owned]]


class ReplicaSandbox:
    """One sandbox at a time.

    Args:
        make: Makes an instance that lives for `LEASE_S`.
        clock: For deadlines.
        healthy_within_s: How long an environment may take to say that it is healthy.
    """

    def __init__(self, make: Make, clock: Clock, healthy_within_s: float) -> None:
        self._make = make
        self._clock = clock
        self._healthy_within_s = healthy_within_s
        self._current: Owned | None = None
        self._making = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Return once there is a healthy one.

        Raises:
            SandboxStartFailed: It does not become healthy.
            AenvError: As `aenv_ray.create`.
        """
        await self.instance()
        self._renewing = asyncio.create_task(self._renew())

    async def close(self) -> None:
        """End it."""
        if self._renewing is not None:
            await end_task(self._renewing)
        async with self._making:
            current, self._current = self._current, None
        if current is not None:
            await current.release()

    async def instance(self) -> Owned:
        """Return the sandbox, a new one where the last one was lost.

        Raises:
            AenvError: As `open`.
        """
        current = self._current
        if current is not None:
            return current
        async with self._making:
            if self._current is None:
                self._current = await self._made()
            return self._current

    def lose(self, instance_id: str) -> None:
        """Take note that a sandbox is gone; the next call gets another."""
        if self._current is not None and self._current.instance_id == instance_id:
            logger.warning("sandbox %s is gone; the replica makes another", instance_id)
            self._current = None

    async def check(self) -> None:
        """Return if the environment says that it is healthy.

        Raises:
            FunctionFailed: It says that it is not.
            AenvError: There is no sandbox, and none can be made.
        """
        instance = await self.instance()
        try:
            said = await _health(instance)
        except GONE:
            self.lose(instance.instance_id)
            said = await _health(await self.instance())
        if said["status"] not in HEALTHY:
            raise FunctionFailed(f"the environment is not healthy: {_told(said)}")

    async def _made(self) -> Owned:
        instance = await self._make()
        try:
            await self._become_healthy(instance)
        except BaseException:
            await asyncio.shield(instance.release())
            raise
        return instance

    async def _become_healthy(self, instance: Owned) -> None:
        until = self._clock.now() + self._healthy_within_s
        renew_at = self._clock.now() + RENEW_S
        while True:
            try:
                said = await _health(instance)
                if said["status"] in HEALTHY:
                    return
                problem = _told(said)
            except FunctionFailed as exc:
                problem = exc.message
            now = self._clock.now()
            if now > until:
                raise SandboxStartFailed(
                    f"not healthy within {self._healthy_within_s:g} s: {problem}",
                    instance_id=instance.instance_id,
                    hint="its health function says when it is ready to serve",
                )
            if now > renew_at:
                await instance.renew(LEASE_S)
                renew_at = now + RENEW_S
            await asyncio.sleep(_LOOK_S)

    async def _renew(self) -> None:
        """Keep the sandbox alive for as long as this replica lives."""
        while True:
            await asyncio.sleep(RENEW_S)
            current = self._current
            if current is None:
                continue  # the next call or health check makes one
            try:
                await current.renew(LEASE_S)
            except GONE:
                self.lose(current.instance_id)
            except AenvError as exc:
                logger.warning("%s cannot be renewed now: %s", current.instance_id, exc.message)


async def _health(instance: Owned) -> dict[str, object]:
    answer = await instance.check_health({}, HEALTH_TIMEOUT_S)
    data = answer["data"]
    assert isinstance(data, dict)
    return data


def _told(said: dict[str, object]) -> str:
    return str(said.get("message") or said.get("status"))[:500]
