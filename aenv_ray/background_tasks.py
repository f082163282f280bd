"""How tasks that run for ever are ended."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

logger = logging.getLogger(__name__)

_AGAIN_S: Final = 5.0
"""A task that was told to end, and puts things in order first, is given this before it is told
again."""


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancel a task and return once it has ended, however it did.

    It is told until it does. A cancellation gets lost where a library waits by `asyncio.wait_for`,
    as redis-py does when it sends, and what it waits for is done in the same moment: so Python
    3.11 has it (python/cpython#86296).
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_AGAIN_S)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s had failed before it was ended", task.get_name(), exc_info=error)
