"""Connections that another process accepted, handed over through a socket."""

from __future__ import annotations

import errno
import os
import socket
from typing import Final

_TAKEN: Final = b"t"
_REFUSED: Final = b"r"


class HandedOver:
    """The receiving side; looks like a listening socket.

    Args:
        link: A Unix stream socket to `hand_over`'s side; no child inherits it.
    """

    def __init__(self, link: socket.socket) -> None:
        link.set_inheritable(False)
        self._link = link

    def fileno(self) -> int:
        """Return what becomes readable when there is a connection."""
        return self._link.fileno()

    def accept(self) -> tuple[socket.socket, None]:
        """Return the next connection; nothing tells its peer's address.

        Raises:
            OSError: There is no room for its descriptor: it waits, and the next call tries again.
        """
        os.close(os.dup(self._link.fileno()))  # a full table is found out while it is still whole
        data, fds, _, _ = socket.recv_fds(self._link, 1, 1)
        if not data:
            raise OSError(errno.EBADF, "who handed connections over is gone")
        if not fds:
            self._link.sendall(_REFUSED)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self._link.sendall(_TAKEN)
        sock = socket.socket(fileno=fds[0])
        sock.set_inheritable(False)
        return sock, None


def hand_over(link: socket.socket, sock: socket.socket) -> None:
    """Hand a connection to the other side, and return when that has it; `sock` stays open here.

    Raises:
        OSError: The other side is gone.
    """
    answer = _REFUSED
    while answer == _REFUSED:
        socket.send_fds(link, [b"c"], [sock.fileno()])
        answer = link.recv(1)
    if answer != _TAKEN:
        raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))
