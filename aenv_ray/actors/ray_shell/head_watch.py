"""Logs when Ray's head is lost and when it is back: one line each, however many operations wait.

Running calls do not need the head. Creates and look-ups wait for it, in Ray itself.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from typing import Final

logger = logging.getLogger("aenv_ray")

LOOK_S: Final = 2.0
"""Interval at which the head is checked."""
_CONNECT_S: Final = 2.0
MISSES: Final = 3
"""The head counts as lost after this many failed checks in a row."""


class HeadContact:
    """Decides when the head is lost and when it is back.

    Args:
        address: The address of the head, for the lines.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._misses = 0
        self._missing_since = 0.0

    @property
    def is_lost(self) -> bool:
        """Whether the head is lost."""
        return self._misses >= MISSES

    def note(self, *, is_up: bool, now: float) -> str | None:
        """Note the outcome of a check; return a line to log, or None."""
        if is_up:
            was_lost, self._misses = self.is_lost, 0
            if not was_lost:
                return None
            away_s = now - self._missing_since
            return f"Ray's head at {self._address} is back after {away_s:.0f} s"
        self._misses += 1
        if self._misses == 1:
            self._missing_since = now
        if self._misses != MISSES:
            return None
        return (
            f"Ray's head at {self._address} does not answer: creates and look-ups wait until it is "
            "back; instances, and calls to them, continue"
        )


class HeadWatch:
    """Watches the head in a thread until `stop`.

    Args:
        address: ``HOST:PORT`` of the head.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = host.strip("[]"), int(port)
        self._contact = HeadContact(address)
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="aenv-head-watch", daemon=True).start()

    @property
    def is_lost(self) -> bool:
        """Whether the head is lost."""
        return self._contact.is_lost

    def stop(self) -> None:
        """Stop watching; idempotent."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(LOOK_S):
            line = self._contact.note(is_up=self._answers(), now=time.monotonic())
            if line is not None and not self._stopped.is_set():
                logger.warning("%s", line)

    def _answers(self) -> bool:
        try:
            socket.create_connection(self._target, _CONNECT_S).close()
        except OSError:
            return False
        return True
