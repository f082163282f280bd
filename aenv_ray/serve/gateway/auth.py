"""Who sends a request: bearer tokens, checked by the hub, cached for seconds, limited in rate."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from starlette.requests import HTTPConnection

from aenv_ray.bounded_cache import BoundedCache
from aenv_ray.clock import Clock
from aenv_ray.errors import AenvError, Forbidden, RateLimited, Unauthorized
from aenv_ray.hub.api import Hub
from aenv_ray.hub.records import Lease, Role, TokenRecord, unknown_instance

_MAX_TOKENS: Final = 10_000
"""Tokens remembered, unknown ones included."""
_MAX_CHARACTERS: Final = 512
"""A longer token is not one of ours."""
AGAIN_S: Final = 5.0
"""How long an answer that has begun waits for the hub."""


@dataclass(frozen=True)
class Principal:
    """The sender of a request, as its token says."""

    role: Role
    owner: str
    instance_id: str | None
    """For an agent: the one instance whose tools it may use."""
    token_id: str

    @property
    def is_admin(self) -> bool:
        """Whether it is an administrator."""
        return self.role is Role.ADMIN

    def check_not_agent(self) -> None:
        """Refuse an agent.

        Raises:
            Forbidden: It is one (invariant 8).
        """
        if self.role is Role.AGENT:
            raise Forbidden(
                "an agent token may only list and call the tools of its instance",
                hint="use a token with the role user, publisher or admin",
            )

    def check_role(self, least: Role) -> None:
        """Refuse senders whose role does not include `least`.

        Raises:
            Forbidden: It does not.
        """
        self.check_not_agent()
        if not self.role.includes(least):
            raise Forbidden(
                f"this request needs a token with role {least}, and this one has role {self.role}",
                hint=f"aenv token create --role {least}, with an administrator's token",
            )

    def check_owns(self, lease: Lease) -> None:
        """Refuse everybody but the owner of an instance and administrators.

        Raises:
            Forbidden: It is an agent.
            InstanceNotFound: It is another owner, who must not learn that the instance exists.
        """
        self.check_not_agent()
        if not self.is_admin and lease.owner != self.owner:
            raise unknown_instance(lease.id)

    def acting_owner(self, requested: str | None) -> str:
        """Return the owner of what this principal creates or lists.

        Args:
            requested: The owner named in the request; None or empty: the principal itself.

        Raises:
            Forbidden: An owner names another one.
        """
        if not requested or requested == self.owner:
            return self.owner
        if not self.is_admin:
            raise Forbidden(
                f"a token of {self.owner!r} cannot act for {requested!r}",
                hint="leave the owner out, or use that owner's token; labels are free",
            )
        return requested


_Find = Callable[[], Awaitable[TokenRecord | None]]
CheckAgain = Callable[[HTTPConnection], Awaitable[None]]
"""Raises Unauthorized once the token of a request is no longer valid."""


class HubAuthenticator:
    """Looks tokens up in the hub; concurrent requests with one token cause one lookup."""

    def __init__(self, hub: Hub, clock: Clock, cache_s: float) -> None:
        self._hub = hub
        self._clock = clock
        # By secret and by id; in a tuple, because None is an answer: the token is unknown.
        self._known: BoundedCache[str, tuple[Principal | None]] = BoundedCache(
            2 * _MAX_TOKENS, ttl_s=cache_s, clock=clock
        )
        self._lookups: dict[str, asyncio.Task[Principal | None]] = {}

    async def __call__(self, request: HTTPConnection) -> Principal:
        """Return the sender of a request, and record it in the request's scope.

        Raises:
            Unauthorized: The token is missing or invalid.
            FabricUnavailable: The hub does not answer.
        """
        secret = bearer_of(request.headers.get("authorization"))
        key = hashlib.sha256(secret.encode()).hexdigest()
        return await self._admitted(request, key, lambda: self._hub.check_token(secret))

    async def by_id(self, request: HTTPConnection, token_id: str) -> Principal:
        """Return the sender of a request with the address that a token was shown, and record it.

        Raises:
            Unauthorized, FabricUnavailable: As for a request with that token.
        """
        return await self._admitted(request, *self._by_id(token_id))

    async def check_again(self, request: HTTPConnection) -> None:
        """Check that the token of a request that was admitted is still valid.

        Does nothing if the hub does not answer, or cannot use its Redis: what was admitted does not
        depend on it, and a caller would repeat a call whose result is withheld. Requests
        with an address of an earlier version have no token.

        Raises:
            Unauthorized: It has expired or was revoked.
        """
        principal: Principal | None = request.scope.get("aenv.principal")
        if principal is None:
            return
        key, find = self._by_id(principal.token_id)
        known = self._known.get(key)  # first: a timeout costs more than the rest
        if known is None:
            try:
                async with asyncio.timeout(AGAIN_S):
                    known = (await self._look_up_once(key, find),)
            except (AenvError, TimeoutError):
                return
        if known[0] is None:
            raise invalid_token()

    def _by_id(self, token_id: str) -> tuple[str, _Find]:
        return _id_key(token_id), lambda: self._hub.token(token_id)

    async def _admitted(self, request: HTTPConnection, key: str, find: _Find) -> Principal:
        known = self._known.get(key)
        principal = await self._look_up_once(key, find) if known is None else known[0]
        if principal is None:
            raise invalid_token()
        request.scope["aenv.principal"] = principal
        return principal

    def forget(self) -> None:
        """Clear the cache, because a token was revoked."""
        self._known.clear()

    async def _look_up_once(self, key: str, find: _Find) -> Principal | None:
        task = self._lookups.get(key)
        if task is None:
            task = asyncio.create_task(self._look_up(key, find))
            self._lookups[key] = task
            task.add_done_callback(lambda _: self._lookups.pop(key, None))
        return await asyncio.shield(task)  # one cancelled request must not cancel the others

    async def _look_up(self, key: str, find: _Find) -> Principal | None:
        record = await find()
        if record is None:
            self._known.put(key, (None,))
            return None
        principal = principal_in(record)
        for known_by in {key, _id_key(record.id)}:
            self._known.put(known_by, (principal,), expires_at=record.expires_at)
        return principal


def _id_key(token_id: str) -> str:
    return f"id {token_id}"  # never a hash


def invalid_token() -> Unauthorized:
    """Return the error for a token that the hub does not know."""
    return Unauthorized(
        "the token is unknown, expired or revoked", hint="create one: aenv token create"
    )


def principal_in(record: TokenRecord) -> Principal:
    """Return the principal that a token names."""
    return Principal(record.role, record.owner, record.instance_id, record.id)


def principal_of(request: HTTPConnection) -> Principal:
    """Return the sender of a request that was authenticated before."""
    principal: Principal = request.scope["aenv.principal"]
    return principal


def bearer_of(header: str | None) -> str:
    """Return the token in an ``Authorization`` header.

    Raises:
        Unauthorized: The header is missing, or holds no bearer token.
    """
    scheme, _, token = (header or "").strip().partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token or len(token) > _MAX_CHARACTERS:
        raise Unauthorized(
            "the request carries no bearer token",
            hint="send the header `Authorization: Bearer TOKEN`",
        )
    return token


class RequestRate:
    """Limits the request rate of each token with a token bucket.

    Each replica has its own buckets: together, replicas allow at most their number times as much.
    """

    def __init__(self, per_s: float, burst: int, clock: Clock) -> None:
        self._per_s = per_s
        self._burst = float(burst)
        self._clock = clock
        self._buckets: BoundedCache[str, tuple[float, float]] = BoundedCache(_MAX_TOKENS)
        """Requests left in each bucket, and when that was."""

    def take(self, token_id: str) -> None:
        """Take one request from a token's bucket.

        Raises:
            RateLimited: The bucket is empty; the error says when to try again.
        """
        now = self._clock.now()
        left, at = self._buckets.get(token_id) or (self._burst, now)
        left = min(self._burst, left + max(0.0, now - at) * self._per_s)
        is_allowed = left >= 1
        self._buckets.put(token_id, (left - 1 if is_allowed else left, now))
        if not is_allowed:
            raise RateLimited(
                f"this token sends more than {self._per_s:g} requests per second",
                retry_after_s=(1 - left) / self._per_s,
                hint="wait as Retry-After says; watch an instance by GET /instances/{id}/events",
            )
