"""Signed URLs and addresses, for clients that send no token.

A signed URL allows one upload or download, for some minutes; an address the data routes of one
instance. Both name the token with which they were requested. They allow no more than that token
does when they are used, and nothing once it is revoked.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict

from aenv_ray.clock import Clock
from aenv_ray.errors import Forbidden
from aenv_ray.hub.api import Hub
from aenv_ray.hub.records import TokenRecord, unknown_address

SIGNED_S: Final = 900.0
"""How long a signed URL is valid."""
_KEY_TTL_S: Final = 10 * 365 * 86_400.0
_KEY_NAME: Final = "gateway:signing-key"
_LABEL: Final = 40
"""Hex digits of the signature in an address: a label of a host name has at most 63."""


class UrlSignature(BaseModel):
    """The query of a signed URL."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    expires: int
    token: str
    """Id of the token that it was created with; no secret."""
    signature: str


class Signer:
    """Signs URLs and checks signatures, with a key that all replicas share."""

    def __init__(self, hub: Hub, clock: Clock) -> None:
        self._hub = hub
        self._clock = clock
        self._key: bytes | None = None

    async def sign(self, method: str, path: str, token_id: str) -> str:
        """Return a path and query that allow one method for `SIGNED_S`."""
        expires = int(self._clock.now() + SIGNED_S)
        signature = await self._signature(method, path, token_id, str(expires))
        return f"{path}?expires={expires}&token={quote(token_id, safe='')}&signature={signature}"

    async def check(self, method: str, path: str, given: UrlSignature) -> TokenRecord:
        """Check the signature of a request; return the token with which it was created.

        Raises:
            Forbidden: It is wrong, signs another request, or has expired, or the token is no longer
                valid.
        """
        expected = await self._signature(method, path, given.token, str(given.expires))
        is_ours = hmac.compare_digest(expected.encode(), given.signature.encode())
        if not is_ours or given.expires < self._clock.now():
            raise Forbidden(
                "the signature of the URL is wrong or has expired", hint="request a new signed URL"
            )
        record = await self._hub.token(given.token)
        if record is None:
            raise Forbidden(
                "the token with which the URL was created has expired or was revoked",
                hint="request a new signed URL with a valid token",
            )
        return record

    async def address(self, capability: str, token_id: str) -> str:
        """Return the address of an instance for the holder of a token: a lower-case host name."""
        signature = await self._signature("address", capability, token_id)
        return f"{capability}.{token_id}.{signature[:_LABEL]}"

    async def read_address(self, address: str) -> tuple[str, str]:
        """Return the capability in an address, and the id of the token that it was shown to.

        Raises:
            InstanceNotFound: We did not make it.
        """
        capability, _, rest = address.partition(".")
        token_id, _, given = rest.partition(".")
        expected = (await self._signature("address", capability, token_id))[:_LABEL]
        if not hmac.compare_digest(expected.encode(), given.encode()):
            raise unknown_address()
        return capability, token_id

    async def _signature(self, *parts: str) -> str:
        if self._key is None:
            fresh = secrets.token_hex(32)
            self._key = (await self._hub.remember(_KEY_NAME, fresh, _KEY_TTL_S)).encode()
        text = "\n".join(parts)
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()
