"""Which nodes still have to be rid of what gone hosts left: a failed attempt is made again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Final

logger = logging.getLogger(__name__)

LONGEST_PAUSE: Final = 60
"""Calls of `end_again` that pass, at most, before what fails again and again is tried once more."""


class Orphans:
    """Has ownerless instances ended node by node, and keeps what failed for the next time.

    Args:
        end_on: Ends those of one node, given its id and the ids of instances that may be on any
            host; raises when one or more could not be ended.
        alive_nodes: Returns the ids of the nodes that are up.
    """

    def __init__(
        self,
        end_on: Callable[[str, list[str]], Awaitable[None]],
        alive_nodes: Callable[[], Awaitable[Collection[str]]],
    ) -> None:
        self._end_on = end_on
        self._alive_nodes = alive_nodes
        self._left: dict[str, set[str]] = {}
        self._pause = 0
        self._skip = 0

    async def end(self, nodes: Collection[str | None], ids: Collection[str]) -> None:
        """End what hosts that are gone for good left on nodes.

        Args:
            nodes: Where to look; None among them: on any node that is up.
            ids: Instances that are ended even if they were on a shared host.
        """
        alive = set(await self._alive_nodes())
        chosen = alive if None in nodes else alive.intersection(nodes)
        async with asyncio.TaskGroup() as group:
            for node in chosen:
                group.create_task(self._try(node, set(ids)))

    async def end_again(self) -> None:
        """Repeat what failed; a node that died meanwhile took its instances with it.

        To be called at regular intervals: what fails again is repeated at every second, fourth …
        call.
        """
        if not self._left:
            self._pause = self._skip = 0
            return
        if self._skip:
            self._skip -= 1
            return
        alive = set(await self._alive_nodes())
        left, self._left = self._left, {}
        async with asyncio.TaskGroup() as group:
            for node in alive.intersection(left):
                group.create_task(self._try(node, left[node]))
        self._pause = min(2 * self._pause + 1, LONGEST_PAUSE)
        self._skip = self._pause

    async def _try(self, node: str, ids: set[str]) -> None:
        try:
            await self._end_on(node, sorted(ids))
        except Exception as exc:  # noqa: BLE001  # one node's failure is not that of all
            # Meanwhile the node's launcher ends them at their deadlines.
            logger.warning("node %s: %r", node[:8], exc)
            self._left.setdefault(node, set()).update(ids)
