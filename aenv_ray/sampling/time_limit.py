"""How long a policy may act: its own limit, and never longer than its instance lives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

ASK_S: Final = 60.0
"""How often it is asked whether the instance of a policy that still acts is there."""
GRACE_S: Final = 5.0
"""What a policy that was cancelled gets to end. Then it is left behind, without its instance."""


class PolicyTimedOut(Exception):
    """The policy had not ended at its limit."""


async def within(
    acting: Coroutine[Any, Any, T],
    limit_s: float | None,
    instance_lives: Callable[[], Awaitable[Any]],
    ask_s: float | None = None,
    grace_s: float = GRACE_S,
) -> T:
    """Return what a policy gives; when this ends, the policy has been told to end too.

    Args:
        acting: The policy at work.
        limit_s: Seconds; None: none but the instance's life.
        instance_lives: Raises when the instance has ended: the policy has nothing left to act on.
        ask_s: Seconds between two such questions; None: `ASK_S`.
        grace_s: Seconds that a cancelled policy gets.

    Raises:
        PolicyTimedOut: `limit_s` passed.
        AenvError: What `instance_lives` raised.
        Exception: What the policy raised.
    """
    policy = asyncio.ensure_future(acting)
    watch = asyncio.ensure_future(_watch(instance_lives, ask_s or ASK_S))
    both = {policy, watch}
    try:
        await asyncio.wait(both, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if policy.done():
            return policy.result()
        if watch.done():
            watch.result()
        raise PolicyTimedOut(f"the policy had not ended after {limit_s:g} s")
    finally:
        for task in both:
            task.add_done_callback(_retrieve)
            task.cancel()
        if not policy.done():
            await asyncio.wait({policy}, timeout=grace_s)


async def _watch(instance_lives: Callable[[], Awaitable[Any]], ask_s: float) -> None:
    while True:
        await asyncio.sleep(ask_s)
        await instance_lives()


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Take note of how it ended: nobody else does once it was left behind."""
    if not task.cancelled():
        task.exception()
