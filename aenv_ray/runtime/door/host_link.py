"""Requests from the runtime to its host: the fast door, used the other way round.

They go over the connection that the host made. When the host is replaced meanwhile, what has no
answer yet is sent again over its successor's, with the call id that it had: whoever runs it, runs
it once.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, Protocol

from aenv_ray.runtime.api.results import to_json

OnAnswer = Callable[[dict[str, Any]], object]
"""Told the JSON-RPC answer, with ``result`` or ``error``."""


class Peer(Protocol):
    """A connection to a host."""

    def send(self, line: bytes) -> None:
        """Send a line; one that does not arrive is sent again to the next peer."""


class HostLink:
    """The way from this process to its host. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._pending: dict[str, tuple[bytes, OnAnswer]] = {}
        self._peer: Peer | None = None
        self._was_open = False

    @property
    def was_open(self) -> bool:
        """Whether there ever was a host: not while the project's code is being loaded."""
        return self._was_open

    def attach(self, peer: Peer) -> None:
        """Ask this host from now on, what waits for an answer first."""
        with self._lock:
            self._peer, self._was_open = peer, True
            lines = [line for line, _ in self._pending.values()]
        if lines:
            peer.send(b"".join(lines))

    def detach(self, peer: Peer) -> None:
        """Note that a host is gone; what waits for it waits for the next one."""
        with self._lock:
            if self._peer is peer:
                self._peer = None

    def new_id(self) -> str:
        """Return the id of a request to be made: known before, so that it can always be stopped."""
        return f"h{next(self._ids)}"

    def ask(
        self, request_id: str, method: str, params: dict[str, Any], on_answer: OnAnswer
    ) -> None:
        """Send a request; `on_answer` is told its answer, once, in any thread."""
        # The method first: this must not look like an answer of this runtime.
        request = {"jsonrpc": "2.0", "method": method, "id": request_id, "params": params}
        line = to_json(request) + b"\n"
        with self._lock:
            self._pending[request_id] = line, on_answer
            peer = self._peer
        if peer is not None:
            peer.send(line)

    def cancel(self, request_id: str) -> None:
        """Want no answer any more, and have the host stop what was asked for."""
        with self._lock:
            is_pending = self._pending.pop(request_id, None) is not None
            peer = self._peer
        if is_pending and peer is not None:
            params = {"requestId": request_id}
            note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
            peer.send(to_json(note) + b"\n")

    def on_answer(self, message: dict[str, Any]) -> None:
        """Take an answer that came from a host; one that nobody waits for is left."""
        with self._lock:
            _, on_answer = self._pending.pop(str(message.get("id")), (b"", None))
        if on_answer is not None:
            on_answer(message)


HOST: HostLink = HostLink()
"""This process's."""
