"""Mutual authentication of a host and process 1 of a sandbox, where others can connect too.

In a pod the connection is a network connection; in a container with its own kernel it is a socket
inside the container.

Both sides prove with an HMAC that they know the instance's key. The HMAC covers a nonce of each
side, so an eavesdropper learns nothing that can be replayed, and a process that got the address of
a former pod cannot pass for it. The key arrives with the boot order, on a connection that is opened
with a secret; the pod's specification contains only the digest of that secret.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
from typing import Any, Final

NONCE_BYTES: Final = 16
MAC_BYTES: Final = 32
MAX_PURPOSE_BYTES: Final = 4096
_HOST: Final = b"host"
_POD: Final = b"pod"


def secret_digest(secret: bytes) -> str:
    """Return the digest of the secret that opens a pod's first connection."""
    return hashlib.sha256(secret).hexdigest()


def host_mac(key: bytes, pod_nonce: bytes, host_nonce: bytes, purpose: bytes) -> bytes:
    """Return the code that proves to a pod that the host knows the key and asks for `purpose`."""
    return hmac.digest(key, _HOST + pod_nonce + host_nonce + purpose, hashlib.sha256)


def pod_mac(key: bytes, pod_nonce: bytes, host_nonce: bytes) -> bytes:
    """Return the code that proves to a host that it is connected to its own pod."""
    return hmac.digest(key, _POD + pod_nonce + host_nonce, hashlib.sha256)


def accept_host(sock: socket.socket, key: bytes) -> dict[str, Any] | None:
    """Authenticate the host on a new connection, and this side to the host.

    Args:
        sock: Connected; its timeout bounds each step.
        key: The key of the instance.

    Returns:
        The purpose of the connection; None if the peer does not know the key.

    Raises:
        OSError: The peer is gone or too slow.
        ValueError: The peer knows the key, but its purpose is not JSON.
    """
    nonce = os.urandom(NONCE_BYTES)
    sock.sendall(nonce)
    head = _exactly(sock, NONCE_BYTES + MAC_BYTES + 2)
    theirs, mac = head[:NONCE_BYTES], head[NONCE_BYTES:-2]
    size = int.from_bytes(head[-2:], "big")
    if size > MAX_PURPOSE_BYTES:
        return None
    purpose = _exactly(sock, size)
    if not hmac.compare_digest(mac, host_mac(key, nonce, theirs, purpose)):
        return None
    sock.sendall(pod_mac(key, nonce, theirs))
    return dict(json.loads(purpose))


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise OSError("the peer closed")
        data += piece
    return bytes(data)
