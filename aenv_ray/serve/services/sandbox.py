"""The sandbox of a replica: started, health-checked, renewed, and replaced when it dies.

The replica renews a short lease on it, so the sandbox of a killed replica ends within `LEASE_S`.
The replica that replaces a killed one need not wait for that: it ends `OrphanSandboxes` first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from aenv_ray import logs
from aenv_ray.background_tasks import end_task
from aenv_ray.clock import Clock
from aenv_ray.errors import (
    GONE,
    AenvError,
    FabricUnavailable,
    FunctionFailed,
    SandboxStartFailed,
)
from aenv_ray.runtime.door.dispatch import HEALTHY

if TYPE_CHECKING:
    from aenv_ray.client.async_handle import AsyncEnvHandle

logger = logging.getLogger(__name__)

LEASE_S: Final = 60.0
RENEW_S: Final = 10.0
HEALTH_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.25

Make = Callable[[], Awaitable["AsyncEnvHandle"]]


class ReplicaSandbox:
    """One sandbox at a time.

    Args:
        make: Creates an instance with a TTL of `LEASE_S`.
        clock: Clock for deadlines.
        healthy_within_s: How long an environment may take to become healthy.
        owner: The owner of the service, for the log.
    """

    def __init__(
        self, make: Make, clock: Clock, healthy_within_s: float, owner: str | None
    ) -> None:
        self._owner = owner
        self._make = make
        self._clock = clock
        self._healthy_within_s = healthy_within_s
        self._current: AsyncEnvHandle | None = None
        self._making = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start the sandbox; return once it is healthy.

        Raises:
            SandboxStartFailed: The environment does not become healthy.
            AenvError: As `aenv_ray.create`.
        """
        await self.instance()
        self._renewing = asyncio.create_task(self._renew())

    async def close(self) -> None:
        """Release the sandbox."""
        if self._renewing is not None:
            await end_task(self._renewing)
        async with self._making:
            current, self._current = self._current, None
        if current is not None:
            await current.release()

    async def instance(self) -> AsyncEnvHandle:
        """Return the sandbox; start a new one if the last one was lost.

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
        """Note that a sandbox is gone; the next call starts another one."""
        if self._current is not None and self._current.instance_id == instance_id:
            extra = logs.of_instance(instance_id, self._owner)
            logger.warning(
                "sandbox %s is gone; the replica starts another one", instance_id, extra=extra
            )
            self._current = None

    async def check(self) -> None:
        """Run the environment's health check, in a new sandbox if the last one is gone.

        Raises:
            FunctionFailed: The environment is unhealthy.
            AenvError: No sandbox can be started.
        """
        instance = await self.instance()
        try:
            answer = await _health(instance)
        except GONE:
            self.lose(instance.instance_id)
            answer = await _health(await self.instance())
        if answer["status"] not in HEALTHY:
            raise FunctionFailed(
                f"the environment is unhealthy: {_reason(answer)}",
                hint="correct what its health function reports, or the function",
            )

    async def _made(self) -> AsyncEnvHandle:
        instance = await self._make()
        try:
            await self._become_healthy(instance)
        except BaseException:
            await asyncio.shield(instance.release())
            raise
        return instance

    async def _become_healthy(self, instance: AsyncEnvHandle) -> None:
        until = self._clock.now() + self._healthy_within_s
        renew_at = self._clock.now() + RENEW_S
        while True:
            try:
                answer = await _health(instance)
                if answer["status"] in HEALTHY:
                    return
                problem = _reason(answer)
            except FunctionFailed as exc:
                problem = exc.message
            now = self._clock.now()
            if now > until:
                raise SandboxStartFailed(
                    f"not healthy within {self._healthy_within_s:g} s: {problem}",
                    instance_id=instance.instance_id,
                    hint="fix its health function, or allow more time with healthy_within_s",
                )
            if now > renew_at:
                await instance.renew(LEASE_S)
                renew_at = now + RENEW_S
            await asyncio.sleep(_POLL_S)

    async def _renew(self) -> None:
        """Extend the lease of the sandbox until this replica ends."""
        while True:
            await asyncio.sleep(RENEW_S)
            current = self._current
            if current is None:
                continue  # the next call or health check starts one
            try:
                await current.renew(LEASE_S)
            except GONE:
                self.lose(current.instance_id)
            except AenvError as exc:
                extra = logs.of_instance(current.instance_id, self._owner)
                logger.warning(
                    "%s cannot be renewed now: %s", current.instance_id, exc.message, extra=extra
                )


async def _health(instance: AsyncEnvHandle) -> dict[str, Any]:
    data: dict[str, Any] = (await instance.check_health({}, HEALTH_TIMEOUT_S))["data"]
    return data


def _reason(answer: dict[str, Any]) -> str:
    return str(answer.get("message") or answer.get("status"))[:500]


# --- sandboxes that dead replicas left behind ------------------------------------------------

Listing = Callable[[], Awaitable[dict[str, str]]]
"""Returns the live sandboxes of the service: instance ids with the names of their replicas."""


class OrphanSandboxes:
    """The sandboxes of dead replicas, and earlier ones of this replica.

    A replica that Ray knows is never touched, however long it is silent: its callers may use its
    sandbox. A replica that Ray does not know has no callers.

    Args:
        own: This replica's name.
        sandboxes: Lists the sandboxes of the service.
        release: Ends instances.
        is_alive: Whether the replica of a name is alive.
    """

    def __init__(
        self,
        own: str,
        sandboxes: Listing,
        release: Callable[[Sequence[str]], Awaitable[None]],
        is_alive: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._own = own
        self._sandboxes = sandboxes
        self._release = release
        self._is_alive = is_alive

    async def end(self) -> list[str]:
        """End the sandboxes of dead replicas, and those under this replica's name.

        Call it while this replica has no sandbox.

        Returns:
            The ids of the sandboxes of other live replicas.

        Raises:
            FabricUnavailable: The sandboxes cannot be listed or ended now.
        """
        found = await self._sandboxes()
        others = sorted({name for name in found.values() if name not in ("", self._own)})
        living = {name for name in others if await self._is_alive(name)}
        orphans = [one for one, name in found.items() if name and name not in living]
        if orphans:
            await self._release(orphans)
        return [one for one in found if one not in orphans]

    async def end_all(self, clock: Clock, within_s: float) -> None:
        """Return once the service has no sandbox at all; live replicas end their own.

        Raises:
            FabricUnavailable: As `end`; or some still exist after `within_s`.
        """
        until = clock.now() + within_s
        while others := await self.end():
            if clock.now() > until:
                raise FabricUnavailable(
                    f"sandbox {others[0]} has the storage, and did not end within {within_s:g} s",
                    hint=f"its replica has running calls; end it with aenv instance delete "
                    f"{others[0]}",
                )
            await asyncio.sleep(_POLL_S)
