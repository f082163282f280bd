"""Sessions of a service: which sandbox holds a session's state, and who learns that it is gone.

The first call of a session binds it to the sandbox of the replica that received the call, and the
hub records the binding. Any replica may receive later calls; it sends them to that sandbox. Once
the sandbox is gone, one call of the session fails with SessionLost; the next call starts anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from aenv_ray.background_tasks import start_shared
from aenv_ray.bounded_cache import BoundedCache
from aenv_ray.errors import (
    AenvError,
    CallOutcomeUnknown,
    CapacityExceeded,
    ConfigError,
    SessionLost,
)
from aenv_ray.hub.api import Hub
from aenv_ray.hub.records import KeyGroup

logger = logging.getLogger(__name__)

SESSION_KEPT_S: Final = 24 * 3600.0
"""How long a session is bound, from its first call."""
CALL_KEPT_S: Final = 900.0
"""How long after its end, or else its timeout, a call may be repeated; sandboxes hold outcomes for
less time."""
_ENDED_S: Final = 1.0
"""Interval at which the hub is told of calls that have ended."""
_MAX_KNOWN: Final = 10_000
_MAX_KEY: Final = 200
MAX_SESSIONS: Final = 100_000
MAX_CALLS: Final = 500_000
"""How many sessions, and calls with ids of clients, the hub holds of all services of an owner: its
memory is that of all owners. A session is one key, however often it starts anew. This many calls
in `CALL_KEPT_S` are 550 per second."""
_FULL_RETRY_S: Final = 60.0
_LONGEST_KEPT_BYTES: Final = 63
"""The hub holds a digest of a longer id."""

IsAlive = Callable[[str], Awaitable[bool]]


class Sessions:
    """The sessions and call ids of one service, as one replica knows them.

    Args:
        hub: Records the bindings.
        owner: The owner of the service.
        scope: Unique id of the service.
        is_alive: Whether the sandbox of an instance id answers; may raise FabricUnavailable.
    """

    def __init__(self, hub: Hub, owner: str, scope: str, is_alive: IsAlive) -> None:
        self._hub = hub
        self._scope = scope
        self._is_alive = is_alive
        self._group = KeyGroup(name=f"service-sessions:{owner}", most=MAX_SESSIONS)
        self._lookups = _Lookups(hub, KeyGroup(name=f"service-calls:{owner}", most=MAX_CALLS))
        self._known: BoundedCache[str, _Binding] = BoundedCache(_MAX_KNOWN)
        """By session."""

    async def holder(self, session: str, own: str) -> str:
        """Return the instance that holds a session's state; a new session gets `own`.

        Raises:
            SessionLost: The instance is gone. One caller gets this error.
            CapacityExceeded: The owner's services have too many sessions.
            ConfigError: The session id is invalid.
        """
        _check(session)
        known = self._known.get(session)
        if known is not None:
            return known.holder
        found = await self._hub.remember(
            self._key(session), _Binding(own).to_text(), SESSION_KEPT_S, self._group
        )
        while found:
            binding = _Binding.from_text(found)
            if not binding.holder:
                found = await self._replace(session, binding, _Binding(own, binding.told))
            elif binding.holder == own or await self._is_alive(binding.holder):
                self._known.put(session, binding)
                return binding.holder
            else:
                found = await self._note_lost(session, binding)
        raise _too_many(f"{MAX_SESSIONS} sessions in {SESSION_KEPT_S / 3600:g} hours")

    async def note_gone(self, session: str, holder: str) -> SessionLost | None:
        """Forget the binding of a session, because the instance is gone.

        Returns:
            The error for the caller; None if another caller got it, and the call can start anew.
        """
        known = self._known.pop(session)
        if known is None or known.holder != holder:
            return None
        try:
            await self._note_lost(session, known)
        except SessionLost as lost:
            return lost
        return None

    async def holder_of_call(self, call_id: str, own: str, timeout_s: float) -> str:
        """Return the instance in which a call began; a new call gets `own`.

        The hub must record the id before the call begins: only then can a later replica tell a
        repeated call from a new one after the instance is gone (invariant 1).

        Args:
            call_id: The id that the client chose.
            own: The instance for a new call.
            timeout_s: How long the call may run: its id is known until `CALL_KEPT_S` after that,
                unless `note_ended` says that it has ended.

        Raises:
            CallOutcomeUnknown: The instance is gone.
            CapacityExceeded: The hub holds too many calls of the owner's services.
            ConfigError: The call id is invalid.
        """
        _check(call_id)
        key = self._key_of_call(call_id)
        found = await self._lookups.remember(key, own, timeout_s + CALL_KEPT_S)
        if not found:
            raise _too_many(f"{MAX_CALLS} calls with ids")
        if found != own and not await self._is_alive(found):
            raise CallOutcomeUnknown(
                f"call {call_id} began in sandbox {found}, which is gone",
                instance_id=found,
                hint="it is unknown whether the call ran; if it may run twice, use a new call id",
            )
        return found

    def note_ended(self, call_id: str) -> None:
        """Have a call's id forgotten after `CALL_KEPT_S`: its caller has the outcome."""
        self._lookups.shorten(self._key_of_call(call_id))

    async def _note_lost(self, session: str, binding: _Binding) -> str:
        """Have a session start anew, because its instance is gone; return the stored binding.

        Raises:
            SessionLost: This is the caller that gets the error.
        """
        told = secrets.token_hex(8)
        found = await self._replace(session, binding, _Binding("", told))
        # The mark tells it also if the hub's first answer was lost, and another caller has bound
        # the session since. Nothing is stored if the session has expired and there are too many.
        if not found or _Binding.from_text(found).told == told:
            raise _lost(session, binding.holder)
        return found

    async def _replace(self, session: str, old: _Binding, new: _Binding) -> str:
        """Replace the binding of a session if it still is `old`; return the stored one."""
        return await self._hub.replace_remembered(
            self._key(session), old.to_text(), new.to_text(), SESSION_KEPT_S, self._group
        )

    def _key_of_call(self, call_id: str) -> str:
        return f"service-call:{self._scope}:{_short(call_id)}"

    def _key(self, session: str) -> str:
        # ":0" since earlier versions of aenv-ray number the bindings of a session.
        return f"service-session:{self._scope}:0:{_short(session)}"


