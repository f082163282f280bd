"""Connections to ports inside the sandbox, for callers that have no network access to it.

A caller opens a connection, and then reads and writes by calls through the fast door. Each read and
write has a call id, so a repeated one neither loses nor duplicates bytes.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from aenv_ray.runtime.door.workspace import decode
from aenv_ray.runtime.faults import Fault

MAX_CONNECTIONS: Final = 128
"""Limit of open connections; each read occupies one of the door's threads."""
PIECE_BYTES: Final = 256 * 1024
READ_WAIT_S: Final = 15.0
"""How long a read waits for the first byte before it returns without data."""
ABANDONED_S: Final = 60.0
"""A connection that is unused for this long is considered abandoned."""
_CONNECT_S: Final = 5.0
_STALLED_S: Final = 60.0
"""How long a write may make no progress."""


@dataclass
class _PortConnection:
    sock: socket.socket
    used_at: float = field(default_factory=time.monotonic)


class Ports:
    """The connections of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: dict[str, _PortConnection] = {}
        self._ids = itertools.count(1)

    def open(self, port: int) -> dict[str, Any]:
        """Connect to a port on the loopback.

        Returns:
            ``connection``: the id for further calls.

        Raises:
            Fault: ``capacity_exceeded``: too many connections are open; ``port_unreachable``:
                nothing answers on the port.
        """
        self._close_abandoned()
        with self._lock:
            if len(self._connections) >= MAX_CONNECTIONS:
                raise Fault(
                    "capacity_exceeded",
                    f"{MAX_CONNECTIONS} connections to ports of the sandbox are open, the maximum",
                    "close some of them first",
                )
        try:
            sock = _connect(port)
        except (OSError, OverflowError) as exc:
            raise Fault(
                "port_unreachable",
                f"nothing in the sandbox answers on port {port}: {exc}",
                "start a server on that port, on localhost or on all addresses",
            ) from exc
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = f"{os.getpid()}-{next(self._ids)}"
        with self._lock:
            self._connections[name] = _PortConnection(sock)
        return {"connection": name}

    def read(self, connection: str) -> dict[str, Any]:
        """Wait for bytes.

        Returns:
            ``data`` (base64), empty if none arrived yet; ``ended``: no more will arrive.
        """
        found = self._find(connection)
        found.sock.settimeout(READ_WAIT_S)
        try:
            data = found.sock.recv(PIECE_BYTES)
        except TimeoutError:
            return {"data": "", "ended": False}
        except OSError:
            return {"data": "", "ended": True}
        return {"data": base64.b64encode(data).decode(), "ended": not data}

    def write(self, connection: str, data: str) -> dict[str, Any]:
        """Write base64 data; empty data shuts down the writing side."""
        found = self._find(connection)
        payload = decode(data)
        try:
            if payload:
                # The socket has one timeout for both directions, which reads set.
                _send_all(found.sock, payload)
            else:
                found.sock.shutdown(socket.SHUT_WR)
        except OSError as exc:
            raise Fault(
                "port_unreachable",
                f"the server in the sandbox closed connection {connection!r}: {exc}",
                "open a new one",
            ) from exc
        return {"size_bytes": len(payload)}

    def close(self, connection: str) -> dict[str, Any]:
        """Close a connection, and end a read that waits on it. Idempotent."""
        with self._lock:
            found = self._connections.pop(connection, None)
        if found is not None:
            _hang_up(found.sock)
        return {"closed": found is not None}

    def _find(self, connection: str) -> _PortConnection:
        with self._lock:
            found = self._connections.get(connection)
        if found is None:
            raise Fault("port_unreachable", f"unknown connection {connection!r}", "open a new one")
        found.used_at = time.monotonic()
        return found

    def _close_abandoned(self) -> None:
        latest = time.monotonic() - ABANDONED_S
        with self._lock:
            gone = [name for name, one in self._connections.items() if one.used_at < latest]
        for name in gone:
            self.close(name)


def _connect(port: int) -> socket.socket:
    """Connect to a port on the loopback interface, over IPv4 or IPv6.

    Raises:
        OSError: Nothing listens on 127.0.0.1 or on ::1.
        OverflowError: It is not a port number.
    """
    try:
        return socket.create_connection(("127.0.0.1", port), timeout=_CONNECT_S)
    except ConnectionRefusedError:
        with contextlib.suppress(OSError):  # report the error of 127.0.0.1
            return socket.create_connection(("::1", port), timeout=_CONNECT_S)
        raise


def _send_all(sock: socket.socket, payload: bytes) -> None:
    view, deadline = memoryview(payload), time.monotonic() + _STALLED_S
    while view:
        try:
            view = view[sock.send(view) :]
        except TimeoutError:
            if time.monotonic() > deadline:
                raise
            continue
        deadline = time.monotonic() + _STALLED_S


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side has closed it
        sock.shutdown(socket.SHUT_RDWR)  # wakes a reading thread, unlike `close`
    sock.close()


_PORTS: Final = Ports()

METHODS: Final[dict[str, Callable[..., dict[str, Any]]]] = {
    "aenv/port_open": _PORTS.open,
    "aenv/port_read": _PORTS.read,
    "aenv/port_write": _PORTS.write,
    "aenv/port_close": _PORTS.close,
}
"""Fast-door methods served by this module."""
