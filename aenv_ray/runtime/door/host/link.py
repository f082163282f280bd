"""Requests from the runtime to its host, over the host's connection to the fast door.

If the host is replaced, requests without an answer are sent again to its successor, with the same
call ids, so that they run once.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

from aenv_ray.runtime.api.results import to_json

SIDECAR_METHOD: Final = "aenv/second"
ENVIRONMENT_METHOD: Final = "aenv/environment"
END_PROCESSES_METHOD: Final = "aenv/end_processes"
"""For a sidecar: ends the processes that tools have started there."""
AFTER_TOOLS: Final = "aenv/after_tools"
"""In ``_meta`` of a request for the sidecar: what it starts may be the agent's."""
AFTER_REWARD_METHOD: Final = "aenv/after_reward"
"""For inner instances: a reward of the outer instance has ended."""
OUTER_REWARDS: Final = "aenv/rewards"
"""In ``_meta`` of a request for a sidecar or an inner instance: how many rewards of the outer
instance had begun before the tool call that makes it, or -1 if no tool call makes it."""
HELD_S: Final = "aenv/held_s"
"""In ``_meta`` of `END_PROCESSES_METHOD`: how long the reward may take."""
OF_HOSTS: Final = frozenset({AFTER_TOOLS, OUTER_REWARDS, HELD_S})
"""What only a host, for the code of another instance, may say in ``_meta``: it opens the gate."""
OnAnswer = Callable[[dict[str, Any]], object]
"""Called with the JSON-RPC answer, which has ``result`` or ``error``."""


class HostConnection(Protocol):
    """A connection to a host."""

    def send(self, line: bytes) -> None:
        """Send a line; a lost one is sent again to the next peer."""


class HostLink:
    """Sends requests from this process to its host. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._pending: dict[str, tuple[bytes, OnAnswer]] = {}
        self._peer: HostConnection | None = None
        self._was_open = False
        self._sent: set[str] = set()
        self.agent_has_acted = False
        """Whether a tool was ever called."""

    def has_sent(self, method: str) -> bool:
        """Whether a request with this method was ever sent."""
        return method in self._sent

    @property
    def was_open(self) -> bool:
        """Whether a host was ever connected: not while the project's code is imported."""
        return self._was_open

    def attach(self, peer: HostConnection) -> None:
        """Use this host from now on; first send it the requests without an answer."""
        with self._lock:
            self._peer, self._was_open = peer, True
            lines = [line for line, _ in self._pending.values()]
        if lines:
            peer.send(b"".join(lines))

    def detach(self, peer: HostConnection) -> None:
        """Forget a host that is gone; pending requests wait for the next one."""
        with self._lock:
            if self._peer is peer:
                self._peer = None

    def new_id(self) -> str:
        """Return an id for a request, so that it can be cancelled from the moment it is sent."""
        return f"h{next(self._ids)}"

    def ask(
        self, request_id: str, method: str, params: dict[str, Any], on_answer: OnAnswer
    ) -> None:
        """Send a request; `on_answer` is called once with its answer, in any thread."""
        # With the method first: the host takes a line that begins with an id for an answer.
        request = {"jsonrpc": "2.0", "method": method, "id": request_id, "params": params}
        line = to_json(request) + b"\n"
        with self._lock:
            self._sent.add(method)
            self._pending[request_id] = line, on_answer
            peer = self._peer
        if peer is not None:
            peer.send(line)

    def cancel(self, request_id: str) -> None:
        """Drop the answer of a request, and tell the host to stop it."""
        with self._lock:
            is_pending = self._pending.pop(request_id, None) is not None
            peer = self._peer
        if is_pending and peer is not None:
            params = {"requestId": request_id}
            note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
            peer.send(to_json(note) + b"\n")

    def on_answer(self, message: dict[str, Any]) -> None:
        """Handle an answer from a host; an unexpected one is ignored."""
        with self._lock:
            _, on_answer = self._pending.pop(str(message.get("id")), (b"", None))
        if on_answer is not None:
            on_answer(message)


HOST: HostLink = HostLink()
"""The link of this process."""