@dataclass(frozen=True)
class _Binding:
    """What the hub stores of a session: ``<holder>``, or ``<holder> <told>`` once one was lost.

    Attributes:
        holder: The instance that holds the session's state; "" if it is gone.
        told: Mark of the last caller who got SessionLost.
    """

    holder: str
    told: str = ""

    def to_text(self) -> str:
        # Earlier versions of aenv-ray store the holder alone, and read it. To them, other texts
        # are instances that are gone.
        return f"{self.holder} {self.told}" if self.told else self.holder

    @classmethod
    def from_text(cls, text: str) -> _Binding:
        holder, _, told = text.partition(" ")
        return cls(holder, told)


class _Lookups:
    """Combines the lookups of concurrent calls: one request to the hub is in flight at a time.

    Args:
        hub: Records which instance a call began in.
        group: Limits how many are recorded.
    """

    def __init__(self, hub: Hub, group: KeyGroup) -> None:
        self._hub = hub
        self._group = group
        self._waiting: dict[str, tuple[str, asyncio.Future[str]]] = {}
        self._kept_s = 0.0
        """How long to record those that wait: as long as the longest of them needs."""
        self._sender: asyncio.Task[None] | None = None
        self._ended: set[str] = set()
        self._shortener: asyncio.Task[None] | None = None

    async def remember(self, key: str, value: str, kept_s: float) -> str:
        """See `Hub.remember`; it may be recorded for longer."""
        self._kept_s = max(self._kept_s, kept_s)
        _, stored = self._waiting.setdefault(
            key, (value, asyncio.get_running_loop().create_future())
        )
        if self._sender is None:
            self._sender = start_shared(self._send())
        return await asyncio.shield(stored)

    def shorten(self, key: str) -> None:
        """Have a key forgotten after `CALL_KEPT_S`, if it is not forgotten sooner."""
        self._ended.add(key)
        if self._shortener is None:
            self._shortener = start_shared(self._shorten())

    async def _shorten(self) -> None:
        try:
            while self._ended:
                await asyncio.sleep(_ENDED_S)
                ended, self._ended = self._ended, set()
                try:
                    await self._hub.shorten(tuple(ended), CALL_KEPT_S, self._group)
                except AenvError as exc:
                    logger.info("%d ids of calls are kept longer: %s", len(ended), exc.message)
        finally:
            self._shortener = None

    async def _send(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, {}
                kept_s, self._kept_s = self._kept_s, 0.0
                try:
                    values = {key: value for key, (value, _) in batch.items()}
                    stored = await self._hub.remember_all(values, kept_s, self._group)
                except Exception as exc:  # noqa: BLE001  # every caller of the batch waits
                    for _, future in batch.values():
                        future.set_exception(exc)
                        future.exception()  # mark it as retrieved: its call may be cancelled
                else:
                    for key, (_, future) in batch.items():
                        future.set_result(stored[key])
        finally:
            self._sender = None


def _lost(session: str, holder: str) -> SessionLost:
    return SessionLost(
        f"sandbox {holder}, which held the state of session {session!r}, is gone",
        instance_id=holder,
        hint="the next call of this session starts anew in another sandbox",
    )


def _too_many(what: str) -> CapacityExceeded:
    return CapacityExceeded(
        f"the services of this owner have the largest number of {what}",
        retry_after_s=_FULL_RETRY_S,
        hint="use a session again instead of a new one, and send call ids only with calls that may "
        "be repeated",
    )


def _short(key: str) -> str:
    """Return an id of limited size, which stands for one that a client chose."""
    data = key.encode()
    return key if len(data) <= _LONGEST_KEPT_BYTES else hashlib.sha256(data).hexdigest()


def _check(key: str) -> None:
    if len(key) > _MAX_KEY or not key.isprintable():
        raise ConfigError(
            f"invalid session or call id {key[:40]!r}: expected up to {_MAX_KEY} printable "
            "characters",
            hint="choose a shorter id, such as a UUID",
        )
