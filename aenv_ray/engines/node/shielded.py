"""Requests that are not given up within: what is asked goes on making what its asker gave up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def until_answered(asking: Coroutine[Any, Any, T]) -> T:
    """Return what a request gives; cancelled, end once it is answered.

    Else what it makes may come after its removal, and stay.
    """
    task = asyncio.create_task(asking)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        task.exception()  # told to nobody: its asker is gone
        raise
