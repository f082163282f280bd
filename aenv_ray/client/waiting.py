"""Waiting for what may never come, aloud: what is waited for is on the log after a few seconds."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aenv_ray.errors import (
    AenvError,
    DeadlineExceeded,
    FabricUnavailable,
    InternalError,
    SandboxLost,
    SandboxStartFailed,
)

logger = logging.getLogger("aenv_ray")

HEALTHY: Final = frozenset({"healthy", "success", "ok"})
FIRST_WORD_S: Final = 5.0
"""A wait this long is told; and then each time that it has doubled."""
_FIRST_POLL_S: Final = 0.02
_LONGEST_POLL_S: Final = 0.5
_PROBE_S: Final = 3.0


class Wait:
    """A wait of a caller who hears nothing else of it.

    Args:
        what: That is waited for.
        longest_s: Then the caller gives up.
        now: Monotonic seconds.
    """

    def __init__(
        self, what: str, longest_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.why = ""
        """Why it was not over when it was asked last."""
        self._what = what
        self.longest_s = longest_s
        self._now = now
        self._began = now()
        self._next_word_s = FIRST_WORD_S

    @property
    def remaining_s(self) -> float:
        """What is left of it; below zero when it is over."""
        return self._began + self.longest_s - self._now()

    def goes_on(self, why: str) -> None:
        """Note that it is not over yet; told on the log when it is time."""
        self.why = why
        waited_s = self._now() - self._began
        if waited_s < self._next_word_s:
            return
        self._next_word_s = 2 * waited_s
        logger.warning(
            "waiting for %s since %.0f s, for %g s at most: %s",
            self._what, waited_s, self.longest_s, why,
        )  # fmt: skip


async def until_healthy(
    check_health: Callable[[float], Awaitable[dict[str, Any]]], url: str, wait: Wait
) -> dict[str, Any]:
    """Wait until a server is healthy and return its health check's answer.

    Args:
        check_health: Asks it, with a timeout in seconds.
        url: Of the server.
        wait: How long, and who is told.

    Raises:
        DeadlineExceeded: It was not within that time; the message has the last answer.
        SandboxStartFailed: Its code does not load, which waiting does not change.
    """
    pause_s, last = _FIRST_POLL_S, ""
    while True:
        try:
            body = await check_health(min(_PROBE_S, max(wait.remaining_s, 0.001)))
        except DeadlineExceeded as exc:  # no answer: the last one is the one before
            last = last or exc.message
        except (FabricUnavailable, SandboxLost, InternalError) as exc:
            last = said(exc)
        else:
            data = body["data"]
            if data.get("status") in HEALTHY:
                return body
            if data.get("code") == SandboxStartFailed.code:
                raise SandboxStartFailed(
                    f"the environment at {url} does not load: {data.get('message')}"
                )
            last = json.dumps(data)[:500]
        if wait.remaining_s < pause_s:
            raise DeadlineExceeded(
                f"{url} was not healthy within {wait.longest_s:g} s; its last answer: {last}"
            )
        wait.goes_on(last)
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, _LONGEST_POLL_S)


def said(error: AenvError) -> str:
    """Return an error's message, with its way out."""
    return f"{error.message} ({error.hint})" if error.hint else error.message
