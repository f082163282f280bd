"""The door of a container with a kernel of its own, where no peer can be told by its credentials.

gVisor and virtual machines share no sockets with the node, so that the host comes in by a program
that the daemon runs in the container (`aenv_ray.runtime.container.bridge`), and whoever runs there
could do the same. A peer shows by a key that it is the host
(`aenv_ray.runtime.container.host_proof`). Process 1 reads the key from its standard input before
anything else runs: it is in no file, no variable and no description of the container, and the
memory of process 1 is closed to others.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from typing import Any, Final

from aenv_ray.runtime.container import bridge
from aenv_ray.runtime.container import host_proof as pod_door
from aenv_ray.runtime.container.connection_handover import HandedOver, hand_over
from aenv_ray.runtime.system.reaper import Acceptor

_GREETING_S: Final = 10.0
_BACKLOG: Final = 16
_MOST_GREETED: Final = 32
"""Peers that have proved nothing yet; more wait in the backlog."""
_PAUSE_S: Final = 0.05
_PIECE_BYTES: Final = 65_536


class KeyedDoor:
    """Accepts connections and lets in those that have the key; an entrance of `container`.

    Args:
        name: Of the door.
        key: Of the instance.
    """

    def __init__(self, name: str, key: bytes) -> None:
        self._key = key
        # Taken before any code of the project could take it; who is too early waits in the backlog.
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(bridge.address(name))
        self._listener.listen(_BACKLOG)
        self._link, inside = socket.socketpair()
        self._entrance = HandedOver(inside)
        self._linking = threading.Lock()
        self._places = threading.BoundedSemaphore(_MOST_GREETED)
        self._report = b""
        self._has_failed = False
        self._told = threading.Event()
        self._acceptor: Acceptor | None = None

    def prepare(self) -> None:
        """Do nothing: it listens already."""

    def tell(self, report: dict[str, Any]) -> None:
        """Tell the host what became of the start, as soon as it asks, and begin to let it in.

        A failure is told before this returns, unless the host does not come.
        """
        self._report = json.dumps(report).encode() + b"\n"
        self._has_failed = "ready" not in report
        threading.Thread(target=self._accept, name="aenv-keyed-door", daemon=True).start()
        if self._has_failed:
            self._told.wait(bridge.PATIENCE_S)

    def accept(self) -> socket.socket:
        """Return the next connection of the host; in the main thread alone."""
        if self._acceptor is None:
            self._acceptor = Acceptor(self._entrance)
        return self._acceptor.accept()

    def _accept(self) -> None:
        while True:
            self._places.acquire()
            try:
                sock, _ = self._listener.accept()
                threading.Thread(target=self._welcome, args=(sock,), daemon=True).start()
            except (OSError, RuntimeError):  # no room for another descriptor or thread now
                self._places.release()
                time.sleep(_PAUSE_S)

    def _welcome(self, sock: socket.socket) -> None:
        try:
            with sock, contextlib.suppress(OSError, ValueError):
                sock.settimeout(_GREETING_S)
                purpose = pod_door.greet(sock, self._key)
                if purpose is None:
                    return
                if purpose.get("kind") == "boot":
                    sock.sendall(self._report)
                    if self._has_failed:
                        # The end of process 1 ends who passes this on: the host hangs up first.
                        with contextlib.suppress(OSError):
                            sock.recv(1)
                        self._told.set()
                        return
                sock.settimeout(None)
                with self._linking:
                    hand_over(self._link, sock)
        finally:
            self._places.release()


def read_order() -> KeyedDoor:
    """Return the door that standard input orders: one JSON line, ``door`` and ``key`` (hex).

    Standard input is empty afterwards.

    Raises:
        ValueError: It says nothing, or something else.
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
    return KeyedDoor(str(order["door"]), bytes.fromhex(order["key"]))
