"""The door of a container with its own kernel, where credentials of a peer cannot be checked.

gVisor and virtual machines share no sockets with the node. The host connects through a program that
the Docker daemon runs in the container (`aenv_ray.runtime.container.bridge`), and any process in
the container could connect likewise. So the host authenticates with a key
(`aenv_ray.runtime.container.handshake`). Process 1 reads the key from its standard input before
anything else runs. The key is in no file, variable or description of the container, and other
processes cannot read the memory of process 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from typing import Any, Final

from aenv_ray.runtime.container import bridge, handshake
from aenv_ray.runtime.container.connection_handover import HandoverListener, hand_over
from aenv_ray.runtime.system.reaper import Acceptor

_HANDSHAKE_S: Final = 10.0
_BACKLOG: Final = 16
_MAX_HANDSHAKES: Final = 32
"""Unauthenticated connections at once; more wait in the backlog."""
_ACCEPT_RETRY_S: Final = 0.05
_PIECE_BYTES: Final = 65_536


class AuthenticatedDoor:
    """Accepts connections of peers that know the key; a `HostDoor` of `process_one`.

    Args:
        name: The name of the socket.
        key: The key of the instance.
    """

    def __init__(self, name: str, key: bytes) -> None:
        self._key = key
        # Bound before any code of the project could bind it; early connections wait.
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(bridge.address(name))
        self._listener.listen(_BACKLOG)
        self._link, inside = socket.socketpair()
        self._handed_over = HandoverListener(inside)
        self._linking = threading.Lock()
        self._handshakes = threading.BoundedSemaphore(_MAX_HANDSHAKES)
        self._report = b""
        self._has_failed = False
        self._reported = threading.Event()
        self._acceptor: Acceptor | None = None

    def prepare(self) -> None:
        """Do nothing: it listens already."""

    def tell(self, report: dict[str, Any]) -> None:
        """Report the start to the host as soon as it connects, and start to accept connections.

        A failure is reported before this returns, unless the host does not connect in time.
        """
        self._report = json.dumps(report).encode() + b"\n"
        self._has_failed = "ready" not in report
        threading.Thread(target=self._accept, name="aenv-keyed-door", daemon=True).start()
        if self._has_failed:
            self._reported.wait(bridge.CONNECT_S)

    def accept(self) -> socket.socket:
        """Return the next connection of the host; only in the main thread."""
        if self._acceptor is None:
            self._acceptor = Acceptor(self._handed_over)
        return self._acceptor.accept()

    def _accept(self) -> None:
        while True:
            self._handshakes.acquire()
            sock = None
            try:
                sock, _ = self._listener.accept()
                threading.Thread(target=self._serve_peer, args=(sock,), daemon=True).start()
            except (OSError, RuntimeError):  # no descriptor or thread is free now
                if sock is not None:
                    sock.close()  # its peer tries again
                self._handshakes.release()
                time.sleep(_ACCEPT_RETRY_S)

    def _serve_peer(self, sock: socket.socket) -> None:
        try:
            with sock, contextlib.suppress(OSError, ValueError):
                sock.settimeout(_HANDSHAKE_S)
                purpose = handshake.accept_host(sock, self._key)
                if purpose is None:
                    return
                if purpose.get("kind") == "boot":
                    sock.sendall(self._report)
                    if self._has_failed:
                        # The end of process 1 also ends the bridge: let the host close first.
                        with contextlib.suppress(OSError):
                            sock.recv(1)
                        self._reported.set()
                        return
                sock.settimeout(None)
                with self._linking:
                    hand_over(self._link, sock)
        finally:
            self._handshakes.release()


def read_order() -> AuthenticatedDoor:
    """Create the door that standard input describes: a JSON line with ``door`` and ``key`` (hex).

    Standard input is ``/dev/null`` afterwards.

    Raises:
        ValueError: Standard input is empty, or not such a line.
    """
    data = b""
    while not data.endswith(b"\n"):
        piece = os.read(0, _PIECE_BYTES)
        if not piece:
            raise ValueError("the host gave no key on standard input")
        data += piece
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    order = json.loads(data)
    return AuthenticatedDoor(str(order["door"]), bytes.fromhex(order["key"]))
