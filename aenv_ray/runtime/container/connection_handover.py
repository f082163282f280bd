"""Passing an accepted connection to another process over a Unix socket."""

from __future__ import annotations

import errno
import os
import socket
from typing import Final

_RECEIVED: Final = b"t"
_REFUSED: Final = b"r"


class HandoverListener:
    """The receiving side; used like a listening socket.

    Args:
        link: Unix stream socket, connected to the process that calls `hand_over`.
    """

    def __init__(self, link: socket.socket) -> None:
        link.set_inheritable(False)
        self._link = link

    def fileno(self) -> int:
        """Return a descriptor that is readable while a connection waits."""
        return self._link.fileno()

    def accept(self) -> tuple[socket.socket, None]:
        """Return the next connection; the address of its peer is unknown.

        Raises:
            OSError: This process has no free descriptor: the connection waits for the next call.
                Or the sender is gone (EBADF).
        """
        os.close(os.dup(self._link.fileno()))  # fails now, rather than losing the connection
        data, fds, _, _ = socket.recv_fds(self._link, 1, 1)
        if not data:
            raise OSError(errno.EBADF, "the process that hands over connections is gone")
        if not fds:
            self._link.sendall(_REFUSED)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self._link.sendall(_RECEIVED)
        sock = socket.socket(fileno=fds[0])
        sock.set_inheritable(False)
        return sock, None


def hand_over(link: socket.socket, sock: socket.socket) -> None:
    """Send a connection, and return when the receiver has it; `sock` stays open here.

    Raises:
        OSError: The receiver is gone.
    """
    answer = _REFUSED
    while answer == _REFUSED:
        socket.send_fds(link, [b"c"], [sock.fileno()])
        answer = link.recv(1)
    if answer != _RECEIVED:
        raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))
