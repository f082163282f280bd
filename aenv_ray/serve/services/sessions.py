"""Which sandbox keeps the state of a session, and who is told when it is gone.

The first call of a session binds it to the sandbox of the replica that got it; the hub remembers
which. Replicas are added and go, and other replicas may get later calls: they pass them on to that
sandbox. Once it is gone the session's client is told so, one time, and its next call begins anew.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

from aenv_ray.errors import CallOutcomeUnknown, ConfigError, SessionLost
from aenv_ray.hub.api import Hub

SESSION_KEPT_S: Final = 24 * 3600.0
"""A session is bound for so long after its first call."""
CALL_KEPT_S: Final = 900.0
"""A named call may be repeated for so long, as a sandbox keeps outcomes no longer."""
_MOST_KNOWN: Final = 10_000
_MAX_KEY: Final = 200

IsAlive = Callable[[str], Awaitable[bool]]


class Sessions:
    """The sessions and named calls of one service, as one replica knows them.

    Args:
        hub: Remembers.
        scope: Tells services from each other.
        is_alive: Whether the sandbox of an instance id still answers; may raise FabricUnavailable.
    """

    def __init__(self, hub: Hub, scope: str, is_alive: IsAlive) -> None:
        self._hub = hub
        self._scope = scope
        self._is_alive = is_alive
        self._known: OrderedDict[str, tuple[int, str]] = OrderedDict()

    async def holder(self, session: str, own: str) -> str:
        """Return the instance that has a session's state; a new session's is `own`.

        Raises:
            SessionLost: It is gone; told to one caller.
            ConfigError: The session's name is too long.
        """
        _check(session)
        turn, holder = self._known.get(session, (0, ""))
        while not holder:
            found = await self._remembered(session, turn, own)
            if found == own or await self._is_alive(found):
                holder = found
                self._keep(session, turn, holder)
            elif await self._is_first_to_tell(session, turn):
                raise _lost(session, found)
            else:
                turn += 1
        return holder

    async def note_gone(self, session: str, holder: str) -> SessionLost | None:
        """Forget that an instance has a session's state, for it is gone.

        Returns:
            What to tell the caller; None: somebody was told already, and the call can be made
            anew.
        """
        known = self._known.pop(session, None)
        if known is None or known[1] != holder:
            return None
        return _lost(session, holder) if await self._is_first_to_tell(session, known[0]) else None

    async def holder_of_call(self, call_id: str, own: str) -> str:
        """Return the instance on which a named call without a session began; a new one's is `own`.

        Raises:
            CallOutcomeUnknown: That instance is gone.
            ConfigError: The call's id is too long.
        """
        _check(call_id)
        key = f"service-call:{self._scope}:{call_id}"
        found = await self._hub.remember(key, own, CALL_KEPT_S)
        if found != own and not await self._is_alive(found):
            raise CallOutcomeUnknown(
                f"call {call_id} began in a replica that is gone: whether it ran cannot be known",
                instance_id=found,
                hint="if it may run again, ask with another id",
            )
        return found

    async def _remembered(self, session: str, turn: int, own: str) -> str:
        return await self._hub.remember(self._key(session, turn), own, SESSION_KEPT_S)

    async def _is_first_to_tell(self, session: str, turn: int) -> bool:
        mark = secrets.token_hex(8)
        key = f"{self._key(session, turn)}:told"
        return await self._hub.remember(key, mark, SESSION_KEPT_S) == mark

    def _key(self, session: str, turn: int) -> str:
        return f"service-session:{self._scope}:{turn}:{session}"

    def _keep(self, session: str, turn: int, holder: str) -> None:
        self._known[session] = (turn, holder)
        self._known.move_to_end(session)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)


def _lost(session: str, holder: str) -> SessionLost:
    return SessionLost(
        f"the replica that kept session {session!r} is gone, and its state with it",
        instance_id=holder,
        hint="the next call with this session begins anew, in another replica",
    )


def _check(key: str) -> None:
    if len(key) > _MAX_KEY or not key.isprintable():
        raise ConfigError(
            f"session or call id {key[:40]!r}… is not 1-{_MAX_KEY} printable characters"
        )
