"""The host's side of a proof: that it and process 1 of a sandbox have the same key."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from aenv_ray.runtime.container import host_proof as pod_door

_KEY_BYTES: Final = 32


class HostKey:
    """What only the hosts of one node have, and from which the secrets of its instances are made.

    A file that their user alone can read, so that a host that comes back finds it there.

    Args:
        path: Where it is, or is to be.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key = b""

    def load(self) -> None:
        """Read it, making it if need be; whoever is first decides."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}.{id(self)}")
        with contextlib.suppress(FileExistsError):
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(os.urandom(_KEY_BYTES))
            os.link(fresh, self._path)
        fresh.unlink(missing_ok=True)
        self._key = self._path.read_bytes()

    def secret(self, name: str, nonce: str, purpose: str) -> bytes:
        """Return a secret of one sandbox.

        Args:
            name: The sandbox's.
            nonce: What no other sandbox of that name has.
            purpose: Tells its secrets apart.
        """
        words = f"{purpose}\0{name}\0{nonce}".encode()
        return hmac.digest(self._key, words, hashlib.sha256)


async def prove(sock: socket.socket, key: bytes, purpose: Mapping[str, Any]) -> None:
    """Prove to have a key to the process 1 that has it too, and say what the connection is for.

    Args:
        sock: Connected, non-blocking; it stays open, whatever comes of it.
        key: Of the instance.
        purpose: For process 1.

    Raises:
        OSError: The peer closed, or is somebody who has not got the key.
    """
    loop = asyncio.get_running_loop()
    theirs = await _exactly(sock, pod_door.NONCE_BYTES)
    ours = os.urandom(pod_door.NONCE_BYTES)
    words = json.dumps(dict(purpose)).encode()
    proof = pod_door.host_proof(key, theirs, ours, words)
    await loop.sock_sendall(sock, ours + proof + len(words).to_bytes(2, "big") + words)
    answer = await _exactly(sock, pod_door.PROOF_BYTES)
    if not pod_door.are_equal(answer, pod_door.pod_proof(key, theirs, ours)):
        raise ConnectionRefusedError("who answers there is not the instance's sandbox")


async def _exactly(sock: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < size:
        piece = await loop.sock_recv(sock, size - len(data))
        if not piece:
            raise ConnectionResetError("the sandbox closed the connection")
        data += piece
    return bytes(data)
