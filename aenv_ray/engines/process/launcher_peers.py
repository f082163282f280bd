"""Who speaks with a launcher: hosts, over a Unix socket, one JSON object a line."""

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
    """Its id, once it said hello."""
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)


class Peers:
    """The connections of a launcher.

    Args:
        selector: The launcher's.
        on_message: Told each message.
        on_away: Told a host's id when its last connection is gone.
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
        """A descriptor to accept with when there is no other."""

    @property
    def present(self) -> bool:
        """Whether anybody is connected."""
        return bool(self._peers)

    def of(self, host: str) -> list[Peer]:
        """Return the connections of a host."""
        return [peer for peer in self._peers.values() if peer.host == host]

    def accept(self, listener: Any, _: int) -> None:
        """Take a new connection; one for which there is no descriptor is closed at once."""
        try:
            sock, _address = listener.accept()
        except OSError:
            # Left in the queue it would wake the launcher for ever; closed, the host tries again.
            os.close(self._reserve)
            with contextlib.suppress(OSError):
                listener.accept()[0].close()
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            return
        sock.setblocking(False)
        self._peers[sock.fileno()] = Peer(sock)
        self._selector.register(sock, selectors.EVENT_READ, self._on_ready)

    def send(self, peer: Peer, message: dict[str, Any]) -> None:
        """Send a message; one to a peer that is gone is dropped."""
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
            # Not one of ours, or not of this version: it must not take others' sandboxes with it.
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
