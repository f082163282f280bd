"""A program that joins its standard streams to the door of a container with a kernel of its own.

``python3 -I -S bridge.py NAME``: the daemon runs it in the container, and its streams are the
host's connection. It has no key and understands nothing of what passes. It runs as a file, without
the rest of the package, for all that it imports costs each sandbox memory and time.
"""

import contextlib
import ctypes
import os
import socket
import sys
import threading
import time

PATIENCE_S = 60.0
"""How long the door may take to be there."""
_RETRY_S = 0.01
_PIECE_BYTES = 65_536
_PR_SET_DUMPABLE = 4
_NO_DOOR_EXIT = 69  # EX_UNAVAILABLE


def address(name: str) -> str:
    """Return the address of a door: of no file, so that nothing in the container can remove it."""
    return f"\0{name}"


def main() -> None:
    """Pass on what comes, both ways, until one side closes."""
    # What passes here, rewards among it, is not for those who run as the same user.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    sock = _reach(address(sys.argv[1]))
    if sock is None:
        sys.stderr.write("the runtime does not listen\n")
        os._exit(_NO_DOOR_EXIT)
    threading.Thread(target=_pass_in, args=(sock,), daemon=True).start()
    with contextlib.suppress(OSError):
        while piece := sock.recv(_PIECE_BYTES):
            view = memoryview(piece)
            while view:
                view = view[os.write(1, view) :]
    os._exit(0)


def _pass_in(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := os.read(0, _PIECE_BYTES):
            sock.sendall(piece)
    os._exit(0)


def _reach(door: str) -> socket.socket | None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(door)
        except OSError:
            sock.close()
            time.sleep(_RETRY_S)
        else:
            return sock
    return None


if __name__ == "__main__":
    main()
