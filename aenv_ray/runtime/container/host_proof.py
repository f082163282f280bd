"""How a host and process 1 of a sandbox know each other where others can connect too.

In a pod that is a network; in a container with a kernel of its own, a socket inside of it.

Every connection begins with a proof by both sides that they have the instance's key, bound to this
connection by a number of each side: who listens in learns nothing to use again, and who got the
address of a pod that is gone cannot pass for it. The key comes with the boot, over a connection
that was opened with a secret of which the pod has only the digest.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
from typing import Any, Final

NONCE_BYTES: Final = 16
PROOF_BYTES: Final = 32
SECRET_BYTES: Final = 32
"""Of what opens the first connection."""
MAX_PURPOSE_BYTES: Final = 4096
_HOST: Final = b"host"
_POD: Final = b"pod"


def digest(secret: bytes) -> str:
    """Return what a pod is given of the secret that opens its first connection."""
    return hashlib.sha256(secret).hexdigest()


def host_proof(key: bytes, pod_nonce: bytes, host_nonce: bytes, purpose: bytes) -> bytes:
    """Return what shows a pod that a host has its key, and wants `purpose`."""
    return hmac.digest(key, _HOST + pod_nonce + host_nonce + purpose, hashlib.sha256)


def pod_proof(key: bytes, pod_nonce: bytes, host_nonce: bytes) -> bytes:
    """Return what shows a host that it speaks with its own pod."""
    return hmac.digest(key, _POD + pod_nonce + host_nonce, hashlib.sha256)


def are_equal(one: bytes, other: bytes) -> bool:
    """Whether two proofs are the same, in a time that does not tell where they differ."""
    return hmac.compare_digest(one, other)


def greet(sock: socket.socket, key: bytes) -> dict[str, Any] | None:
    """Prove that this side has the key to one who proves to have it.

    Args:
        sock: Connected; its timeout bounds each step.
        key: Of the instance.

    Returns:
        What the connection is for; None when the peer proved nothing.

    Raises:
        OSError: The peer is gone, or too slow.
        ValueError: It has the key and speaks of something else.
    """
    nonce = os.urandom(NONCE_BYTES)
    sock.sendall(nonce)
    head = _exactly(sock, NONCE_BYTES + PROOF_BYTES + 2)
    theirs, proof = head[:NONCE_BYTES], head[NONCE_BYTES:-2]
    size = int.from_bytes(head[-2:], "big")
    if size > MAX_PURPOSE_BYTES:
        return None
    purpose = _exactly(sock, size)
    if not are_equal(proof, host_proof(key, nonce, theirs, purpose)):
        return None
    sock.sendall(pod_proof(key, nonce, theirs))
    return dict(json.loads(purpose))


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise OSError("the peer closed")
        data += piece
    return bytes(data)
