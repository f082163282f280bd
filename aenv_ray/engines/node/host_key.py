"""The key of a node's hosts, and how a host authenticates itself to process 1 of a sandbox."""

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

from aenv_ray.runtime.container import handshake

_KEY_BYTES: Final = 32


class HostKey:
    """A key that the hosts of a node share, and from which the secrets of instances are derived.

    It is a file that only their user can read, so that a restarted host derives the same secrets.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key = b""

    def load(self) -> None:
        """Read the key, or create it if it is missing; concurrent hosts agree on one."""
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
        """Derive a secret of one sandbox.

        Args:
            name: The name of the sandbox.
            nonce: Distinguishes it from other sandboxes of that name.
            purpose: Distinguishes the secrets of one sandbox.
        """
        message = f"{purpose}\0{name}\0{nonce}".encode()
        return hmac.digest(self._key, message, hashlib.sha256)


async def authenticate(sock: socket.socket, key: bytes, purpose: Mapping[str, Any]) -> None:
    """Authenticate both ends of a connection by the instance's key, and tell its purpose.

    The peer is process 1 of the sandbox: `aenv_ray.runtime.container.handshake`.

    Args:
        sock: Connected, non-blocking; it is left open in any case.
        key: The key of the instance.
        purpose: A JSON object for process 1.

    Raises:
        OSError: The peer closed the connection, or does not have the key.
    """
    loop = asyncio.get_running_loop()
    theirs = await _exactly(sock, handshake.NONCE_BYTES)
    ours = os.urandom(handshake.NONCE_BYTES)
    request = json.dumps(dict(purpose)).encode()
    mac = handshake.host_mac(key, theirs, ours, request)
    await loop.sock_sendall(sock, ours + mac + len(request).to_bytes(2, "big") + request)
    answer = await _exactly(sock, handshake.MAC_BYTES)
    if not hmac.compare_digest(answer, handshake.pod_mac(key, theirs, ours)):
        raise ConnectionRefusedError("the process at this address does not have the instance's key")


async def _exactly(sock: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < size:
        piece = await loop.sock_recv(sock, size - len(data))
        if not piece:
            raise ConnectionResetError("the sandbox closed the connection")
        data += piece
    return bytes(data)
