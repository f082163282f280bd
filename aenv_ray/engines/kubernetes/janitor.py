"""Deletes what hosts of this pod left in the API: pods past their deadline, and ended ones.

Kubernetes deletes all of them with the host's own pod; this is for hosts that died in a pod that
goes on. It sees by label, whosever host they are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from aenv_ray.clock import Clock, SystemClock
from aenv_ray.engines.kubernetes import causes, names
from aenv_ray.engines.kubernetes.client import ApiRefused
from aenv_ray.engines.kubernetes.pods import Pods
from aenv_ray.errors import FabricUnavailable

logger = logging.getLogger(__name__)

LOOK_S: Final = 30.0
_OVERDUE_S: Final = 5.0


class Janitor:
    """Looks now and then until it leaves.

    Args:
        pods: Of a host.
        selector: Of the pods of all hosts here.
        is_known: Whether this host looks after a pod, by uid.
        look_s: How often.
        clock: Deadlines are on.
    """

    def __init__(
        self,
        pods: Pods,
        selector: str,
        is_known: Callable[[str], bool],
        *,
        look_s: float = LOOK_S,
        clock: Clock | None = None,
    ) -> None:
        self._pods = pods
        self._selector = selector
        self._is_known = is_known
        self._look_s = look_s
        self._clock = clock or SystemClock()
        self._seen_over: set[str] = set()
        self._task = asyncio.create_task(self._run())

    def leave(self) -> None:
        """Look no more."""
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            try:
                await self.look()
            except ApiRefused as exc:
                logger.warning("the janitor of pods is refused: %s", exc.message)
            except FabricUnavailable as exc:
                logger.warning("the janitor of pods: %s", exc.message)

    async def look(self) -> None:
        """Delete what nobody looks after and has no business there any more."""
        seen = set()
        for pod in await self._pods.list(self._selector):
            metadata = pod["metadata"]
            if self._is_known(metadata["uid"]):
                continue
            deadline = float(metadata["annotations"][names.DEADLINE])
            is_over = causes.is_over(pod)
            if is_over:
                seen.add(metadata["uid"])
            # An ended one is its own host's for one look: that wants to know why it ended.
            if deadline + _OVERDUE_S < self._clock.now() or metadata["uid"] in self._seen_over:
                await self._pods.delete(metadata["name"], metadata["uid"])
        self._seen_over = seen
