"""Sandboxes that replicas of a service left behind, ended by the replicas that follow.

A replica that is killed cannot end its sandbox. The lease would end it a minute later; the
replacement need not wait for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from aenv_ray.clock import Clock
from aenv_ray.errors import FabricUnavailable

POLL_S = 0.25

Listing = Callable[[], Awaitable[dict[str, str]]]
"""Returns the live sandboxes of the service: instance ids with the names of their replicas."""


class OrphanSandboxes:
    """The sandboxes of dead replicas, and those of this replica's own past.

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
            await asyncio.sleep(POLL_S)
