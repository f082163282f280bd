"""Introduces callers on this node to the doors of their instances.

1. Through Ray, a caller asks for an introduction and receives a key: a secret for one instance and
   one role, which works once.
2. The caller presents the key at this host's Unix socket.
3. The host connects to the instance's door, sets the role of that connection, and passes its
   descriptor to the caller.

Thus only hosts connect to sandboxes, no sandbox ever sees a key, and a caller can reach only the
instance that it was introduced to.

The caller's connection to the host stays open: over it, the caller reports its calls, which count
for the idle timeout. If the connection breaks, the caller makes its calls through the host again.
The caller may have died, and its clients may ask another process for the outcomes of their calls:
the instance is not idle before its runtime has no call under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from aenv_ray import logs
from aenv_ray.actors.calls.call_batching import instance_of
from aenv_ray.actors.calls.introduction import (
    ACCEPTED,
    LINE_BYTES,
    UNREACHABLE,
    Introduction,
    activity_of,
    claim_of,
    line_of,
)
from aenv_ray.actors.host.calls import HostCalls
from aenv_ray.actors.host.instance import InstanceLife
from aenv_ray.background_tasks import Tasks, end_task
from aenv_ray.bounded_cache import BoundedCache
from aenv_ray.clock import Clock
from aenv_ray.errors import AenvError, CallOutcomeUnknown, CapacityExceeded, ConfigError
from aenv_ray.ids import InstanceId
from aenv_ray.runtime.door.dispatch import PENDING_METHOD
from aenv_ray.runtime.door.roles import DoorRole

logger = logging.getLogger(__name__)

KEY_S: Final = 60.0
"""How long a key may be presented."""
MAX_KEYS: Final = 20_000
"""Maximum number of keys that have not been presented yet; beyond it, the oldest are dropped."""
MAX_CALLERS: Final = 16
"""Maximum number of introduced callers of one instance: each needs threads in the sandbox."""
_CLAIM_S: Final = 10.0
_ASK_S: Final = 2.0
"""Pause before a runtime is asked which calls a caller left behind; it may still read some."""
_ANSWER_S: Final = 10.0
_BACKLOG: Final = 1024
_PAUSE_S: Final = 0.05


class _Permit(NamedTuple):
    """What a key opens."""

    instance_id: InstanceId
    role: DoorRole


class Introductions:
    """The keys of one host, and the callers that presented one.

    Args:
        path: Path of the Unix socket, in a private directory; the socket is created at first use.
        calls: Calls of the host.
        clock: Clock for the age of keys.
    """

    def __init__(self, path: Path, calls: HostCalls, clock: Clock) -> None:
        self._path = path
        self._calls = calls
        self._clock = clock
        self._permits: BoundedCache[str, _Permit] = BoundedCache(MAX_KEYS, ttl_s=KEY_S, clock=clock)
        self._listener: socket.socket | None = None
        self._acceptor: asyncio.Task[None] | None = None
        self._tasks = Tasks()
        self._callers: set[_Caller] = set()
        self._counts: Counter[InstanceId] = Counter()
        self._followed: dict[InstanceId, bool] = {}
        """Instances that are asked for calls which callers left behind, and whether another caller
        has left since the latest question was put off."""

    async def introduce(self, instance_id: InstanceId, role: DoorRole) -> Introduction:
        """Return an introduction to an instance; does not count as activity.

        Raises:
            CapacityExceeded: It has `MAX_CALLERS` introduced callers.
            AenvError: The instance does not exist or has ended.
        """
        life, _ = await self._calls.enter(instance_id)
        if self._counts.get(life.record.id, 0) >= MAX_CALLERS:
            raise CapacityExceeded(
                f"{instance_id} has {MAX_CALLERS} direct callers, the most that are allowed",
                hint="other callers reach it through its host",
            )
        self._listen()
        key = secrets.token_hex(32)
        self._permits.put(key, _Permit(instance_id, role))
        return Introduction(str(self._path), key, life.record.spec.idle_timeout_s)

    def cancel(self, names: Sequence[str]) -> None:
        """Have the callers cancel calls; see `call_name` for the names."""
        by_instance: dict[str | None, list[str]] = {}
        for name in names:
            by_instance.setdefault(instance_of(name), []).append(name)
        by_instance.pop("", None)
        for caller in self._callers if by_instance else ():
            for instance_id in caller.instance_ids:
                for name in by_instance.get(instance_id, ()):
                    caller.send(line_of({"cancel": name}))

    async def close(self) -> None:
        """Stop listening and disconnect from all callers, which continue through the host."""
        if self._acceptor is not None:
            await end_task(self._acceptor)
        await self._tasks.aclose()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)

    # --- connections ----------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._listener is not None:
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)  # left by an earlier host with this id
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(self._path))
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        listener.setblocking(False)
        self._listener = listener
        self._acceptor = asyncio.create_task(self._accept(listener))

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as exc:  # no descriptor is free now
                logger.warning("callers cannot be introduced now: %s", exc)
                await asyncio.sleep(_PAUSE_S)
                continue
            self._tasks.spawn(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                async with asyncio.timeout(_CLAIM_S):
                    life = await self._admit(sock)
            except (OSError, ValueError, AenvError) as exc:
                logger.info("a caller was not introduced: %s", exc)
                if isinstance(exc, ConfigError):
                    with contextlib.suppress(OSError):
                        sock.send(UNREACHABLE)
                return
            caller = _Caller(sock, life, self._clock)
            self._callers.add(caller)
            self._counts[life.record.id] += 1
            try:
                await caller.follow()
            finally:
                self._callers.discard(caller)
                self._counts[life.record.id] -= 1
                if not self._counts[life.record.id]:
                    del self._counts[life.record.id]
        if caller.is_busy and life.record.spec.idle_timeout_s is not None:
            if life.record.id in self._followed:
                self._followed[life.record.id] = True
            else:
                await self._outlast_calls(life.record.id)
        caller.end()

    async def _outlast_calls(self, instance_id: InstanceId) -> None:
        """Return once an instance has ended, or its runtime has no call under way.

        One task asks for all callers that leave meanwhile: a runtime can break their connections as
        often as they return. A runtime that never answers keeps its instance until the TTL, as one
        that always answers with a call could.
        """
        try:
            while True:
                self._followed[instance_id] = False
                await asyncio.sleep(_ASK_S)
                try:
                    _, sandbox = await self._calls.enter(instance_id)
                    answer = await sandbox.request(PENDING_METHOD, {}, deadline_s=_ANSWER_S)
                except CallOutcomeUnknown:
                    continue  # a tool may keep its interpreter from answering
                except (AenvError, ValueError):  # it has ended, or has an older runtime
                    return
                is_pending = isinstance(answer, dict) and bool(answer.get("calls"))
                if not is_pending and not self._followed[instance_id]:
                    return
        finally:
            del self._followed[instance_id]

    async def _admit(self, sock: socket.socket) -> InstanceLife:
        """Pass a connection to the door to a caller with a key.

        Raises:
            PermissionError: The key does not open the instance that the caller names.
            OSError, ValueError, AenvError: The caller sent no valid claim, or the sandbox accepts
                no connection.
        """
        loop = asyncio.get_running_loop()
        claim = claim_of(await loop.sock_recv(sock, LINE_BYTES))
        permit = self._permits.get(claim.key)
        self._permits.pop(claim.key)
        if permit is None or permit.instance_id != claim.instance_id:
            raise PermissionError(f"its key is not valid for {claim.instance_id}")
        life, sandbox = await self._calls.enter(permit.instance_id)
        with await sandbox.open_door(permit.role) as door:
            socket.send_fds(sock, [ACCEPTED], [door.fileno()])
        return life


class _Caller:
    """An introduced caller.

    Args:
        sock: Its connection to this host.
        life: The instance that it calls.
        clock: Clock for idle times.

    Attributes:
        is_busy: Whether calls are running, or ran a moment ago, as far as it has reported.
    """

    def __init__(self, sock: socket.socket, life: InstanceLife, clock: Clock) -> None:
        self._sock = sock
        self._life = life
        self._clock = clock
        self.is_busy = False

    @property
    def instance_ids(self) -> set[InstanceId | None]:
        """The instance's own id, and the one that its creator asked for."""
        return {self._life.record.id, self._life.record.requested_id}

    def send(self, line: bytes) -> None:
        """Send a line; a caller that does not read is disconnected."""
        try:
            sent = self._sock.send(line)
        except OSError:
            sent = 0
        if sent < len(line):
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    async def follow(self) -> None:
        """Count its calls until it disconnects; what it called then counts as busy until `end`."""
        loop = asyncio.get_running_loop()
        buffer = b""
        try:
            while data := await loop.sock_recv(self._sock, LINE_BYTES):
                *lines, buffer = (buffer + data).split(b"\n")
                if len(buffer) > LINE_BYTES:
                    return
                for line in lines:
                    self._on_report(line)
        except (OSError, ValueError) as exc:
            record = self._life.record
            extra = logs.of_instance(record.id, record.spec.owner)
            logger.info("a caller of %s was disconnected: %s", record.id, exc, extra=extra)

    def end(self) -> None:
        """Note that it makes no calls any more."""
        self._count(0, is_busy=False, quiet_s=0.0)

    def _on_report(self, line: bytes) -> None:
        report = activity_of(line)
        self._count(report.calls, is_busy=report.is_busy, quiet_s=report.quiet_s)
        self.send(line_of({"counted": report.number}))

    def _count(self, calls: int, *, is_busy: bool, quiet_s: float) -> None:
        if calls or is_busy != self.is_busy:
            change = int(is_busy) - int(self.is_busy)
            self.is_busy = is_busy
            self._life.direct_calls(calls, change, self._clock.now() - quiet_s)
