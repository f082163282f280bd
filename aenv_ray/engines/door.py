"""A sandbox reached through the fast door: the client side of `aenv_ray.runtime.door.door`."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import pydantic_core

from aenv_ray import errors
from aenv_ray.engines.base import OnProgress, Sandbox, lost
from aenv_ray.engines.door_requests import RuntimeRequests
from aenv_ray.ids import InstanceId
from aenv_ray.models import Isolation

CAUSE_WAIT_S: Final = 2.0
"""How long a broken connection waits to learn why; the launcher tells within milliseconds."""

_WATCH_S: Final = 0.5
"""How exactly an unanswered call's deadline is kept."""
_BUSY_CALLS: Final = 16
"""With this many calls waiting, a request waits `_BUSY_DELAY_S` for others to go with it."""
_BUSY_DELAY_S: Final = 0.001
_PATIENT_DELAY_S: Final = 0.002
"""How long a request waits that may. Each that is sent by itself wakes the sandbox and later the
host: a tenth of all that a call costs, on two cores. Calls come about four in a millisecond."""
MAX_MESSAGE_BYTES: Final = 256 * 1024 * 1024
"""A sandbox that sends a longer one is ended: its host serves others too."""
_READ_BYTES: Final = 65_536
"""Below the size from which malloc asks the kernel for each buffer."""
_LAST_ERROR_CHARACTERS: Final = 500
_ANSWER: Final = b'{"jsonrpc":"2.0","id":'


@dataclass(slots=True)
class _Waiting:
    """A call that has no answer yet."""

    future: asyncio.Future[bytes]
    method: str
    deadline: float
    """On the loop's clock."""
    on_progress: OnProgress | None
    token: str = ""


