"""The program of a pod's unpacker: a container that writes the runtime and the project.

Its source is in the pod's command. The other containers have these files on read-only mounts, so
nothing that runs in them can change the code that they load, or data that a reward reads. Each of
them passes on what the host sent it (`aenv_ray.engines.kubernetes.bootstrap`). It runs on any
Python 3, needs only the standard library, and ends before an agent acts.
"""

import io
import json
import os
import shutil
import signal
import socket
import sys
import tarfile


class Content(io.RawIOBase):
    """The next `size` bytes of a stream, as a file."""

    def __init__(self, stream: io.BufferedRWPair, size: int) -> None:
        self._stream = stream
        self._left = size

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes; fewer than `size` only at the end."""
        data = self._stream.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data


def receive(stream: io.BufferedRWPair) -> "dict[str, str]":
    """Unpack what a container passes on, and return its order."""
    order = dict(json.loads(stream.read(int.from_bytes(stream.read(8), "big")).decode()))
    content = Content(stream, int.from_bytes(stream.read(8), "big"))
    try:
        with tarfile.open(fileobj=content, mode="r|", ignore_zeros=True) as archive:
            if hasattr(tarfile, "fully_trusted_filter"):
                archive.extraction_filter = tarfile.fully_trusted_filter
            archive.extractall(order["target"])
    finally:
        while content.read(1 << 20):
            pass  # the container waits for an answer only when all is sent
    return order


def remove(directory: str) -> None:
    """Remove what is in a directory."""
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)


def main(port: int, count: int) -> None:
    """Unpack for `count` containers; then remove the sources that they ask to hide."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    address = os.environ["AENV_POD_IP"]
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(64)
    listener.settimeout(1200)  # hosts give up waiting for the images of all containers before
    hiding = []
    while count:
        sock, peer = listener.accept()
        if peer[0] != sock.getsockname()[0]:
            sock.close()  # not from this pod
            continue
        stream = sock.makefile("rwb")
        try:
            order = receive(stream)
        except Exception as exc:
            answer(stream, {"failed": type(exc).__name__ + ": " + str(exc)})
            raise
        answer(stream, {"ok": True})
        if order["hidden"]:
            hiding.append((stream, order["hidden"]))
        count -= 1
    for stream, directory in hiding:
        if stream.readline():  # the project is loaded
            remove(directory)
            answer(stream, {"ok": True})


def answer(stream: io.BufferedRWPair, message: "dict[str, object]") -> None:
    """Send a JSON line."""
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
