"""Shield a create request from cancellation until the server has answered it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def shielded(request: Coroutine[Any, Any, T]) -> T:
    """Run a create request to its end and return its result.

    If the caller is cancelled, wait for the answer first, then raise `CancelledError`: otherwise
    the server could create the object after the caller's cleanup has deleted it.
    """
    task = asyncio.create_task(request)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        task.exception()  # retrieved, so that asyncio does not log it: the caller is gone
        raise
