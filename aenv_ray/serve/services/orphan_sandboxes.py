"""The sandboxes that replicas of a service left behind: ended by those that come after them.

A replica that is killed cannot end its sandbox. Its lease would, a minute later; the replica that
takes its place need not wait for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from aenv_ray.clock import Clock
from aenv_ray.errors import FabricUnavailable

LOOK_S = 0.25

Listing = Callable[[], Awaitable[dict[str, str]]]
"""Returns the replicas of all live sandboxes of the service, by instance id."""


class LeftSandboxes:
    """What other replicas, and this one before, left.

    A replica that Ray knows is never touched, however long it is silent: its callers may use its
    sandbox. One that Ray does not know can have no callers.

    Args:
        own: This replica's name.
        sandboxes: Lists those of the service.
        release: Ends instances.
        is_there: Whether a replica of a name lives.
    """

    def __init__(
        self,
        own: str,
        sandboxes: Listing,
        release: Callable[[Sequence[str]], Awaitable[None]],
        is_there: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._own = own
        self._sandboxes = sandboxes
        self._release = release
        self._is_there = is_there

    async def end(self) -> list[str]:
        """End those of this replica, which has none that it knows, and of replicas that are gone.

        Returns:
            The ids of those that other replicas have.

        Raises:
            FabricUnavailable: What there is, or that it ended, is not known.
        """
        found = await self._sandboxes()
        others = sorted({name for name in found.values() if name not in ("", self._own)})
        living = {name for name in others if await self._is_there(name)}
        left = [one for one, name in found.items() if name and name not in living]
        if left:
            await self._release(left)
        return [one for one in found if one not in left]

    async def end_all(self, clock: Clock, within_s: float) -> None:
        """Return once no sandbox of the service is left: living replicas end their own.

        Raises:
            FabricUnavailable: As `end`; or some are left after `within_s`.
        """
        until = clock.now() + within_s
        while others := await self.end():
            if clock.now() > until:
                raise FabricUnavailable(
                    f"{others[0]} has the storage, and did not end within {within_s:g} s",
                    hint="its replica has calls under way; end it with aenv instance delete",
                )
            await asyncio.sleep(LOOK_S)
