"""Which MCP sessions follow which resources, and what to tell them.

A session at the public door is told at once. One at a gateway, which keeps no connection to the
client, is told with its calls: with the one that runs, or else with the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from aenv_ray.runtime.faults import Fault

SESSION: Final = "aenv/session"
"""In ``_meta``: the session of the caller at a gateway."""
UPDATED: Final = "notifications/resources/updated"
SUBSCRIBE: Final = "resources/subscribe"
UNSUBSCRIBE: Final = "resources/unsubscribe"
MAX_SUBSCRIPTIONS: Final = 1000
"""Maximum number of subscriptions of an instance."""
OnUpdate = Callable[[str], None]
"""Called with the URI, in the thread that reports the update; must not block."""


class Subscriptions:
    """The subscriptions of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._followed: dict[str, set[str]] = {}
        """By session: the URIs."""
        self._pending: dict[str, dict[str, None]] = {}
        """By session: URIs of updates that it was not told, oldest first."""
        self._listeners: dict[str, list[OnUpdate]] = {}

    def subscribe(self, session: str, uri: str) -> None:
        """Follow a resource; idempotent.

        Raises:
            Fault: ``capacity_exceeded``: the instance has too many subscriptions.
        """
        with self._lock:
            followed = self._followed.setdefault(session, set())
            while uri not in followed and self._count() >= MAX_SUBSCRIPTIONS:
                left = [one for one in self._followed if one not in self._listeners]
                if left and left[0] != session:  # gateways do not tell when a session ends
                    self._followed.pop(left[0])
                    self._pending.pop(left[0], None)
                    continue
                raise Fault(
                    "capacity_exceeded",
                    f"the instance has {MAX_SUBSCRIPTIONS} subscriptions, the maximum",
                    "unsubscribe from other resources first",
                )
            followed.add(uri)

    def _count(self) -> int:
        return sum(map(len, self._followed.values()))

    def unsubscribe(self, session: str, uri: str) -> None:
        """Stop following a resource; idempotent."""
        with self._lock:
            followed = self._followed.get(session, set())
            followed.discard(uri)
            self._pending.get(session, {}).pop(uri, None)
            if not followed:
                self._followed.pop(session, None)
                self._pending.pop(session, None)

    def end(self, session: str) -> None:
        """Forget a session."""
        with self._lock:
            self._followed.pop(session, None)
            self._pending.pop(session, None)

    def listen(self, session: str, on_update: OnUpdate) -> Callable[[], None]:
        """Tell a session of its updates, also of earlier ones, until the result is called."""
        with self._lock:
            self._listeners.setdefault(session, []).append(on_update)
            earlier = self._pending.pop(session, {})
        for uri in earlier:
            on_update(uri)

        def stop() -> None:
            with self._lock:
                listeners = self._listeners.get(session, [])
                if on_update in listeners:
                    listeners.remove(on_update)
                if not listeners:
                    self._listeners.pop(session, None)

        return stop

    def updated(self, uri: str) -> None:
        """Tell all sessions that follow a resource."""
        told: list[OnUpdate] = []
        with self._lock:
            for session, uris in self._followed.items():
                if uri not in uris:
                    continue
                if listeners := self._listeners.get(session):
                    told.append(listeners[0])
                else:
                    self._pending.setdefault(session, {})[uri] = None
        for on_update in told:
            on_update(uri)


SUBSCRIPTIONS: Final = Subscriptions()


def resource_updated(uri: str) -> None:
    """Tell MCP clients that follow a resource that it has changed.

    Args:
        uri: Its URI, with the parameters of a template filled in.
    """
    SUBSCRIPTIONS.updated(uri)


def update_note(uri: str) -> dict[str, Any]:
    """Return MCP's notification of an update."""
    return {"method": UPDATED, "params": {"uri": uri}}
