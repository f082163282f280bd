"""A program that connects its standard streams to the door of a container with its own kernel.

``python3 -I -S bridge.py NAME``: the Docker daemon runs it in the container, and its streams are
the host's connection. It has no key and does not interpret the bytes. It runs as a single file,
without the rest of the package, since every import costs each sandbox memory and time.
"""

import contextlib
import ctypes
import os
import socket
import sys
import threading
import time

CONNECT_S = 60.0
"""How long the door may take to appear."""
_RETRY_S = 0.01
_PIECE_BYTES = 65_536
_PR_SET_DUMPABLE = 4
_NO_DOOR_EXIT = 69  # EX_UNAVAILABLE


def address(name: str) -> str:
    """Return the abstract address of a door, which nothing in the container can remove."""
    return f"\0{name}"


def main() -> None:
    """Copy bytes both ways until one side closes."""
    # Other processes of this user must not read what passes here, such as rewards.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    sock = _connect(address(sys.argv[1]))
    if sock is None:
        sys.stderr.write("the runtime does not listen\n")
        os._exit(_NO_DOOR_EXIT)
    threading.Thread(target=_copy_input, args=(sock,), daemon=True).start()
    with contextlib.suppress(OSError):
        while piece := sock.recv(_PIECE_BYTES):
            view = memoryview(piece)
            while view:
                view = view[os.write(1, view) :]
    os._exit(0)


def _copy_input(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := os.read(0, _PIECE_BYTES):
            sock.sendall(piece)
    os._exit(0)


def _connect(door: str) -> socket.socket | None:
    end = time.monotonic() + CONNECT_S
    while time.monotonic() < end:
        sock = socket.socket(socket.AF_UNIX)
        # A runtime that accepts nothing must not keep this program waiting for ever.
        sock.setblocking(False)
        try:
            sock.connect(door)
        except OSError:
            sock.close()
            time.sleep(_RETRY_S)
        else:
            sock.setblocking(True)
            return sock
    return None


if __name__ == "__main__":
    main()
