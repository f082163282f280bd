"""Logs when Ray's head is lost and when it is back: one line each, however many operations wait.

Running calls do not need the head. Creates and look-ups wait for it, in Ray itself. A process of
the head's own node waits in vain: that node does not come back, the new head is another one.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

logger = logging.getLogger("aenv_ray")

LOOK_S: Final = 2.0
"""Interval at which the head is checked."""
_CONNECT_S: Final = 2.0
MISSES: Final = 3
"""The head is lost after this many failed checks in a row."""
NODE_S: Final = 120.0
"""For how long after the head's return it is asked whether this process's node is alive. A new head
learns of the death of the old one within this time."""
CUT_OFF: Final = "Ray's head was lost, and with it the node that this process is connected to"
START_AGAIN: Final = "start this program again; calls to instances that still run continue"


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

    @property
    def is_missed(self) -> bool:
        """Whether the last look failed."""
        return self._misses > 0

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
        has_node: Returns whether the node of this process is alive, as the head knows.
        on_cut_off: Called once if it is not, after a look at the head failed.
    """

    def __init__(
        self, address: str, has_node: Callable[[], bool], on_cut_off: Callable[[], None]
    ) -> None:
        self._has_node = has_node
        self._on_cut_off = on_cut_off
        host, _, port = address.rpartition(":")
        self._target = host.strip("[]"), int(port)
        self._contact = HeadContact(address)
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="aenv-head-watch", daemon=True).start()

    @property
    def is_lost(self) -> bool:
        """Whether the head is lost."""
        return self._contact.is_lost

    @property
    def is_missed(self) -> bool:
        """Whether the head did not answer when it was last looked at."""
        return self._contact.is_missed

    def stop(self) -> None:
        """Stop watching; idempotent."""
        self._stopped.set()

    def _watch(self) -> None:
        asks_until = float("-inf")
        while not self._stopped.wait(LOOK_S):
            was_missed, now = self.is_missed, time.monotonic()
            line = self._contact.note(is_up=self._answers(), now=now)
            if line is not None and not self._stopped.is_set():
                logger.warning("%s", line)
            if was_missed and not self.is_missed:  # it may be a new head, started quickly
                asks_until = now + NODE_S
            if now < asks_until and not self.is_missed and self._is_cut_off():
                logger.warning("%s: %s", CUT_OFF, START_AGAIN)
                self._on_cut_off()
                return

    def _is_cut_off(self) -> bool:
        try:
            return not self._stopped.is_set() and not self._has_node()
        except Exception as exc:  # noqa: BLE001  # the head is still starting, and is asked again
            logger.info("the head does not say which nodes are alive: %r", exc)
            return False

    def _answers(self) -> bool:
        try:
            socket.create_connection(self._target, _CONNECT_S).close()
        except OSError:
            return False
        return True
