"""How a host and process 1 of a pod know each other, on a network that others are on too.

Every connection begins with a proof by both sides that they have the instance's key, bound to this
connection by a number of each side: who listens in learns nothing to use again, and who got the
address of a pod that is gone cannot pass for it. The key comes with the boot, over a connection
that was opened with a secret of which the pod has only the digest.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

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
