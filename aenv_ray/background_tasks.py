"""Ending of long-running tasks."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

logger = logging.getLogger(__name__)

_AGAIN_S: Final = 5.0
"""Time for a cancelled task to clean up before it is cancelled again."""


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancel a task and return once it has ended.

    The cancellation is repeated, since Python 3.11 can lose one in `asyncio.wait_for`, which
    redis-py uses, if the awaited operation completes at the same moment (python/cpython#86296).
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_AGAIN_S)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s failed before it was cancelled", task.get_name(), exc_info=error)
