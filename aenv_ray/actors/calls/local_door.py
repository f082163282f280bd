"""Direct calls of a process to an instance on its own node.

Messages, call ids, deadlines, cancellation, progress and errors are those of calls through the
host. If the connection or the host breaks, each call continues through the host under its id, and
the runtime runs it once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aenv_ray.actors.calls.handle import EnvHandle, host_of
from aenv_ray.actors.calls.introduction import (
    ACCEPTED,
    LINE_BYTES,
    UNREACHABLE,
    ActivityReport,
    DoorClaim,
    Introduction,
    line_of,
)
from aenv_ray.actors.calls.wire import CALL_GRACE_S, CallMessage
from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.config import settings
from aenv_ray.engines.base import EndCause, OnProgress
from aenv_ray.engines.door import DoorSandbox
from aenv_ray.errors import AenvError, ConfigError, InstanceError
from aenv_ray.models import Isolation
from aenv_ray.runtime.door.roles import DoorRole

logger = logging.getLogger(__name__)

DIRECT_AFTER: Final = 4
"""A connection costs as much as a few calls, so an instance with fewer calls gets none."""
PAUSE_S: Final = 0.5
"""A caller without calls for this long reports a pause; a busy one reports once a second."""
RETRY_S: Final = 1.0
"""Between two attempts to be introduced."""
_OPEN_S: Final = 30.0
_CLOSE_ON_EXEC: Final = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_BROKEN: Final = EndCause("the direct connection is closed")


class NotDirect(Exception):  # tells the caller what to do; not an error
    """The call must be made through the host, with the same message."""


class LocalDoor:
    """The direct connection to one instance, if it is on this node. Use it on one event loop.

    Args:
        handle: Handle of the instance.
        role: What the connection may be used for.
        introduction: An introduction for this role, if the host has given one already.
        on_cancel: Called with the name of a call that another process cancels, see `call_name`.
        on_change: Called with this door after it has opened or closed.

    Attributes:
        is_remote: Whether all calls must be made through the host, as the instance is on another
            node, or as its engine has no doors on a node.
    """

    def __init__(
        self,
        handle: EnvHandle,
        role: DoorRole = DoorRole.OWNER,
        introduction: Introduction | None = None,
        on_cancel: Callable[[str], None] = lambda _: None,
        on_change: Callable[[LocalDoor], None] = lambda _: None,
    ) -> None:
        self._handle = handle
        self._role = role
        self._given = introduction
        self._on_cancel = on_cancel
        self._on_change = on_change
        self.loop = asyncio.get_running_loop()
        self._connection: DoorSandbox | None = None
        self._host: _CallReporter | None = None
        self.is_remote = not settings().local_door
        self._opening: asyncio.Task[None] | None = None
        self._retry_at = 0.0
        self._calls_by_host = 0
        self._closes_when_idle = False

    @property
    def is_open(self) -> bool:
        """Whether calls are made directly now."""
        return self._connection is not None

    async def open(self) -> bool:
        """Connect, unless connected; return whether calls are made directly now."""
        self._retry_at = 0.0
        self._begin_to_open()
        if self._opening is not None:
            await asyncio.shield(self._opening)
        return self.is_open

    def note_call_by_host(self) -> None:
        """Note a call through the host; after `DIRECT_AFTER` of them, begin to connect."""
        self._calls_by_host += 1
        if self._calls_by_host >= DIRECT_AFTER:
            self._begin_to_open()

    def _begin_to_open(self) -> None:
        if self._connection is None and self._opening is None and not self.is_remote:
            now = self.loop.time()
            if now >= self._retry_at:
                self._retry_at = now + RETRY_S
                self._opening = self.loop.create_task(self._open())

    async def request(self, call: CallMessage, on_progress: OnProgress | None = None) -> bytes:
        """Run a call and return its result as JSON text.

        Raises:
            NotDirect: Make the call through the host; it may be running in the sandbox.
            AenvError: See `Sandbox.request_json`.
        """
        connection, host = self._connection, self._host
        if connection is None or host is None or not host.begin():
            raise NotDirect
        try:
            return await connection.request_json(
                call.method,
                call.params,
                deadline_s=call.timeout_s + CALL_GRACE_S,
                on_progress=on_progress,
            )
        except InstanceError:
            if connection.end_cause is None:
                raise
            self._disconnect()
            raise NotDirect from None
        finally:
            host.end()
            if self._closes_when_idle:
                self.close_when_idle()

    async def report(self) -> None:
        """Report the calls to the host, which counts them; does nothing if that is not possible."""
        if self._host is not None:
            await self._host.report()

    def close(self) -> None:
        """Disconnect; calls that are running continue through the host. Idempotent."""
        self.is_remote = True
        if self._opening is not None:
            self._opening.cancel()
        self._disconnect()

    def close_when_idle(self) -> None:
        """Disconnect as soon as no call is running. Idempotent.

        A call that is running keeps the connection over which it reports progress and asks its
        caller: when the call is repeated through the host, only its outcome comes that way.
        """
        self._closes_when_idle = True
        if self._host is None or not self._host.pending:
            self.close()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        host, self._host = self._host, None
        if host is not None:
            host.close()
        if connection is not None:
            connection.end(_BROKEN)
            self._on_change(self)

    async def _open(self) -> None:
        try:
            async with asyncio.timeout(_OPEN_S):
                introduction = await self._introduction()
                if introduction is None:
                    self.is_remote = True
                else:
                    await self._connect(introduction)
        except ConfigError as exc:
            self.is_remote = True
            logger.info("%s is called through its host: %s", self._handle.instance_id, exc.message)
        except (AenvError, OSError) as exc:
            logger.info("%s is called through its host: %s", self._handle.instance_id, exc)
        finally:
            self._opening = None

    async def _introduction(self) -> Introduction | None:
        if self._given is not None:  # it is valid once
            given, self._given = self._given, None
            return given
        instance_id = self._handle.instance_id
        asked: Awaitable[Introduction | None] = host_of(self._handle).introduce.remote(
            instance_id, ray_api.session_scope(), self._role.value
        )
        return await ray_api.wait_async(asked, "an introduction", _OPEN_S, instance_id=instance_id)

    async def _connect(self, introduction: Introduction) -> None:
        instance_id = self._handle.instance_id
        host, door = await present(introduction, DoorClaim(instance_id, introduction.key))
        connection = DoorSandbox(instance_id, Isolation(kind="none"), "local", _no_cause)
        connection.connect(door)
        connection.on_end(lambda _: self._disconnect())
        self._connection = connection
        self._host = _CallReporter(
            host, introduction.idle_timeout_s, self._disconnect, self._on_cancel
        )
        self._on_change(self)


async def present(
    introduction: Introduction, claim: DoorClaim
) -> tuple[socket.socket, socket.socket]:
    """Present a key to a host; return the connections to the host and to the door.

    Raises:
        OSError: The host is gone, or refuses the key.
        ConfigError: Sandboxes of the instance's engine can only be reached through their host.
    """
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, introduction.path)
        await loop.sock_sendall(sock, line_of(claim))
        await _readable(sock)
        data, descriptors, _, _ = socket.recv_fds(sock, len(ACCEPTED), 1, _CLOSE_ON_EXEC)
        if data == UNREACHABLE:
            raise ConfigError(
                f"the door of {claim.instance_id} can be reached only through its host",
                hint="calls through the host work; its engine has no doors on the node",
            )
        if data != ACCEPTED or not descriptors:
            raise ConnectionRefusedError(f"its host refused the key for {claim.instance_id}")
        return sock, socket.socket(fileno=descriptors[0])
    except BaseException:
        sock.close()
        raise


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock.fileno())


async def _no_cause() -> EndCause:
    return _BROKEN


class _CallReporter:
    """Reports the calls of a local door to the host, which ends instances that are idle.

    Args:
        sock: The socket from `present`.
        idle_timeout_s: The instance's, if it has one.
        on_end: Called when the host disconnects, as it does when it dies.
        on_cancel: Called with the name of a call that another process cancels.

    Attributes:
        pending: How many calls are running.
    """

    def __init__(
        self,
        sock: socket.socket,
        idle_timeout_s: float | None,
        on_end: Callable[[], None],
        on_cancel: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock: socket.socket | None = sock
        self._longest_pause_s = float("inf") if idle_timeout_s is None else idle_timeout_s / 2
        self._on_end = on_end
        self._on_cancel = on_cancel
        self.pending = 0
        self._calls = 0
        """Calls that have ended and were not reported."""
        self._is_busy = False
        self._last_call = self._loop.time()
        self._ticks = 0
        self._number = 0
        self._buffer = b""
        self._counted: dict[int, asyncio.Future[None]] = {}
        self._loop.add_reader(sock.fileno(), self._on_readable)

    def begin(self) -> bool:
        """Note the beginning of a call; False if it must be made through the host.

        After a long pause the host may be about to end the idle instance. Only the host knows, so
        the call must be made through it.
        """
        now = self._loop.time()
        pause_s, self._last_call = now - self._last_call, now
        if self._sock is None or (not self._is_busy and pause_s > self._longest_pause_s):
            return False
        self.pending += 1
        if not self._is_busy:
            self._is_busy = True
            self._send()
            self._loop.call_later(PAUSE_S, self._tick)
        return True

    def end(self) -> None:
        """Note the end of a call."""
        self.pending -= 1
        self._calls += 1
        self._last_call = self._loop.time()

    async def report(self) -> None:
        """Send a report and wait until the host has it, or is gone."""
        if self._sock is None:
            return
        counted = self._loop.create_future()
        self._counted[self._number + 1] = counted
        self._send()
        await counted

    def close(self) -> None:
        """Send a last report and disconnect. Idempotent."""
        sock, self._sock = self._sock, None
        if sock is not None:
            if self._calls:
                self._is_busy = bool(self.pending)
                with contextlib.suppress(OSError):  # the host is gone
                    sock.send(self._next_report())
            self._loop.remove_reader(sock.fileno())
            sock.close()
        for counted in self._counted.values():
            if not counted.done():
                counted.set_result(None)

    def _tick(self) -> None:
        if self._sock is None:
            return
        pause_s = self._loop.time() - self._last_call
        if not self.pending and pause_s >= PAUSE_S:
            self._is_busy = False
            self._send(pause_s)
            return
        self._ticks += 1
        if self._calls and self._ticks % 2 == 0:
            self._send()
        self._loop.call_later(PAUSE_S, self._tick)

    def _send(self, quiet_s: float = 0.0) -> None:
        assert self._sock is not None
        line = self._next_report(quiet_s)
        try:
            sent = self._sock.send(line)
        except OSError:
            sent = 0
        if sent < len(line):
            self._on_end()  # a host that does not read reports cannot count calls

    def _next_report(self, quiet_s: float = 0.0) -> bytes:
        self._number += 1
        calls, self._calls = self._calls, 0
        return line_of(ActivityReport(self._number, calls, self._is_busy, quiet_s))

    def _on_readable(self) -> None:
        assert self._sock is not None
        try:
            data = self._sock.recv(LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._on_end()
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._on_message(json.loads(line))

    def _on_message(self, message: dict[str, Any]) -> None:
        if "cancel" in message:
            self._on_cancel(message["cancel"])
            return
        counted = self._counted.pop(message["counted"], None)
        if counted is not None and not counted.done():
            counted.set_result(None)
