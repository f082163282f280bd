"""Who sends a request: bearer tokens, checked by the hub and remembered for seconds."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from typing import Final

from starlette.requests import HTTPConnection

from aenv_ray.clock import Clock
from aenv_ray.errors import Unauthorized
from aenv_ray.hub.api import Hub
from aenv_ray.serve.gateway.deps import Principal

_MOST_TOKENS: Final = 10_000
"""Answers remembered; guesses push out no more than their number."""
_MOST_CHARACTERS: Final = 512
"""A longer token is none of ours."""


class HubAuthenticator:
    """Asks the hub whose a token is; many requests with one token ask once.

    Args:
        hub: Which knows the tokens.
        clock: For the ends of tokens and of what is remembered.
        cache_s: How long an answer holds, "unknown" as well; so long a revoked token may go on.
    """

    def __init__(self, hub: Hub, clock: Clock, cache_s: float) -> None:
        self._hub = hub
        self._clock = clock
        self._cache_s = cache_s
        self._known: OrderedDict[str, tuple[float, Principal | None]] = OrderedDict()
        self._asking: dict[str, asyncio.Task[tuple[float, Principal | None]]] = {}

    async def __call__(self, request: HTTPConnection) -> Principal:
        """Return who sends a request; see `Authenticator`."""
        secret = bearer_of(request.headers.get("authorization"))
        key = hashlib.sha256(secret.encode()).hexdigest()
        found = self._known.get(key)
        if found is None or found[0] <= self._clock.now():
            found = await self._ask(key, secret)
        principal = found[1]
        if principal is None:
            raise Unauthorized(
                "the token is unknown, has ended or was revoked", hint="aenv token create makes one"
            )
        request.scope["aenv.principal"] = principal
        return principal

    def forget(self) -> None:
        """Ask the hub anew for every token: one was revoked."""
        self._known.clear()

    async def _ask(self, key: str, secret: str) -> tuple[float, Principal | None]:
        task = self._asking.get(key)
        if task is None:
            task = asyncio.create_task(self._look_up(key, secret))
            self._asking[key] = task
            task.add_done_callback(lambda _: self._asking.pop(key, None))
        return await asyncio.shield(task)  # who leaves does not keep the others from the answer

    async def _look_up(self, key: str, secret: str) -> tuple[float, Principal | None]:
        record = await self._hub.check_token(secret)
        until = self._clock.now() + self._cache_s
        principal = None
        if record is not None:
            until = min(until, record.expires_at or until)
            principal = Principal(record.role, record.owner, record.instance_id, record.id)
        self._known[key] = (until, principal)
        self._known.move_to_end(key)
        while len(self._known) > _MOST_TOKENS:
            self._known.popitem(last=False)
        return until, principal


def bearer_of(header: str | None) -> str:
    """Return the token in an ``Authorization`` header.

    Raises:
        Unauthorized: There is no header, or it holds no bearer token.
    """
    scheme, _, token = (header or "").strip().partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token or len(token) > _MOST_CHARACTERS:
        raise Unauthorized(
            "the request carries no bearer token",
            hint="send the header `Authorization: Bearer TOKEN`",
        )
    return token
