"""The hosts connected to a launcher: one JSON object a line over a Unix socket."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

_READ_BYTES: Final = 1 << 18


@dataclass
class Peer:
    """A connected host."""

    sock: socket.socket
    host: str = ""
    """Its id, after its ``hello``."""
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)


class Peers:
    """The connections of a launcher.

    Args:
        selector: The launcher's selector.
        on_message: Called with each message.
        on_away: Called with a host's id when its last connection is closed.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        on_message: Callable[[Peer, dict[str, Any]], None],
        on_away: Callable[[str], None],
    ) -> None:
        self._selector = selector
        self._on_message = on_message
        self._on_away = on_away
        self._peers: dict[int, Peer] = {}
        self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        """Closed to accept a connection when no other descriptor is free."""

    @property
    def is_any_connected(self) -> bool:
        """Whether a host is connected."""
        return bool(self._peers)

    def of(self, host: str) -> list[Peer]:
        """Return the connections of a host."""
        return [peer for peer in self._peers.values() if peer.host == host]

    def accept(self, listener: Any, _: int) -> None:
        """Accept a connection; if no descriptor is free for it, close it at once."""
        try:
            sock, _address = listener.accept()
        except OSError:
            # Left in the queue it would keep waking the launcher. A host whose
            # connection is closed tries again.
            os.close(self._reserve)
            with contextlib.suppress(OSError):
                listener.accept()[0].close()
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            return
        sock.setblocking(False)
        self._peers[sock.fileno()] = Peer(sock)
        self._selector.register(sock, selectors.EVENT_READ, self._on_ready)

    def send(self, peer: Peer, message: dict[str, Any]) -> None:
        """Send a message; drop it if the peer is gone."""
        if peer.sock.fileno() < 0:
            return
        peer.outbox += json.dumps(message).encode() + b"\n"
        self._flush(peer)

    def _on_ready(self, sock: Any, events: int) -> None:
        peer = self._peers[sock.fileno()]
        if events & selectors.EVENT_WRITE:
            self._flush(peer)
        if not events & selectors.EVENT_READ:
            return
        try:
            data = sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
            return
        peer.inbox += data
        *lines, rest = peer.inbox.split(b"\n")
        peer.inbox = bytearray(rest)
        try:
            for line in lines:
                self._on_message(peer, json.loads(line))
        except (ValueError, KeyError, TypeError):
            # A peer of another version, or not a host: it must not end the sandboxes of others.
            traceback.print_exc()
            self._drop(peer)

    def _flush(self, peer: Peer) -> None:
        try:
            sent = peer.sock.send(peer.outbox)
            del peer.outbox[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outbox else 0)
        self._selector.modify(peer.sock, wanted, self._on_ready)

    def _drop(self, peer: Peer) -> None:
        if peer.sock.fileno() < 0:
            return
        self._selector.unregister(peer.sock)
        del self._peers[peer.sock.fileno()]
        peer.sock.close()
        if peer.host and not self.of(peer.host):
            self._on_away(peer.host)