class DoorSandbox(Sandbox):
    """A sandbox whose runtime answers on a stream socket.

    It reads and writes the socket itself: a lone call is written at once and its answer taken apart
    where it is read, which a transport would do some turns of the event loop later.

    Args:
        instance_id: Whose sandbox it is.
        isolation: What separates it from the node.
        start_mode: How it came to be.
        find_cause: Waits for the reason of a broken connection.
        cause_wait_s: How long that may take.
    """

    def __init__(
        self,
        instance_id: InstanceId,
        isolation: Isolation,
        start_mode: str,
        find_cause: Callable[[], Awaitable[str]],
        cause_wait_s: float = CAUSE_WAIT_S,
    ) -> None:
        self.instance_id = instance_id
        self.isolation = isolation
        self.start_mode = start_mode
        self._find_cause = find_cause
        self._cause_wait_s = cause_wait_s
        self._ids = itertools.count(1)
        self._pending: dict[int, _Waiting] = {}
        self._outbox: list[bytes] = []
        self._is_watching = False
        self._buffer = bytearray()
        self._scanned = 0
        self._sock: socket.socket | None = None
        self._unsent = bytearray()
        self._loop = asyncio.get_running_loop()
        self._cause: str | None = None
        self._on_end: list[Callable[[str], None]] = []
        self._ending: asyncio.Task[None] | None = None
        self._closed = False
        self._last_error = ""
        self.requests = RuntimeRequests(self._send)
        """What the runtime asks of this side."""

    async def connect(self, sock: socket.socket) -> None:
        """Take over a connected socket."""
        sock.setblocking(False)
        self._sock = sock
        self._loop.add_reader(sock.fileno(), self._on_readable)

    # --- the socket ---------------------------------------------------------------------------

    def _on_readable(self) -> None:
        if self._sock is None:
            return
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as exc:
            self._on_broken(exc)
            return
        if not data:
            self._on_broken(None)
            return
        buffer = self._buffer
        buffer += data
        while True:
            end = buffer.find(b"\n", self._scanned)
            if end < 0:
                self._scanned = len(buffer)
                if len(buffer) > MAX_MESSAGE_BYTES:
                    self.end(f"it sent a message of more than {MAX_MESSAGE_BYTES} bytes")
                return
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            self._scanned = 0
            try:
                self._on_line(line)
            except (ValueError, KeyError, AttributeError, TypeError):
                self.end(f"it sent what is no answer: {line[:100]!r}")
                return

    def _on_broken(self, exc: OSError | None) -> None:
        self._hang_up()
        if not self._closed and self._cause is None:
            self._ending = self._loop.create_task(self._learn_cause(exc))

    def _send(self, data: bytes) -> None:
        if self._sock is None:
            return  # its end is told to all who wait
        if self._unsent:
            self._unsent += data
            return
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # reading tells the end, and its cause
        if sent < len(data):
            self._unsent += data[sent:]
            self._loop.add_writer(self._sock.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        if self._sock is None:
            return
        try:
            sent = self._sock.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            sent = len(self._unsent)
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._sock.fileno())

    def _hang_up(self) -> None:
        self.requests.stop()
        sock, self._sock = self._sock, None
        if sock is not None:
            self._loop.remove_reader(sock.fileno())
            self._loop.remove_writer(sock.fileno())
            sock.close()

    def _on_line(self, line: bytes) -> None:
        # What our own runtime writes is taken apart without decoding the result.
        if line.startswith(_ANSWER):
            id_end = line.index(b",", len(_ANSWER))
            request_id = int(line[len(_ANSWER) : id_end])
            waiting = self._pending.pop(request_id, None)
            if waiting is not None and not waiting.future.done():
                waiting.future.set_result(line[id_end + 1 : -1])
            return
        message = pydantic_core.from_json(line)
        if message.get("id", 0) is None:  # an error of no request: why it closes the connection
            self._last_error = str(message["error"]["message"])[:_LAST_ERROR_CHARACTERS]
            return
        if self.requests.take(message):
            return
        params = message.get("params") or {}
        for waiting in self._pending.values():
            if waiting.on_progress is not None and waiting.token == params.get("progressToken"):
                report = (params["progress"], params.get("total"), params.get("message"))
                waiting.on_progress(*report)

    async def _learn_cause(self, exc: OSError | None) -> None:
        try:
            async with asyncio.timeout(self._cause_wait_s):
                cause = await self._find_cause()
        except TimeoutError:
            cause = f"the connection to it broke ({self._last_error or exc or 'closed'})"
        self.end(cause)

    # --- Sandbox ------------------------------------------------------------------------------

    def end(self, cause: str) -> None:
        """Note that the sandbox ended and fail what waits for it. The first cause stays."""
        if self._cause is not None:
            return
        self._cause = cause
        pending, self._pending = self._pending, {}
        for waiting in pending.values():
            if not waiting.future.done():
                waiting.future.set_exception(lost(self.instance_id, cause))
        callbacks, self._on_end = self._on_end, []
        for callback in callbacks:
            callback(cause)
        self._hang_up()

    @property
    def end_cause(self) -> str | None:  # noqa: D102
        return self._cause

    def on_end(self, callback: Callable[[str], None]) -> None:  # noqa: D102
        if self._cause is not None:
            callback(self._cause)
        else:
            self._on_end.append(callback)

    async def request_json(  # noqa: D102
        self,
        method: str,
        params: bytes,
        *,
        deadline_s: float,
        on_progress: OnProgress | None = None,
        may_wait: bool = False,
    ) -> bytes:
        if self._cause is not None:
            raise lost(self.instance_id, self._cause)
        request_id = next(self._ids)
        future: asyncio.Future[bytes] = self._loop.create_future()
        waiting = _Waiting(future, method, self._loop.time() + deadline_s, on_progress)
        if on_progress is not None:
            # Tokens are the connection's: two calls may well have chosen the same one.
            waiting.token = f"p{request_id}"
            data = _readable(params)
            data["_meta"] = {**data.get("_meta", {}), "progressToken": waiting.token}
            params = pydantic_core.to_json(data)
        self._pending[request_id] = waiting
        if not self._is_watching:
            self._is_watching = True
            self._loop.call_later(_WATCH_S, self._watch)
        self._write(
            b'{"jsonrpc":"2.0","id":%d,"method":"%s","params":%s}\n'
            % (request_id, method.encode(), params),
            may_wait=may_wait,
        )
        try:
            outcome = await future
        except asyncio.CancelledError:
            self._pending.pop(request_id, None)
            self._cancel(request_id)
            raise
        if outcome.startswith(b'"result":'):
            return outcome[len(b'"result":') :]
        error = pydantic_core.from_json(b"{" + outcome + b"}")["error"]
        raise errors.from_wire(
            error.get("data") or {"code": "internal_error", "message": error.get("message")},
            instance_id=self.instance_id,
        )

    def _cancel(self, request_id: int) -> None:
        """Tell the sandbox that nobody waits for a call any more (invariant 11)."""
        self._write(
            b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":%d}}\n'
            % request_id
        )

    def _watch(self) -> None:
        """Fail calls that the sandbox did not answer in time; runs only while some wait."""
        now = self._loop.time()
        for request_id, waiting in list(self._pending.items()):
            if waiting.deadline <= now:
                del self._pending[request_id]
                if not waiting.future.done():
                    waiting.future.set_exception(self._overdue(waiting.method))
        self._is_watching = bool(self._pending)
        if self._is_watching:
            self._loop.call_later(_WATCH_S, self._watch)

    def _overdue(self, method: str) -> errors.CallOutcomeUnknown:
        return errors.CallOutcomeUnknown(
            f"the sandbox of {self.instance_id} did not answer {method} in time",
            instance_id=self.instance_id,
            hint="it may be stuck; release it and create another",
        )

    def _left(self, method: str) -> errors.CallOutcomeUnknown:
        return errors.CallOutcomeUnknown(
            f"the connection to {self.instance_id} was closed before {method} had an answer",
            instance_id=self.instance_id,
            hint="the call goes on: repeat it with the same call id",
        )

    def _write(self, line: bytes, *, may_wait: bool = False) -> None:
        """Send at once; what may wait, and all in a burst, with what comes soon after it."""
        if may_wait or len(self._pending) >= _BUSY_CALLS:
            if not self._outbox:
                delay_s = _PATIENT_DELAY_S if may_wait else _BUSY_DELAY_S
                self._loop.call_later(delay_s, self._flush)
            self._outbox.append(line)
        elif self._outbox:
            self._outbox.append(line)
            self._flush()  # what waited is ahead of it, and goes with it
        else:
            self._send(line)

    def _flush(self) -> None:
        if self._outbox:
            lines, self._outbox = self._outbox, []
            self._send(b"".join(lines))

    async def close(self) -> None:  # noqa: D102
        self._closed = True
        pending, self._pending = self._pending, {}
        for waiting in pending.values():
            if not waiting.future.done():
                waiting.future.set_exception(self._left(waiting.method))
        self._hang_up()
        if self._ending is not None:
            self._ending.cancel()


def _readable(params: bytes) -> dict[str, Any]:
    """Return a call's parameters.

    Raises:
        ToolInputInvalid: They can be written as JSON, but not read.
    """
    try:
        data: dict[str, Any] = pydantic_core.from_json(params)
    except ValueError as exc:
        raise errors.ToolInputInvalid(
            f"the arguments cannot be read: {exc}",
            hint="nest them less deeply, and write long numbers as text",
        ) from None
    return data
