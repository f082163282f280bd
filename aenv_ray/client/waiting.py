"""Waiting for an instance, with log messages once it takes more than a few seconds."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from aenv_ray.errors import (
    DeadlineExceeded,
    FabricUnavailable,
    InternalError,
    SandboxLost,
    SandboxStartFailed,
)
from aenv_ray.runtime.door.dispatch import HEALTHY

logger = logging.getLogger("aenv_ray")

FIRST_LOG_S: Final = 5.0
"""A wait is logged after this long, and again each time it has doubled."""
_FIRST_POLL_S: Final = 0.02
_LONGEST_POLL_S: Final = 0.5
_PROBE_S: Final = 3.0


class Wait:
    """A wait with a deadline that is logged while it lasts.

    Args:
        what: What is waited for, for the log.
        longest_s: The caller's timeout.
        now: Monotonic seconds.
    """

    def __init__(
        self, what: str, longest_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.why = ""
        """Why the last attempt did not end the wait."""
        self._what = what
        self.longest_s = longest_s
        self._now = now
        self._began = now()
        self._next_log_s = FIRST_LOG_S

    @property
    def remaining_s(self) -> float:
        """Seconds until the timeout; negative after it."""
        return self._began + self.longest_s - self._now()

    def goes_on(self, why: str) -> None:
        """Record why the wait continues, and log it if it is time to."""
        self.why = why
        waited_s = self._now() - self._began
        if waited_s < self._next_log_s:
            return
        self._next_log_s = 2 * waited_s
        logger.warning(
            "still waiting for %s after %.0f s of at most %g s: %s",
            self._what, waited_s, self.longest_s, why,
        )  # fmt: skip


async def until_healthy(
    check_health: Callable[[float], Awaitable[dict[str, Any]]], url: str, wait: Wait
) -> dict[str, Any]:
    """Wait until a server is healthy and return the response of its health check.

    Args:
        check_health: Makes one health check, with a timeout in seconds.
        url: The server's address, for messages.
        wait: Deadline and log.

    Raises:
        DeadlineExceeded: It was not healthy in time; the message has the last response.
        SandboxStartFailed: Its code does not load, so waiting longer is useless.
    """
    pause_s, last = _FIRST_POLL_S, ""
    while True:
        try:
            body = await check_health(min(_PROBE_S, max(wait.remaining_s, 0.001)))
        except DeadlineExceeded as exc:  # no response: report the previous one
            last = last or exc.message
        except (FabricUnavailable, SandboxLost, InternalError) as exc:
            last = exc.message_and_hint
        else:
            data = body["data"]
            if data.get("status") in HEALTHY:
                return body
            if data.get("code") == SandboxStartFailed.code:
                raise SandboxStartFailed(
                    f"the environment at {url} does not load: {data.get('message')}",
                    hint="correct the project and start the server again",
                )
            last = json.dumps(data)[:500]
        if wait.remaining_s < pause_s:
            raise DeadlineExceeded(
                f"{url} was not healthy within {wait.longest_s:g} s; its last response: {last}",
                hint="check the log of the environment, or raise startup_timeout",
            )
        wait.goes_on(last)
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, _LONGEST_POLL_S)


def expect_healthy(data: Mapping[str, Any], instance_id: str | None, *, hint: str) -> None:
    """Raise SandboxStartFailed, unless the ``data`` of a health check says healthy."""
    if str(data.get("status")) not in HEALTHY:
        raise SandboxStartFailed(
            f"{instance_id} is {data.get('status')}: {data.get('message', '')}",
            instance_id=instance_id,
            hint=hint,
        )
