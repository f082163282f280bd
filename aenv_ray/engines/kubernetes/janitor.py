"""Deletes orphan pods: those past their deadline, and ended ones.

Kubernetes deletes a host's pods together with the host's own pod. The janitor is for hosts that
died while their pod kept running; it finds pods by label, whichever host created them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from aenv_ray.clock import Clock, SystemClock
from aenv_ray.engines.kubernetes import names, pod_status
from aenv_ray.engines.kubernetes.client import ApiRefused
from aenv_ray.engines.kubernetes.pods import Pods
from aenv_ray.errors import FabricUnavailable

logger = logging.getLogger(__name__)

SWEEP_INTERVAL_S: Final = 30.0
_OVERDUE_S: Final = 5.0


class PodJanitor:
    """Sweeps regularly until it is stopped.

    Args:
        pods: Of a host.
        selector: Of the pods of all hosts in this pod.
        is_known: Returns whether this host manages a pod, by uid.
        interval_s: Seconds between sweeps.
        clock: For deadlines.
    """

    def __init__(
        self,
        pods: Pods,
        selector: str,
        is_known: Callable[[str], bool],
        *,
        interval_s: float = SWEEP_INTERVAL_S,
        clock: Clock | None = None,
    ) -> None:
        self._pods = pods
        self._selector = selector
        self._is_known = is_known
        self._interval_s = interval_s
        self._clock = clock or SystemClock()
        self._seen_over: set[str] = set()
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Stop sweeping."""
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.sweep()
            except ApiRefused as exc:
                logger.warning("the pod janitor is refused by the API: %s", exc.message)
            except FabricUnavailable as exc:
                logger.warning("the pod janitor: %s", exc.message)

    async def sweep(self) -> None:
        """Delete orphan pods."""
        seen = set()
        for pod in await self._pods.list(self._selector):
            metadata = pod["metadata"]
            if self._is_known(metadata["uid"]):
                continue
            deadline = float(metadata["annotations"][names.DEADLINE])
            is_over = pod_status.is_over(pod)
            if is_over:
                seen.add(metadata["uid"])
            # For one interval, an ended pod is left to its own host, which reads why it ended.
            if deadline + _OVERDUE_S < self._clock.now() or metadata["uid"] in self._seen_over:
                await self._pods.delete(metadata["name"], metadata["uid"])
        self._seen_over = seen
